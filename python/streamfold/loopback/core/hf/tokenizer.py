"""The tokenizer of a model's directory, and an incremental detokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HfDetokenizer", "HfTokenizer"]

_REPLACEMENT = "\ufffd"


class HfTokenizer:
    """Maps text to ids and back; see :class:`streamfold.loopback.core.causal_lm.Tokenizer`.

    Args:
        tokenizer: transformers' tokenizer.
        eos_token_ids: the ids that end a response.
    """

    image_token_id: int | None = None  # a causal language model takes none

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:  # noqa: ANN401  # untyped here
        self._tokenizer = tokenizer
        self.eos_token_ids: frozenset[int] = eos_token_ids

    def encode(self, text: str) -> list[int]:
        """Tokenize text as the engines do, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Detokenize ids. Invalid UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(
            [*ids], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> HfDetokenizer:
        """Return a detokenizer for one response."""
        return HfDetokenizer(self, skip_special_tokens=skip_special_tokens)


class HfDetokenizer:
    """Detokenizes token by token; incomplete UTF-8 characters are held back.

    The last tokens whose text was whole are decoded once more with the new ones: how a token is spelled may depend on
    the one before it.
    """

    def __init__(self, tokenizer: HfTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._whole = 0  # how many of the ids have their text shown

    def push(self, token: int) -> str:
        """Add the next token; return the characters that it completes."""
        self._ids.append(token)
        text, shown = self._decoded(self._ids), self._decoded(self._ids[: self._whole])
        if text.endswith(_REPLACEMENT) and token not in self._tokenizer.eos_token_ids:
            return ""
        del self._ids[: self._whole]
        self._whole = len(self._ids)
        return text[len(shown) :]

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
