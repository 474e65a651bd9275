"""Routed experts of samples: how many rows there are, their dtype, and the rows that the engine padded.

A sample keeps the rows that it has: they are of the weights that sampled its tokens. A call that resumes it adds those
behind them. A trainer's sample may hold its rows as an array, a tensor, a list of tensors or a reference to a file.

The engine fills the rows of tokens for which it has no experts with -1, in the unsigned types with 255 or 65535. The
parser lets a row with that value in every slot pass only if it is no real one, so such rows can be told from the array.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Int32 = npt.NDArray[np.int32]
    ExpertIds = npt.NDArray[Any]  # int32, uint8 or uint16

__all__ = [
    "adds_rows", "count_rows", "expert_array", "join_experts", "kept_experts", "kept_rows", "padded_rows",
    "signed_experts",
]  # fmt: skip

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


def count_rows(sample: Any, name: str) -> int:  # noqa: ANN401  # ours or a host's
    """How many rows a field of a sample has; nothing is loaded for that. 0 if the field is None or not there."""
    values = getattr(sample, name, None)
    if values is None:
        return 0
    if _is_of_parts(values):
        return sum(int(part.shape[0]) for part in values)
    shape = getattr(values, "shape", None)
    return len(values) if shape is None else int(shape[0])


def kept_rows(sample: Any) -> int:  # noqa: ANN401  # ours or a host's
    """The number of rows of routed experts that a sample has."""
    return count_rows(sample, "rollout_routed_experts")


def kept_experts(sample: Any) -> Any:  # noqa: ANN401  # ours or a host's
    """The routed experts that a sample has as one array, loaded from where they are; None if it has none."""
    values = getattr(sample, "rollout_routed_experts", None)
    if values is None:
        return None
    materialize = getattr(sample, "materialize_rollout_routed_experts", None)
    if materialize is not None:
        return _array(materialize(replace=False))
    if _is_of_parts(values):
        return np.concatenate([_array(part) for part in values])
    return _array(loaded(values))


def loaded(values: Any) -> Any:  # noqa: ANN401  # a host's
    """What a host's reference to a tensor stands for; anything else as it is."""
    return values.load() if hasattr(values, "load") else values


def _is_of_parts(values: Any) -> bool:  # noqa: ANN401  # a host's
    """Whether it is a list of tensors with several rows each, rather than of rows."""
    if not isinstance(values, (list, tuple)) or not values:
        return False
    return all(len(getattr(part, "shape", ())) == 3 for part in values)


def _array(values: Any) -> ExpertIds:  # noqa: ANN401  # an array, a tensor, or nested lists
    return expert_array(values.detach().cpu().numpy() if hasattr(values, "detach") else values)


def join_experts(kept: Any, new: ExpertIds) -> ExpertIds:  # noqa: ANN401  # an array, or a host's lists
    """The rows of both, in their dtype if it is the same, otherwise as int32."""
    kept = expert_array(kept)
    if kept.dtype != new.dtype:
        kept, new = signed_experts(kept), signed_experts(new)
    return np.concatenate([kept, new])


@cache
def adds_rows(kind: type) -> bool:
    """Whether samples of a class add the rows of ``meta_info["routed_experts"]`` behind ``routed_experts_start_len``.

    Hosts' older samples do not know that key, and take all rows. A sample of one row is asked to add another one.
    """
    first, second = np.zeros((1, 1, 1), np.int32), np.ones((1, 1, 1), np.int32)
    try:
        sample = kind()
        sample.tokens, sample.rollout_routed_experts = [0, 0], first
        sample.append_response_tokens(
            SimpleNamespace(num_layers=1, moe_router_topk=1, num_experts=2),
            tokens=[0],
            log_probs=[0.0],
            trainable=True,
            meta_info={"routed_experts": second, "routed_experts_start_len": 1},
            text="",
            update_terminal_info=False,
        )
        rows = expert_array(kept_experts(sample)).ravel().tolist()
    except Exception:  # noqa: BLE001  # a host's method may raise anything
        return False
    return bool(rows == [0, 1])
