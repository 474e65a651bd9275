"""Routed experts of samples: their dtype, and the rows that the engine padded.

The engine fills the rows of tokens for which it has no experts with -1, in the unsigned types with 255 or 65535. The
parser lets a row with that value in every slot pass only if it is no real one, so such rows can be told from the array.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Int32 = npt.NDArray[np.int32]
    ExpertIds = npt.NDArray[Any]  # int32, uint8 or uint16

__all__ = ["expert_array", "join_experts", "padded_rows", "signed_experts"]

_DTYPES: Final = (np.dtype(np.int32), np.dtype(np.uint8), np.dtype(np.uint16))


def expert_array(values: Any) -> ExpertIds:  # noqa: ANN401  # an array, or nested lists
    """Routed experts as an array: its own dtype if engines send it, otherwise int32."""
    if isinstance(values, np.ndarray) and values.dtype in _DTYPES:
        return values
    return np.asarray(values, np.int32)


def padded_rows(experts: ExpertIds) -> npt.NDArray[np.bool_]:
    """Which rows of ``[rows, num_layers, top_k]`` are padding: bool ``[rows]``."""
    mark = -1 if experts.dtype.kind == "i" else np.iinfo(experts.dtype).max
    flat = experts.reshape(len(experts), math.prod(experts.shape[1:]))
    padded = flat[:, :1].ravel() == mark if flat.shape[1] else np.zeros(len(experts), np.bool_)
    padded[padded] = (flat[padded] == mark).all(axis=1)
    return padded


def signed_experts(experts: ExpertIds) -> Int32:
    """The same as int32, where padded rows are -1; no copy of an array that is int32 already."""
    if experts.dtype == np.int32:
        return experts
    signed = experts.astype(np.int32)
    signed[padded_rows(experts)] = -1
    return signed


def join_experts(kept: Any, new: ExpertIds) -> ExpertIds:  # noqa: ANN401  # an array, or a host's lists
    """The rows of both, in their dtype if it is the same, otherwise as int32."""
    kept = expert_array(kept)
    if kept.dtype != new.dtype:
        kept, new = signed_experts(kept), signed_experts(new)
    return np.concatenate([kept, new])
