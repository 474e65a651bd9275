"""Has a response stopped? Stop strings, stop tokens and ``max_new_tokens``, applied to a response that was aborted.

An engine that aborts a request does not check whether its last token or its text was the end, and in the next request
it looks for stop strings only in what it generates there. So the client has to decide whether an aborted response is
finished, can be resumed, or has to be restarted. All functions here take values and return values; none touches a
sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from streamfold._core import Generation
    from streamfold.engines.base import EngineSpec

__all__ = ["NO_STOP", "UNKNOWN_STOP", "StopMatch", "StopRules", "Verdict", "find_stop_string", "stop_position"]

# Sampling parameters whose state starts over in each request: grammars, and patterns that only the engine can match.
_OF_ONE_REQUEST: Final = ("json_schema", "regex", "ebnf", "structural_tag", "structured_outputs", "stop_regex")
_NEUTRAL: Final = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}  # no penalty
_REPLACEMENT: Final = "\ufffd"  # how a character is decoded of which only a part has been generated


class Verdict(Enum):
    """What is to be done with a response whose call was aborted or failed."""

    FINISHED = "finished"  # nothing: it had stopped
    RESUME = "resume"  # request the rest, from the prompt and the generated tokens
    RESTART = "restart"  # drop what the turn has generated and request it again


class StopMatch(NamedTuple):
    """The result of a search for stop strings.

    Attributes:
        end: where the response's text ends, if a stop string is in it; otherwise None.
        is_partial: whether the text ends in what may become a stop string.
    """

    end: int | None
    is_partial: bool


NO_STOP: Final = StopMatch(None, is_partial=False)
UNKNOWN_STOP: Final = StopMatch(None, is_partial=True)


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """What ends a response.

    Attributes:
        params: the sampling parameters of the whole response.
        engine_spec: the engine's behaviour.
        eos_ids: tokens that end any response, besides ``stop_token_ids``.
    """

    params: Mapping[str, Any]
    engine_spec: EngineSpec
    eos_ids: AbstractSet[int]

    @property
    def has_grammar(self) -> bool:
        """Whether the response is constrained by something that a resumed request would start from its beginning."""
        return any(self.params.get(name) for name in _OF_ONE_REQUEST)

    @property
    def has_reset_penalties(self) -> bool:
        """Whether a penalty has an effect that a resumed request would start from its beginning."""
        given = ((name, self.params.get(name)) for name in self.engine_spec.resets_penalties)
        return any(value is not None and value != _NEUTRAL[name] for name, value in given)

    @property
    def has_stop_strings(self) -> bool:
        """Whether stop strings are given."""
        return bool(self.params.get("stop"))

    @property
    def stops_after_minimum(self) -> bool:
        """Whether the engine ignores stop strings at first, so that it is not known which one it would stop at."""
        return self.engine_spec.stops_after_minimum and bool(self.params.get("min_new_tokens"))

    def finish_status(self, tokens_left: int | None, last_token: int | None, stop: StopMatch) -> str | None:
        """Give the status of an aborted response that is finished all the same; None if it is not.

        Args:
            tokens_left: how many more tokens may be generated; None if there is no limit.
            last_token: the last token of the turn; None if the turn has none yet.
            stop: the stop string found in the turn's text.
        """
        is_full = tokens_left is not None and tokens_left <= 0
        if is_full and (last_token is None or self.engine_spec.length_before_stop):
            return "TRUNCATED"
        if last_token is not None and (self.is_stop_token(last_token) or stop.end is not None):
            return "COMPLETED"
        return "TRUNCATED" if is_full else None

    def is_stop_token(self, token: int) -> bool:
        """Whether a token ends the response. An engine that aborts a request does not check that."""
        given = set(self.params.get("stop_token_ids") or ())
        if not self.params.get("ignore_eos"):
            return token in self.eos_ids or token in given
        return token in given and not self.engine_spec.ignores_given_ends

    def hidden_stop_token(self, token: int) -> int | None:
        """Give ``token`` if it ends the response and is left out of the text: by its engine, or as one that it names.

        Engines name the stop tokens that they were given; some name the model's own EOS too.
        """
        spec = self.engine_spec
        is_hidden = spec.reports_stop_token or spec.tells_text or token in (self.params.get("stop_token_ids") or ())
        return token if is_hidden and self.is_stop_token(token) else None

    def revealed_eos(self, generation: Generation) -> int | None:
        """Give the model's EOS token if a generation has stopped at it; None if it stopped at anything else."""
        if self.has_grammar:  # it can end with any token, which is then named as the stop token
            return None
        token = generation.matched
        if token is None and self._stopped_unreported(generation):
            token = int(generation.token_ids[-1])
        given = self.params.get("stop_token_ids") or ()
        return token if isinstance(token, int) and token not in given else None

    def _stopped_unreported(self, generation: Generation) -> bool:
        """Whether a generation stopped at an EOS that the engine does not name."""
        if self.engine_spec.reports_stop_token or self.has_stop_strings or self.params.get("ignore_eos"):
            return False
        return generation.finish_reason == "stop" and len(generation.token_ids) > 0

    def find_in_engine_text(self, text: str) -> StopMatch:
        """Search the text that the engine sent with an aborted response: its end may be missing."""
        is_late = self.engine_spec.delays_text and not self.params.get("no_stop_trim")
        if is_late or not text:
            return UNKNOWN_STOP
        return find_stop_string(text, self.params, is_complete=False)


def find_stop_string(text: str, params: Mapping[str, Any], *, is_complete: bool = True) -> StopMatch:
    """Search a text for the stop strings of some sampling parameters.

    Args:
        text: what has been generated. U+FFFD at its end is a character of which only a part has been generated.
        params: the sampling parameters.
        is_complete: whether the text is that of all tokens. If not, such a part of a character may be missing at its
            end, together with the word before it: what follows the last space.
    """
    given = params.get("stop") or []
    stops = [stop for stop in ([given] if isinstance(given, str) else given) if stop]
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        at, stop = min(found)
        return StopMatch(at + len(stop) if params.get("no_stop_trim") else at, is_partial=False)
    return StopMatch(None, any(_may_become(text, stop, is_complete=is_complete) for stop in stops))


def _may_become(text: str, stop: str, *, is_complete: bool) -> bool:
    """Whether a text ends in a part of a stop string."""
    whole = text.rstrip(_REPLACEMENT)  # of whole characters
    may_hold_part = not is_complete or whole != text
    for size, character in enumerate(stop):
        if size and whole == text and text.endswith(stop[:size]):
            return True
        if may_hold_part and not character.isascii():
            shortest = size if is_complete else stop.rfind(" ", 0, size) + 1
            if any(whole.endswith(stop[:length]) for length in range(shortest, size + 1)):
                return True
    return False


def stop_position(text: str, text_before_last: str, stop: str) -> int:
    """Where the stop string starts at which a text has stopped; -1 if it is not in the text.

    Args:
        text: of all tokens.
        text_before_last: the text of all tokens but the last, in which the engine had not found the stop string.
        stop: the stop string.
    """
    at = text.find(stop, max(0, len(text_before_last) - len(stop) + 1))
    return at if at >= 0 else text.rfind(stop)  # the engine may have generated several tokens at once
