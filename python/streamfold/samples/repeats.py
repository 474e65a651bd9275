"""Repeats: counts calls of one completion that all break in the same way, after a few tokens each."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final

from streamfold.errors import DecodeError

if TYPE_CHECKING:
    from streamfold.errors import StreamfoldError

__all__ = ["Repeats"]

_FEW_TOKENS: Final = 16  # a call that brings as many gets on
_MAX_CALLS: Final = 3

_logger = logging.getLogger("streamfold")


class Repeats:
    """Damage that returns in each call would cost one call for every few tokens, and never end.

    It is the same if kind and field are: the place in a list differs with the tokens before it.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._fault: tuple[str, str] | None = None  # kind and field of the last call's damage

    def give_up(self, error: StreamfoldError | None, tokens: int, index: object) -> bool:
        """Note how a call ended; whether no other call may follow. The error then says why.

        Args:
            error: what the call failed with; None if it did not fail.
            tokens: that it has brought.
            index: of the sample, for the log.
        """
        if not isinstance(error, DecodeError) or tokens >= _FEW_TOKENS:
            self._fault, self._calls = None, 0
            return False
        fault = error.kind, re.sub(r"\[\d+\]", "[]", error.path)
        self._calls = self._calls + 1 if fault == self._fault else 1
        self._fault = fault
        told = f"{self._calls} calls in a row ended like this, with fewer than {_FEW_TOKENS} tokens each"
        if self._calls == _MAX_CALLS - 1:
            _logger.warning("sample %s: %s; another one is the last: %s", index, told, error)
        if self._calls < _MAX_CALLS:
            return False
        error.args = (f"{error}; {told}: the engine's stream is broken", *error.args[1:])
        return True
