"""Apply calls to a sample: write what they generated, keep its text exact, decide whether it is finished.

:mod:`~streamfold.samples.stopping` and :mod:`~streamfold.samples.detokenizer` compute; a :class:`Turn` applies their
results to a sample, ours or a trainer's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streamfold.errors import StreamfoldError
from streamfold.samples.detokenizer import DecodedText, Detokenizer
from streamfold.samples.experts import count_rows
from streamfold.samples.merging import merge
from streamfold.samples.metadata import LastWrite, TurnState, add_counts
from streamfold.samples.reset import end_before_observations, restart, rewind
from streamfold.samples.status import is_finished
from streamfold.samples.stopping import NO_STOP, UNKNOWN_STOP, StopMatch, StopRules, Verdict, find_stop_string

if TYPE_CHECKING:
    from streamfold._core import Generation
    from streamfold._types import SampleLike, Tokenizer
    from streamfold.engines.base import EngineSpec

__all__ = ["Turn", "open_turn"]


def open_turn(sample: SampleLike, limit: int | None) -> bool:
    """Whether another turn begins: what stands behind the last call is not of it, whatever the status says.

    Otherwise the last turn goes on, unless it was finished: a sample that was set to ABORTED afterwards gets its status
    back, but not one that was TRUNCATED at a lower limit.

    Args:
        sample: ours or a host's.
        limit: how many tokens the response may have; None if there is no limit.

    Raises:
        ValueError: tokens were added that the response's length does not count.
    """
    written = LastWrite.of(sample)
    if written is None or not sample.response_length or sample.status.name == "FAILED":
        return bool(sample.status.name == "PENDING")
    written.check_prompt(sample)
    if sample.response_length > written.tokens:
        sample.status = type(sample.status)["PENDING"]
        return True
    if sample.status.name == "ABORTED" and _is_still_finished(sample, written, limit):
        sample.status = type(sample.status)[written.status]
    return bool(sample.status.name == "PENDING" and written.status != "PENDING")


def _is_still_finished(sample: SampleLike, written: LastWrite, limit: int | None) -> bool:
    """Whether the response is the one that was finished."""
    has_more_room = limit is not None and written.limit is not None and limit > written.limit
    is_finished = written.status == "COMPLETED" or (written.status == "TRUNCATED" and not has_more_room)
    return is_finished and sample.response_length == written.tokens


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The turn of a sample's response that is being generated.

    Only what the turn itself has generated can end it: a tool's answer may end in a stop token.

    Args:
        sample: ours or a host's.
        params: the sampling parameters for the whole response.
        engine_spec: the engine's behaviour.
        tokenizer: of the model; None: texts of several calls are concatenated.
        eos_ids: tokens that end any response. Those at which the engine is seen to stop are added.
        has_experts: whether routed experts are requested.
        has_indexer: whether the rows of a sparse attention's indexers are.
        has_fixed_prompt: whether each request sends the same prompt, without the tokens generated so far: a response
            that was aborted is then restarted.
        restarts_penalties: whether a response with penalties is restarted, if the engine would count them anew in the
            call that resumes it.
        max_new_tokens_per_turn: limits what a turn generates.
        max_response_len: limits the whole response, with what tools have answered.
    """

    sample: SampleLike
    params: dict[str, Any]
    engine_spec: EngineSpec
    tokenizer: Tokenizer | None
    eos_ids: set[int]
    has_experts: bool
    has_indexer: bool = False
    has_fixed_prompt: bool = False
    restarts_penalties: bool = False
    max_new_tokens_per_turn: int | None = None
    max_response_len: int | None = None

    def open(self) -> bool:
        """Whether it begins, behind others; see :func:`open_turn`."""
        return open_turn(self.sample, self._response_limit)

    @property
    def tokens_left(self) -> int | None:
        """How many tokens the turn may still generate, below 0 if it has more than that; None: there is no limit."""
        limit, per_turn = self._response_limit, self.max_new_tokens_per_turn
        ends = [limit] if per_turn is None else [limit, self._state.tokens + per_turn]
        known = [end for end in ends if end is not None]
        return min(known) - self.sample.response_length if known else None

    @property
    def _response_limit(self) -> int | None:
        given = (self.params.get("max_new_tokens"), self.max_response_len)
        limits = [limit for limit in given if isinstance(limit, int) and limit >= 0]  # others are for the client
        return min(limits) if limits else None

    def begin(self) -> None:
        """Save where the turn starts, behind others.

        A response without room for it is TRUNCATED, and ends before the tool's answer.
        """
        sample, state, limit, written = self.sample, self._state, self._response_limit, LastWrite.of(self.sample)
        if limit is not None and sample.response_length >= limit and written is not None:
            end_before_observations(sample, written)
            return
        if not sample.response_length and state == TurnState():
            return
        was_unfinished = state.exact_characters is not None and sample.response_length > 0
        new = replace(state, tokens=sample.response_length, characters=len(sample.response), exact_characters=None)
        replace(new, text_joined=state.text_joined or was_unfinished).save(sample)
        if written is None or sample.response_length == written.tokens:
            LastWrite.save(sample, limit=limit)
        else:  # it tells where the observations begin
            written._replace(limit=limit).store(sample)

    def judge(self) -> Verdict:
        """Decide what is to be done next. An aborted response that is finished gets its status and its whole text."""
        if is_finished(self.sample):
            return Verdict.FINISHED
        stop = self._find_stop()
        status = self._rules.finish_status(self.tokens_left, self._last_token, stop)
        if status is not None:
            if self._lacks_rows:
                return Verdict.RESTART  # no later call sends them
            self._finish(status, stop)
            return Verdict.FINISHED
        if self._last_token is None:
            return Verdict.RESUME
        lacks_prompt_ids = self.has_fixed_prompt or len(self.sample.tokens) == self.sample.response_length
        return Verdict.RESTART if lacks_prompt_ids or self._would_start_over(stop) else Verdict.RESUME

    def _would_start_over(self, stop: StopMatch) -> bool:
        """Whether a resumed request would match a stop string or a grammar, or count penalties, from its beginning."""
        counts_anew = self.restarts_penalties and self._rules.has_reset_penalties
        return stop.is_partial or self._rules.has_grammar or counts_anew

    def restart(self) -> None:
        """Drop what the turn has generated; the sample is ABORTED, as one that was aborted before its first token."""
        state = self._state
        if state.tokens:
            rewind(self.sample, state.tokens, state.characters)
        else:
            restart(self.sample)
            self.sample.status = type(self.sample.status)["ABORTED"]

    def truncate(self) -> None:
        """Finish an aborted response where it is: TRUNCATED, unless it is at its end by its own rules.

        Raises:
            StreamfoldError: its last tokens lack their routed experts.
        """
        if self.judge() is Verdict.FINISHED:
            return
        if self._lacks_rows:
            raise StreamfoldError("the routed experts of the last tokens are missing: only a further call sends them")
        self._finish("TRUNCATED", NO_STOP)

    def write(self, generation: Generation, args: Any) -> None:  # noqa: ANN401  # the host's own
        """Merge what a call has generated into the sample, and keep its text exact."""
        try:
            self._write(generation, args)
        finally:
            if len(generation.token_ids) or is_finished(self.sample):
                LastWrite.save(self.sample, limit=self._response_limit)

    def _write(self, generation: Generation, args: Any) -> None:  # noqa: ANN401  # the host's own
        if (eos := self._rules.revealed_eos(generation)) is not None:
            self.eos_ids.add(eos)
        state = self._state
        if state.exact_characters is None:
            state = replace(state, exact_characters=len(self.sample.response))
        merge(self.sample, generation, args, text=self._text_of(generation))
        if self.tokenizer is None and self._may_have_repeated(generation):
            state = replace(state, text_unchecked=True)
            replace(self._state, text_unchecked=True).save(self.sample)
        if self.sample.response_length - len(generation.token_ids) <= state.tokens:
            self._check_text(generation)
            return
        if len(generation.token_ids) and self._rules.has_reset_penalties:
            add_counts(self.sample, resumed_penalties=1)
        self._join_text(generation, state)

    # The text.

    def _text_of(self, generation: Generation) -> str | None:
        """The text of a call for which the engine sent none."""
        if generation.text is not None or self._detokenizer is None or not len(generation.token_ids):
            return None
        ids = generation.token_ids.tolist()
        return self._detokenizer.text_of_call(ids, generation.finish_reason, generation.matched)

    def _may_have_repeated(self, generation: Generation) -> bool:
        """Whether the engine's text may have characters twice, as far as one can see."""
        text = generation.text
        if not self.engine_spec.repeats_text or text is None or text.isascii():  # those are never held back
            return False
        return generation.max_tokens_per_event > 1

    def _check_text(self, generation: Generation) -> None:
        """Correct the text of a turn that one call has finished, if it is none that the engine would have shown."""
        stopped = generation.finish_reason == "stop"
        is_finished = stopped or generation.finish_reason == "length"
        if self._detokenizer is None or not self.engine_spec.tells_text or generation.text is None:
            return
        if not is_finished or not len(generation.token_ids):
            return
        sample, matched = self.sample, generation.matched
        if matched is None and stopped:
            matched = self._hidden_stop_token
        text = self._detokenizer.text_of_finished_call(
            sample.tokens, sample.response_length, sample.response, self._state, stopped=stopped, matched=matched
        )
        if text.is_corrected:
            self._correct(text)

    def _correct(self, text: DecodedText) -> None:
        """Take a decoded text; if it replaces one that the engine would not have shown, that is counted."""
        self.sample.response = text.text
        if text.is_corrected:
            add_counts(self.sample, corrected_text=1)

    def _join_text(self, generation: Generation, before: TurnState) -> None:
        """Correct the text where a call, which has just been merged, continues that of an earlier one.

        Args:
            generation: of the call.
            before: the state before it was merged.
        """
        has_tokens, stopped = len(generation.token_ids) > 0, generation.finish_reason == "stop"
        is_last = stopped or generation.finish_reason == "length"
        if not has_tokens and not is_last:
            return
        if not is_last and self._detokenizer is not None:
            before.save(self.sample)  # decoded when the response is finished: aborting thousands must not take time
            return
        matched = generation.matched if has_tokens else None
        if matched is None and has_tokens and stopped:
            matched = self._hidden_stop_token
        text = self._decode(before, generation.text, matched, uses_prompt=generation.text is not None)
        self._set_text(text, is_joined=text is None and generation.text is not None)

    def _set_text(self, text: DecodedText | None, *, is_joined: bool) -> None:
        """Make ``text`` that of the response, if there is one; all of it is exact then, or remains concatenated."""
        if text is not None:
            self._correct(text)
        state = self._state
        replace(state, exact_characters=None, text_joined=state.text_joined or is_joined).save(self.sample)

    def _decode(
        self,
        state: TurnState,
        last_text: str | None = None,
        matched: int | str | None = None,
        *,
        uses_prompt: bool = True,
    ) -> DecodedText | None:
        """Decode the whole response; None without a tokenizer, or if its text is not of its tokens alone."""
        if self._detokenizer is None:
            return None
        sample = self.sample
        return self._detokenizer.text_of_response(
            sample.tokens,
            sample.response_length,
            sample.response,
            state,
            last_text=last_text,
            matched=matched,
            uses_prompt=uses_prompt,
        )

    # The end.

    def _find_stop(self) -> StopMatch:
        """Search the turn's text for stop strings."""
        rules, state = self._rules, self._state
        if self._last_token is None or not rules.has_stop_strings:
            return NO_STOP
        if rules.stops_after_minimum:
            return UNKNOWN_STOP
        match = rules.find_in_engine_text(self.sample.response[state.characters :])
        if match == NO_STOP and state.exact_characters is None:
            return match  # what is missing at the end of one call's text makes no difference: decoding takes time
        decoded = self._decode(state)
        return match if decoded is None else find_stop_string(decoded.text[state.characters :], self.params)

    def _finish(self, status: str, stop: StopMatch) -> None:
        """Give an aborted response the status and the text of one that finished in the same way."""
        sample, state = self.sample, self._state
        if self._last_token is not None:
            by_token = status == "COMPLETED" and self._rules.is_stop_token(self._last_token)
            text = self._decode(state, matched=self._hidden_stop_token if by_token else None)
            self._set_text(text, is_joined=False)
            if status == "COMPLETED" and not by_token and stop.end is not None:
                sample.response = sample.response[: state.characters + stop.end]
        sample.status = type(sample.status)[status]
        LastWrite.save(sample, limit=self._response_limit)

    @property
    def _last_token(self) -> int | None:
        """The last token that the turn has generated; None if it has none yet."""
        return self.sample.tokens[-1] if self.sample.response_length != self._state.tokens else None

    @property
    def _hidden_stop_token(self) -> int | None:
        return self._rules.hidden_stop_token(self.sample.tokens[-1])

    @property
    def _lacks_rows(self) -> bool:
        """Whether rows beside the tokens were requested that an aborted call has not brought."""
        if self._last_token is None:
            return False
        requested = {"rollout_routed_experts": self.has_experts, "rollout_indexer_topk": self.has_indexer}
        whole = len(self.sample.tokens) - 1
        return any(count_rows(self.sample, name) != whole for name, is_requested in requested.items() if is_requested)

    @property
    def _state(self) -> TurnState:
        return TurnState.of(self.sample)

    @cached_property
    def _rules(self) -> StopRules:
        return StopRules(params=self.params, engine_spec=self.engine_spec, eos_ids=self.eos_ids)

    @cached_property
    def _detokenizer(self) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        spec = self.engine_spec
        return Detokenizer(
            tokenizer=self.tokenizer, params=self.params, uses_prompt=spec.tells_text, delays_text=spec.delays_text
        )
