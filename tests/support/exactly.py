"""Equality that sees what ``==`` does not: types, dtypes, the bits of floats, the order of keys."""

from __future__ import annotations

import struct
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


def exactly(value: Any) -> Any:
    """A value as tuples that are equal only where the values are the same in every bit."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if isinstance(value, (np.ndarray, np.generic)):
        # The bytes of numbers of the other byte order differ as well, and so does the dtype.
        return kind, value.dtype.str, value.shape, value.tobytes()
    if kind in (list, tuple):
        return kind, tuple(map(exactly, value))
    if kind is dict:
        return kind, tuple((exactly(key), exactly(item)) for key, item in value.items())
    if kind in _PLAIN or isinstance(value, Enum):
        return kind, value
    return kind, exactly(dict(vars(value)))


_PLAIN: frozenset[Callable[..., Any]] = frozenset((type(None), bool, int, str, bytes))
