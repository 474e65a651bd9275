"""How a response ends that comes in parts: whether one that was cut is at its end, and its text when it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from streamfold.samples.detokenizer import Stop, has_stopped_at, where_stopped, whole_text
from streamfold.samples.reset import KNOWN_TEXT, TURN, note, restart, rewind

if TYPE_CHECKING:
    from streamfold._core import Generation
    from streamfold._types import SampleLike, Tokenizer
    from streamfold.engines.base import EngineSpec

__all__ = ["Ending", "Outlook"]

Outlook: TypeAlias = Literal["ended", "goes on", "goes back"]
_ENDED: Final = ("COMPLETED", "TRUNCATED")
# Sampling parameters that count from the first token of a call: grammars, and patterns that only the engine can read.
_OF_ONE_CALL: Final = ("json_schema", "regex", "ebnf", "structural_tag", "structured_outputs", "stop_regex")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What ends one sample's response.

    A sample may have turns: PENDING with a response it begins another one behind that, whatever that ends with. Only
    what the turn itself has brought can end it.

    Args:
        sample: ours or a host's.
        params: the sampling parameters for the whole response.
        engine_spec: the engine's.
        tokenizer: makes text of ids.
        ends: tokens that end any response; added to.
        has_experts: whether routed experts are asked for.
    """

    sample: SampleLike
    params: dict[str, Any]
    engine_spec: EngineSpec
    tokenizer: Tokenizer | None
    ends: set[int]
    has_experts: bool

    @property
    def has_come(self) -> bool:
        """Whether the sample is at its end by its status."""
        return self.sample.status.name in _ENDED

    def begin(self) -> None:
        """Note where a turn begins that follows others."""
        sample, notes = self.sample, dict(self.sample.metadata or {})
        if sample.status.name != "PENDING" or not (sample.response_length or notes.keys() & {TURN, KNOWN_TEXT}):
            return
        if notes.pop(KNOWN_TEXT, None) is not None and sample.response_length:
            notes["text_joined"] = True  # of a turn that was cut and not gone on with
        sample.metadata = {**notes, TURN: [sample.response_length, len(sample.response)]}

    def settle(self) -> Outlook:
        """See how a sample stands. One that was cut, and is at its end all the same, gets its status and whole text."""
        sample = self.sample
        if self.has_come:
            return "ended"
        stop = self._stop()
        if (ended_as := self._ended_as(stop)) is not None:
            if self._lacks_experts:
                return "goes back"  # no later call will bring them
            self._end(ended_as, stop)
            return "ended"
        if not self._has_nothing and (
            len(sample.tokens) == sample.response_length  # the prompt's ids are not known
            or stop.within  # an engine knows only what it generates in the one call
            or self._has_grammar
        ):
            return "goes back"
        return "goes on"

    def go_back(self) -> None:
        """Drop what the turn has brought."""
        tokens, characters = self._turn
        if tokens:
            rewind(self.sample, tokens, characters)
        else:
            restart(self.sample)
            self.sample.status = type(self.sample.status)["ABORTED"]  # as one that was cut before its first token

    def learn(self, generation: Generation) -> None:
        """Take note of the model's own end, which is not one of this sample alone."""
        end, params = generation.matched, self.params
        if self._has_grammar:  # which ends with any token, and that is then named
            return
        unnamed = not (self.engine_spec.reports_stop_token or params.get("stop") or params.get("ignore_eos"))
        if unnamed and end is None and generation.finish_reason == "stop" and len(generation.token_ids):
            end = int(generation.token_ids[-1])
        if isinstance(end, int) and end not in (params.get("stop_token_ids") or ()):
            self.ends.add(end)

    def text_of(self, generation: Generation) -> str | None:
        """The text of a call that came without one; as engines do, without what it stopped at."""
        if generation.text is not None or self.tokenizer is None or not len(generation.token_ids):
            return None
        ids, matched, stopped = generation.token_ids.tolist(), generation.matched, generation.finish_reason == "stop"
        shows, skips = self.params.get("no_stop_trim"), self.params.get("skip_special_tokens", True)
        if stopped and not shows and ids[-1] == matched:
            del ids[-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=skips)
        if not stopped or not isinstance(matched, str) or not matched:
            return text
        at = where_stopped(text, self.tokenizer.decode(ids[:-1], skip_special_tokens=skips), matched)
        return text if at < 0 else text[: at + len(matched) if shows else at]

    @property
    def known_text(self) -> int:
        """So many characters of the response stand before the first border at which it was only joined."""
        known: int = (self.sample.metadata or {}).get(KNOWN_TEXT, len(self.sample.response))
        return known

    def border(self, generation: Generation, known: int) -> None:
        """See to the text at the border between what there was and what ``generation`` has added to it.

        Args:
            generation: the call that has just been written.
            known: :attr:`known_text` before that.
        """
        sample, more = self.sample, len(generation.token_ids)
        ended = generation.finish_reason in ("stop", "length")
        has_border = sample.response_length - more > self._turn[0]
        if not has_border or not (more or ended):
            return
        if ended or self.tokenizer is None:
            matched = generation.matched if more else None
            if matched is None and more and generation.finish_reason == "stop":
                matched = self._hidden_end
            self._retell(known, generation.text, matched, alone=generation.text is None)
        else:  # to decode it takes time, which an abort of thousands has not
            sample.metadata = {**(sample.metadata or {}), KNOWN_TEXT: known}

    def _ended_as(self, stop: Stop) -> str | None:
        """What a cut response amounts to, if it has come to its end all the same."""
        limit = self.params.get("max_new_tokens")
        full = isinstance(limit, int) and self.sample.response_length >= limit
        if full and (self._has_nothing or self.engine_spec.length_before_stop):
            return "TRUNCATED"
        if not self._has_nothing and (self._has_end_token or stop.end is not None):
            return "COMPLETED"
        return "TRUNCATED" if full else None

    def _end(self, ended_as: str, stop: Stop) -> None:
        """Give a cut response the status and the text of one that has ended so."""
        sample, completed = self.sample, ended_as == "COMPLETED"
        if not self._has_nothing:
            by_token = completed and self._has_end_token
            self._retell(self.known_text, matched=self._hidden_end if by_token else None)
            if completed and not by_token and stop.end is not None:
                sample.response = sample.response[: self._turn[1] + stop.end]
        sample.status = type(sample.status)[ended_as]

    @property
    def _has_end_token(self) -> bool:
        """Whether the last token is an end. An engine that aborts a request does not look whether it is."""
        return self.sample.tokens[-1] in self._end_tokens

    @property
    def _end_tokens(self) -> set[int]:
        given = set(self.params.get("stop_token_ids") or ())
        if not self.params.get("ignore_eos"):
            return self.ends | given
        return set() if self.engine_spec.ignores_given_ends else given

    @property
    def _hidden_end(self) -> int | None:
        """The last token, if it is an end that no text shows: one the engine names, or leaves out of its own text."""
        last, engine_spec = self.sample.tokens[-1], self.engine_spec
        hides = (
            engine_spec.reports_stop_token
            or engine_spec.tells_text
            or last in (self.params.get("stop_token_ids") or ())
        )
        return last if hides and last in self._end_tokens else None

    def _stop(self) -> Stop:
        """Where a cut response stands with its stop strings. An engine looks for them in what it generates itself."""
        sample, params, engine_spec = self.sample, self.params, self.engine_spec
        if self._has_nothing or not params.get("stop"):
            return Stop(None, within=False)
        unknown = Stop(None, within=True)
        if engine_spec.stops_after_minimum and params.get("min_new_tokens"):
            return unknown
        begins = self._turn[1]
        text = sample.response[begins:]
        lags = engine_spec.delays_text and not params.get("no_stop_trim")
        # Without a text of the engine's, or without its end, nothing is known.
        stop = unknown if lags or not text else has_stopped_at(text, params, whole=False)
        has_borders = KNOWN_TEXT in (sample.metadata or {})
        if stop == Stop(None, within=False) and not has_borders:
            return stop  # whatever a text of one call may lack at its end: to decode it takes time
        whole = self._whole_text(self.known_text)
        return stop if whole is None else has_stopped_at(whole[begins:], params)

    def _retell(
        self, known: int, last: str | None = None, matched: int | str | None = None, *, alone: bool = False
    ) -> None:
        """Make the text of a response that came in parts one text, or say that it was only joined."""
        sample, text = self.sample, self._whole_text(known, last, matched, alone=alone)
        if text is not None:
            sample.response = text
        elif last is not None:  # an empty one too: the part before it may have held half a character back
            note(sample, text_joined=True)
        sample.metadata = {key: value for key, value in (sample.metadata or {}).items() if key != KNOWN_TEXT}

    def _whole_text(
        self, known: int, last: str | None = None, matched: int | str | None = None, *, alone: bool = False
    ) -> str | None:
        """Make one text of the turn's ids; None without a tokenizer, or if the engine knows better."""
        if self.tokenizer is None:
            return None
        return whole_text(
            self.sample,
            self.tokenizer,
            self.params,
            turn=self._turn,
            known=known,
            last=last,
            matched=matched,
            alone=alone or not self.engine_spec.tells_text,
            lags=self.engine_spec.delays_text,
        )

    @property
    def _turn(self) -> tuple[int, int]:
        """So many tokens and characters of the response stand before the turn that is being generated."""
        tokens, characters = (self.sample.metadata or {}).get(TURN, (0, 0))
        return tokens, characters

    @property
    def _has_grammar(self) -> bool:
        return any(self.params.get(name) for name in _OF_ONE_CALL)

    @property
    def _has_nothing(self) -> bool:
        """Whether nothing of the turn has come yet."""
        return bool(self.sample.response_length == self._turn[0])

    @property
    def _lacks_experts(self) -> bool:
        rows = getattr(self.sample, "rollout_routed_experts", None)
        return self.has_experts and not self._has_nothing and (rows is None or len(rows) != len(self.sample.tokens) - 1)
