"""The text of a response that was cut: one text out of its ids, and the stop strings in it.

Engines decode what they generate in one call. At the border of two calls a character of several tokens falls apart:
its first half is held back by one call and looked at as a part of the prompt by the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold._types import SampleLike, Tokenizer

__all__ = ["Stop", "has_stopped_at", "where_stopped", "whole_text"]

_CONTEXT: Final = 5  # tokens of the prompt that decide how the first ones of a response are written
_LOOK_BACK: Final = 16  # characters of the engine's text that have to agree with ours


class Stop(NamedTuple):
    """Where a text stands with the stop strings that were asked for.

    Attributes:
        end: where the response ends, as one of them is in it; otherwise None.
        within: whether the text ends in what may become one.
    """

    end: int | None
    within: bool


def has_stopped_at(text: str, params: Mapping[str, Any], *, whole: bool = True) -> Stop:
    """Look for the stop strings of some sampling parameters.

    Args:
        text: what has been generated. U+FFFD at its end is a character of which only a part has come.
        params: the sampling parameters.
        whole: whether the text is that of all tokens. If not, such a part of a character may be missing at its end,
            and the word before it: what follows the last space.
    """
    told = params.get("stop") or []
    stops = [stop for stop in ([told] if isinstance(told, str) else told) if stop]
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        at, stop = min(found)
        return Stop(at + len(stop) if params.get("no_stop_trim") else at, within=False)
    complete = text.rstrip("\ufffd")
    half = not whole or complete != text

    def has_begun(stop: str, size: int) -> bool:
        if size and complete == text and complete.endswith(stop[:size]):
            return True
        if not half or stop[size].isascii():
            return False
        first = size if whole else stop.rfind(" ", 0, size) + 1
        return any(complete.endswith(stop[:shown]) for shown in range(first, size + 1))

    return Stop(None, any(has_begun(stop, size) for stop in stops for size in range(len(stop))))


def where_stopped(text: str, before_last: str, stop: str) -> int:
    """Where the stop string begins at which a text has ended, by what it was before its last token; -1 if nowhere."""
    at = text.find(stop, max(0, len(before_last) - len(stop) + 1))
    return at if at >= 0 else text.rfind(stop)  # several tokens may have come at once


def whole_text(
    sample: SampleLike,
    tokenizer: Tokenizer,
    params: Mapping[str, Any],
    *,
    turn: tuple[int, int] = (0, 0),
    known: int,
    last: str | None,
    matched: int | str | None,
    alone: bool = False,
    lags: bool = False,
) -> str | None:
    """Decode a response that came in parts, once, with the tokens before it as context.

    Args:
        sample: with the response's ids.
        tokenizer: of the model.
        params: the sampling parameters: whether special tokens and stop strings are shown.
        turn: tokens and characters at the beginning of the response that stand as they are.
        known: characters at the beginning of the response's text that stand. What else it has was joined.
        last: the engine's own text of the last part, to see how much of its end is shown; None if it sent none.
        matched: the stop token or string that ended the response.
        alone: the engine sends no text, so that a response of one call is decoded without the tokens before it.
        lags: the engine tells a character with its last token: one that the prompt leaves open is of the response's
            text, and a half one at the end of none. Otherwise the first is of the prompt's, and the other is shown.

    Returns:
        The text; None if it does not begin as what stands, or not end as the engine's, which then knows better.
    """
    skip = params.get("skip_special_tokens", True)
    tokens_before, begins = turn
    start = len(sample.tokens) - sample.response_length + tokens_before
    ids, before = sample.tokens[start:], sample.tokens[max(0, start - _CONTEXT) : start]

    def decode(head: list[int], ids: list[int]) -> str:
        context = tokenizer.decode(head, skip_special_tokens=skip)
        text, complete = tokenizer.decode(head + ids, skip_special_tokens=skip), context.rstrip("\ufffd")
        if text.startswith(complete):
            return text[len(complete if lags else context) :]
        return tokenizer.decode(ids, skip_special_tokens=skip)

    stands = sample.response[begins:known].rstrip("\ufffd")
    heads: list[list[int]] = [[]] if alone else [before, []]
    decoded = ((head, text) for head in heads if (text := decode(head, ids)).startswith(stands))
    head, text = next(decoded, (None, ""))
    if head is None:
        return None
    shown, candidates = bool(params.get("no_stop_trim")), [text]
    if isinstance(matched, int):
        if tokenizer.decode([matched], skip_special_tokens=skip):  # otherwise it shows nowhere
            candidates.append(decode(head, ids[:-1]))
    elif matched and (at := where_stopped(text, decode(head, ids[:-1]), matched)) >= 0:
        candidates = [text[: at + len(matched)], text, text[:at]]
    if not shown:
        candidates.reverse()
    if lags:
        candidates = [text for whole in candidates for text in (whole.rstrip("\ufffd"), whole)]
    if last is None:
        return sample.response[:begins] + candidates[0]
    ending = last[-_LOOK_BACK:]
    # Of a short last part only the end can be compared: its beginning may be a half of a character.
    ending = ending if len(last) > _LOOK_BACK else ending.lstrip("\ufffd")[1:]
    text_of_turn = next((text for text in candidates if text.endswith(ending)), None)
    return None if text_of_turn is None else sample.response[:begins] + text_of_turn
