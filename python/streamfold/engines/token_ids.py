"""``token_array``: the token ids of a prompt as an array. Anything else is refused, with what to give instead."""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from streamfold.engines.base import Ids, TokenIds

__all__ = ["LARGEST_TOKEN", "first_invalid", "token_array"]

LARGEST_TOKEN: Final = 2**31 - 1
_WANTED: Final = "input_ids must be token ids, a list or array of integers"


def token_array(input_ids: TokenIds, vocab_size: int | None = None) -> Ids:
    """Token ids, int32 ``[n]``, C order, from a list, tuple or integer array.

    Raises:
        TypeError: a text, or anything else that is no sequence.
        ValueError: not one-dimensional, not integers (the messages of a chat), or an id outside 0 to 2**31 - 1, or
            outside the vocabulary.
    """
    largest = LARGEST_TOKEN if vocab_size is None else min(LARGEST_TOKEN, vocab_size - 1)
    if (quick := _from_list(input_ids, largest)) is not None:
        return quick
    if not _has_length(input_ids) or isinstance(input_ids, (str, bytes, Mapping)):
        raise TypeError(_explain(input_ids))
    if len(input_ids) == 0:
        return np.empty(0, np.int32)
    ids = _as_row(input_ids)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > largest:
        found = low if low < 0 else high
        raise ValueError(f"input_ids must lie in 0 to {largest}; found {found} at index {int(np.argmax(ids == found))}")
    return np.ascontiguousarray(ids, np.int32)


def first_invalid(ids: Sequence[object]) -> int | None:
    """The index of the first value of a list that is no token id: no integer, or outside 0 to 2**31 - 1."""
    for index, value in enumerate(ids):
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_integer or not 0 <= value <= LARGEST_TOKEN:  # type: ignore[operator]  # an integer, by now
            return index
    return None


def _has_length(value: object) -> bool:
    """Whether ``len`` takes it: an array of one number has the method alone."""
    return isinstance(value, Sized) and getattr(value, "ndim", 1) != 0


def _from_list(ids: TokenIds, largest: int) -> Ids | None:
    """The array of a list of ids, in a third of the time of ``np.asarray``. None: no list, empty, or any is invalid."""
    if type(ids) is not list or not ids or type(ids[0]) is not int:  # a bool or an array could be taken for an integer
        return None
    try:
        unsigned = np.frombuffer(array("I", ids), np.uint32)
    except (TypeError, OverflowError):
        return None
    return unsigned.view(np.int32) if np.maximum.reduce(unsigned) <= largest else None


def _as_row(input_ids: TokenIds) -> npt.NDArray[np.integer[Any]]:
    """The array of a row of integers; ValueError for anything else."""
    try:
        ids = np.asarray(input_ids)
    except ValueError:  # rows of different lengths
        raise ValueError("input_ids must be one row of integers, not several: start one call per prompt") from None
    if ids.dtype.kind in "OUS":
        raise ValueError(_explain(input_ids))
    if ids.ndim > 1:
        raise ValueError(f"input_ids must be one row of integers, not {ids.ndim} dimensions: start one call per prompt")
    if ids.dtype.kind not in "iu":
        what = f"not of {ids.dtype}: {reprlib.repr(input_ids)}{_place(input_ids)}"
        raise ValueError(f"input_ids must be one row of integers, {what}")
    return ids


def _explain(value: object) -> str:
    """The message for a prompt that is not of token ids."""
    if isinstance(value, str):
        return f'{_WANTED}, not the text {reprlib.repr(value)}: encode it, or pass None and extra={{"text": ...}}'
    if _is_chat(value):
        return (
            f"{_WANTED}, not the messages of a chat: make ids of them with "
            "tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
        )
    return f"{_WANTED}, not {reprlib.repr(value)}{_place(value)}"


def _place(value: object) -> str:
    """Where the first value that is no token id stands in a list, which may be longer than what is shown of it."""
    index = first_invalid(value) if isinstance(value, (list, tuple)) else None
    return "" if index is None else f", where index {index} is {reprlib.repr(value[index])}"  # type: ignore[index]


def _is_chat(value: object) -> bool:
    first = value[0] if isinstance(value, (list, tuple)) else value
    return isinstance(first, Mapping) and "role" in first
