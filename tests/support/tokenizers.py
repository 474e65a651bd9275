"""Tokenizers that decode as those of models do: byte-level ones (GPT-2, Qwen, Llama 3), and byte fallback (Llama 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EOS = 0
PAD = 1
_SPECIAL = {EOS: "<|eos|>", PAD: "<|pad|>"}
_BYTES = len(_SPECIAL)  # the id of the byte 0
_PIECES = _BYTES + 256
# Words with their space, CJK words, and tokens that hold a character and a part of the next one.
PIECES = (
    *(" river", " the", "ing", "today", " a", "今天", "天气", "很好", "、", "。"),
    *("天".encode() + "气".encode()[:1], "气".encode()[1:] + "很".encode()[:2], "🙂".encode()[2:] + b" s"),
)


class ByteLevel:
    """Tokens are bytes: any of them may hold parts of characters. An invalid part of one is a single U+FFFD."""

    def __init__(self) -> None:
        self._pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in PIECES]

    def encode(self, *pieces: str | bytes) -> list[int]:
        """The ids of pieces: each is one token if the vocabulary has it, and otherwise one token a byte."""
        ids: list[int] = []
        for piece in pieces:
            raw = piece if isinstance(piece, bytes) else piece.encode()
            known = raw in self._pieces
            ids += [_PIECES + self._pieces.index(raw)] if known else [_BYTES + byte for byte in raw]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raw = b"".join(self._raw(token, skip=skip_special_tokens) for token in ids)
        return raw.decode(errors="replace")

    def _raw(self, token: int, *, skip: bool) -> bytes:
        if token in _SPECIAL:
            return b"" if skip else _SPECIAL[token].encode()
        return bytes([token - _BYTES]) if token < _PIECES else self._pieces[token - _PIECES]


class ByteFallback(ByteLevel):
    """Tokens are text, or single bytes of what has no token; the first space of a text is dropped.

    A run of bytes that is no text is one U+FFFD a byte.
    """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text, run = "", b""
        for token in ids:
            if _BYTES <= token < _PIECES:
                run += bytes([token - _BYTES])
                continue
            text, run = text + _fused(run), b""
            text += self._raw(token, skip=skip_special_tokens).decode(errors="replace")
        return (text + _fused(run)).removeprefix(" ")


def _fused(run: bytes) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)
