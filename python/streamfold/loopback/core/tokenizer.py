"""Byte-level mock tokenizer without dependencies, and an incremental detokenizer.

Ids 0 to 255 are the bytes, the next 16 the special tokens, the rest words with a leading space. Larger
vocabularies continue with all concatenations of two words (`` riverstone``), then of three, and so on; the text of an
id is computed, not looked up. :meth:`MockTokenizer.encode` never returns concatenations, so encoding a decoded text may
give other ids.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MockDetokenizer", "MockTokenizer"]

_NUM_BYTES = 256

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|pad|>",
    "<|image_pad|>",
    *(f"<|reserved_{i}|>" for i in range(8)),
)

_WORDS = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all
were when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made over
did down only way find use may water long little very after words called just where most know get through back
much before go good new write our used me man too any day same right look think also around another came come work
three word must because does part even place well such here take why help put different away again off went old
number great tell men say small every found still between name should home big give air line set own under read
last never us left end along while might next sound below saw something thought both few those always show large
often together asked house world going want school important until form food keep children feet land side without
boy once animals life enough took four head above kind began almost live page got earth need far hand high year
mother light country father let night picture being study second soon story since white ever paper hard
"""
WORDS = tuple(_WORDS.split())

_FIRST_WORD = _NUM_BYTES + len(SPECIAL_TOKENS)
_BASE_PIECES = (
    *(bytes((byte,)) for byte in range(_NUM_BYTES)),
    *(token.encode() for token in SPECIAL_TOKENS),
    *(f" {word}".encode() for word in WORDS),
)
_SPECIAL_IDS = {token: _NUM_BYTES + i for i, token in enumerate(SPECIAL_TOKENS)}
_WORD_IDS = {f" {word}": _FIRST_WORD + i for i, word in enumerate(WORDS)}
_PIECES = re.compile("|".join([*map(re.escape, SPECIAL_TOKENS), " [a-z]+"]))


class MockTokenizer:
    """Maps text to ids and back.

    Args:
        vocab_size: at least 512: bytes, special tokens and the single words.

    Raises:
        ValueError: ``vocab_size`` is smaller.
    """

    SMALLEST = len(_BASE_PIECES)

    def __init__(self, vocab_size: int = SMALLEST) -> None:
        if vocab_size < self.SMALLEST:
            msg = f"vocab_size must be at least {self.SMALLEST}, got {vocab_size}"
            raise ValueError(msg)
        self.vocab_size = vocab_size
        self.bos_token_id: int = _SPECIAL_IDS["<|begin_of_text|>"]
        self.eos_token_id: int = _SPECIAL_IDS["<|im_end|>"]
        self.pad_token_id: int = _SPECIAL_IDS["<|pad|>"]
        self.image_token_id: int = _SPECIAL_IDS["<|image_pad|>"]
        self.eos_token_ids: frozenset[int] = frozenset((self.eos_token_id,))
        self.first_word_id = _FIRST_WORD
        self.special_ids: range = range(_NUM_BYTES, _FIRST_WORD)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokenize text; special tokens in the text become their ids.

        ``add_special_tokens`` adds the begin-of-text token in front.
        """
        ids = [self.bos_token_id] if add_special_tokens else []
        end = 0
        for match in _PIECES.finditer(text):
            piece = match.group()
            token = _SPECIAL_IDS.get(piece, _WORD_IDS.get(piece))
            if token is None:
                continue
            ids += text[end : match.start()].encode()
            ids.append(token)
            end = match.end()
        ids += text[end:].encode()
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Detokenize ids, without special tokens if ``skip_special_tokens``. Invalid UTF-8 becomes U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        skipped = self.special_ids if skip_special_tokens else range(0)
        return b"".join(self.piece(token) for token in ids if token not in skipped).decode(errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> MockDetokenizer:
        """Return a detokenizer for one response."""
        return MockDetokenizer(self, skip_special_tokens=skip_special_tokens)

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token. Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            msg = f"token {token} is not in a vocabulary of {self.vocab_size}"
            raise ValueError(msg)
        if token < len(_BASE_PIECES):
            return _BASE_PIECES[token]
        return f" {_compound(token - _FIRST_WORD)}".encode()


def _compound(number: int) -> str:
    # Numbered like spreadsheet columns, a ... z, aa, ab ..., with words in place of letters.
    parts = []
    number += 1
    while number:
        number, letter = divmod(number - 1, len(WORDS))
        parts.append(WORDS[letter])
    return "".join(reversed(parts))


class MockDetokenizer:
    """Detokenizes token by token; incomplete UTF-8 characters are held back."""

    def __init__(self, tokenizer: MockTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else range(0)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Add the next token; return the characters that it completes."""
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.piece(token))

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Return the rest at the end of the stream: U+FFFD for an incomplete character, otherwise nothing."""
        return self._decoder.decode(b"", final=True)
