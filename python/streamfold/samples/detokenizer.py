"""Detokenize a response: the text of one call, or the whole text of a response that its engine cannot be relied on for.

An engine decodes only what it generates in one call. Where a character of several tokens is split between two calls,
the first call holds its first part back, and the second one takes that part for the end of the prompt: the concatenated
text lacks the character. And where an event brings several tokens, SGLang may send characters twice. Decoding the ids
of the whole response once gives the text that one uninterrupted call, which is not streamed, would have sent.

Several texts are right: a stop string or a stop token may be shown or not, an engine may hold an incomplete character
back, and the prompt decides how a response begins. A text of the engine that is one of these is never replaced.
Everything here takes values and returns values; nothing touches a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from streamfold.samples.stopping import stop_position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamfold._types import Tokenizer
    from streamfold.samples.metadata import TurnState

__all__ = ["DecodedText", "Detokenizer"]

_CONTEXT: Final = 5  # tokens of the prompt that decide how the first tokens of a response are decoded
_COMPARED: Final = 16  # characters at the end of the engine's text that have to be at the end of ours
_REPLACEMENT: Final = "\ufffd"  # how a character is decoded of which only a part has been generated


class DecodedText(NamedTuple):
    """The text of a whole response.

    Attributes:
        text: the engine's, or the decoded one.
        is_corrected: whether the engine's text is none that it would have shown, so that it was replaced.
    """

    text: str
    is_corrected: bool


@dataclass(frozen=True, kw_only=True)
class Detokenizer:
    """Decodes responses as their engine would.

    Attributes:
        tokenizer: of the model.
        params: the sampling parameters: ``skip_special_tokens``, and ``no_stop_trim``, which keeps the stop token or
            string in the text.
        uses_prompt: whether the engine decodes a response with the tokens before it as context. One that sends no text
            does not: its responses are decoded by themselves.
        delays_text: whether the engine sends a character with the last of its tokens: then a character that the prompt
            leaves incomplete is a part of the response's text, and an incomplete one at the end is not. Otherwise the
            first is a part of the prompt's text, and the second is sent as U+FFFD.
    """

    tokenizer: Tokenizer
    params: Mapping[str, Any]
    uses_prompt: bool = True
    delays_text: bool = False

    def text_of_call(self, ids: list[int], finish_reason: str | None, matched: int | str | None) -> str:
        """Decode what one call has generated; as engines do, without the stop token or string.

        Args:
            ids: at least one.
            finish_reason: of the call.
            matched: the stop token or string at which it stopped, if any.
        """
        stopped, keeps_stop = finish_reason == "stop", self.params.get("no_stop_trim")
        if stopped and not keeps_stop and ids[-1] == matched:
            ids = ids[:-1]
        text = self._decode(ids)
        if not stopped or not isinstance(matched, str) or not matched:
            return text
        at = stop_position(text, self._decode(ids[:-1]), matched)
        return text if at < 0 else text[: at + len(matched) if keeps_stop else at]

    def text_of_finished_call(
        self,
        tokens: Sequence[int],
        response_length: int,
        text: str,
        turn: TurnState,
        *,
        stopped: bool,
        matched: int | str | None,
    ) -> DecodedText:
        """Compare the engine's text of a turn that took one call with that of its tokens.

        Args:
            tokens: of the prompt, then of the response.
            response_length: tokens of the response.
            text: of the response, as the engine sent it.
            turn: where the turn starts.
            stopped: whether it ended at a stop; otherwise by its length.
            matched: the stop token or string at which it ended, if that is known.
        """
        before, ids = self._split(tokens, response_length, turn)
        shown, expected, ends = text[turn.characters :], "", list[str]()
        for context in [before, []] if before else [[]]:
            decoded = self._decode_after(context, ids)
            if shown == decoded:  # nearly always: the others cost more decoding
                return DecodedText(text, is_corrected=False)
            ends += self._with_possible_ends(decoded, context, ids, matched)
            expected = expected or ends[0]
            if stopped and matched is None:  # at an EOS that the engine does not name
                ends += self._with_possible_ends(decoded, context, ids, ids[-1])
            cut_off = [self._cut_off(context, ids), self._cut_off(context, ids[: len(ids) - stopped])]
            if shown in ends + cut_off or _is_cut_at(matched, shown, decoded):
                return DecodedText(text, is_corrected=False)
        if not before:
            expected = _without_repeats(shown, ends)
        return DecodedText(text[: turn.characters] + expected, is_corrected=expected != shown)

    def text_of_response(
        self,
        tokens: Sequence[int],
        response_length: int,
        text: str,
        turn: TurnState,
        *,
        last_text: str | None = None,
        matched: int | str | None = None,
        uses_prompt: bool = True,
    ) -> DecodedText | None:
        """Decode a response that took several calls, with the tokens before it as context.

        Args:
            tokens: of the prompt, then of the response.
            response_length: tokens of the response.
            text: of the response, with the concatenated texts of its calls.
            turn: the tokens and characters at the start of the response that are not decoded again, and how many
                characters are exact: the decoded text has to begin with those, unless the engine repeated some of them.
            last_text: the engine's text of the last call, whose end the result has, if it is one that the engine would
                have shown; None if it sent none.
            matched: the stop token or string that ended the response.
            uses_prompt: False if the last call sent no text, so that the response is decoded by itself.

        Returns:
            The text; None if the exact characters are not of these tokens: a tool's answer, for example.
        """
        before, ids = self._split(tokens, response_length, turn)
        exact = text[turn.characters : turn.exact_characters].rstrip(_REPLACEMENT)
        found = self._find_context([before, []] if uses_prompt and self.uses_prompt else [[]], ids, exact)
        if found is None:
            return None
        context, whole = found
        is_corrected = not whole.startswith(exact)
        candidates = self._with_possible_ends(whole, context, ids, matched)
        if last_text is not None:
            candidates = _ending_like(last_text, candidates) or candidates
            is_corrected = is_corrected or not candidates[0].endswith(_without_border(last_text))
        return DecodedText(text[: turn.characters] + candidates[0], is_corrected)

    def _find_context(self, contexts: list[list[int]], ids: list[int], exact: str) -> tuple[list[int], str] | None:
        """The context in which a response begins with what is known of it, and its text; None if there is none.

        The first calls may have repeated characters: only if no text begins so exactly.
        """
        decoded: list[tuple[list[int], str]] = []
        for context in contexts:
            decoded.append((context, self._decode_after(context, ids)))
            if decoded[-1][1].startswith(exact):
                return decoded[-1]
        return next((each for each in decoded if _repeated(exact, each[1]) is not None), None)

    def _split(self, tokens: Sequence[int], response_length: int, turn: TurnState) -> tuple[list[int], list[int]]:
        """The tokens before a turn that decide how its text begins, and its own."""
        start = len(tokens) - response_length + turn.tokens
        return list(tokens[max(0, start - _CONTEXT) : start]), list(tokens[start:])

    def _with_possible_ends(
        self, text: str, context: list[int], ids: list[int], matched: int | str | None
    ) -> list[str]:
        """The text with each end that the engine may have sent, the expected one first."""
        candidates = [text]
        if isinstance(matched, int):
            if self._is_shown(matched):  # a special token that is skipped makes no difference
                candidates.append(self._decode_after(context, ids[:-1]))
        elif matched and (at := stop_position(text, self._decode_after(context, ids[:-1]), matched)) >= 0:
            candidates = [text[: at + len(matched)], text, text[:at]]
        if not self.params.get("no_stop_trim"):
            candidates.reverse()
        if self.delays_text:
            candidates = [end for candidate in candidates for end in (candidate.rstrip(_REPLACEMENT), candidate)]
        return candidates

    def _decode_after(self, context: list[int], ids: list[int]) -> str:
        """The text of ``ids`` behind a context."""
        before, text = self._decode(context), self._decode(context + ids)
        whole_before = before.rstrip(_REPLACEMENT)
        if text.startswith(whole_before):
            return text[len(whole_before if self.delays_text else before) :]
        return self._decode(ids)

    def _cut_off(self, context: list[int], ids: list[int]) -> str:
        """The text of ``ids`` as an engine takes it, by its length alone: the context may be decoded otherwise in it.

        That is so where both are bytes of which the last ones are no whole character.
        """
        return self._decode(context + ids)[len(self._decode(context)) :]

    def _is_shown(self, token: int) -> bool:
        """Whether a token has a text. One without may be a space, which some tokenizers drop at the beginning."""
        return bool(self._decode([token])) or not self.tokenizer.decode([token], skip_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.params.get("skip_special_tokens", True))


def _ending_like(last_text: str, candidates: list[str]) -> list[str]:
    """The candidates that end as the engine's text of the last call does."""
    end = last_text[-_COMPARED:] if len(last_text) > _COMPARED else _without_border(last_text)
    return [candidate for candidate in candidates if candidate.endswith(end)]


