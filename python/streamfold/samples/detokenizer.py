"""Detokenize a response: the text of one call, or the whole text of a response that took several calls.

An engine decodes only what it generates in one call. Where a character of several tokens is split between two calls,
the first call holds its first part back, and the second one takes that part for the end of the prompt: the concatenated
text lacks the character. Decoding the ids of the whole response once gives the text that one uninterrupted call would
have sent. Everything here takes values and returns values; nothing touches a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from streamfold.samples.stopping import stop_position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamfold._types import Tokenizer
    from streamfold.samples.metadata import TurnState

__all__ = ["Detokenizer"]

_CONTEXT: Final = 5  # tokens of the prompt that decide how the first tokens of a response are decoded
_COMPARED: Final = 16  # characters at the end of the engine's text that have to be at the end of ours
_REPLACEMENT: Final = "\ufffd"  # how a character is decoded of which only a part has been generated


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
    ) -> str | None:
        """Decode a response that took several calls, with the tokens before it as context.

        Args:
            tokens: of the prompt, then of the response.
            response_length: tokens of the response.
            text: of the response, with the concatenated texts of its calls.
            turn: the tokens and characters at the start of the response that are not decoded again, and how many
                characters are exact: the decoded text has to begin with those.
            last_text: the engine's text of the last call, whose end the result must have; None if it sent none.
            matched: the stop token or string that ended the response.
            uses_prompt: False if the last call sent no text, so that the response is decoded by itself.

        Returns:
            The text; None if it does not begin with the exact characters, or not end as the engine's does: the engine
            is right then.
        """
        start = len(tokens) - response_length + turn.tokens
        ids, before = list(tokens[start:]), list(tokens[max(0, start - _CONTEXT) : start])
        exact = text[turn.characters : turn.exact_characters].rstrip(_REPLACEMENT)
        for context in [before, []] if uses_prompt and self.uses_prompt else [[]]:
            decoded = self._decode_after(context, ids)
            if decoded.startswith(exact):
                break
        else:
            return None
        candidates = self._with_possible_ends(decoded, context, ids, matched)
        if last_text is not None:
            candidates = _ending_like(last_text, candidates)
        return text[: turn.characters] + candidates[0] if candidates else None

    def _with_possible_ends(
        self, text: str, context: list[int], ids: list[int], matched: int | str | None
    ) -> list[str]:
        """The text with each end that the engine may have sent, the expected one first."""
        candidates = [text]
        if isinstance(matched, int):
            if self._decode([matched]):  # a special token that is skipped makes no difference
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

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.params.get("skip_special_tokens", True))


def _ending_like(last_text: str, candidates: list[str]) -> list[str]:
    """The candidates that end as the engine's text of the last call does."""
    end = last_text[-_COMPARED:]
    if len(last_text) <= _COMPARED:  # only its own end can be compared: it may begin with a part of a character
        end = end.lstrip(_REPLACEMENT)[1:]
    return [candidate for candidate in candidates if candidate.endswith(end)]