def _without_border(last_text: str) -> str:
    """The text of a call without its beginning, which may be a part of a character."""
    return last_text.lstrip(_REPLACEMENT)[1:]


def _without_repeats(shown: str, candidates: list[str]) -> str:
    """The candidate of which a text has all characters, and some of them twice; the text itself if there is none.

    It is for responses whose prompt is not known: their candidates may begin otherwise than they should. The prompt
    gives the first word its space, and decides to which text a character belongs that it leaves incomplete.
    """
    spaces = shown[: len(shown) - len(shown.lstrip(" "))]
    candidates = [spaces + candidate.lstrip(f" {_REPLACEMENT}") for candidate in candidates]
    if shown in candidates:
        return shown
    whole = (each for each in candidates if len(each) < len(shown) and _repeated(shown, each) == len(each))
    return next(whole, shown)


def _is_cut_at(matched: int | str | None, shown: str, decoded: str) -> bool:
    """Whether a text ends at any place from the first occurrence of its stop string on.

    An engine cuts there, except for what it has sent already.
    """
    at = decoded.find(matched) if isinstance(matched, str) else -1
    return 0 <= at <= len(shown) and decoded.startswith(shown)


def _repeated(shown: str, decoded: str) -> int | None:
    """How many characters of a text another one shows, in which some of them were sent again; None: it is no such one.

    Args:
        shown: what was sent.
        decoded: the text of the tokens.
    """
    at, sent = 0, set[str]()
    for character in shown:
        if decoded.startswith(character, at):
            sent.add(character)
            at += 1
        elif character not in sent:
            return None
    return at
