"""Validate the lengths of a sample: log-probabilities, loss mask, top-p offsets and routed experts against its tokens.

:func:`check_lengths` covers everything that a sample holds, ours or a trainer's. The other functions check what one
response of the engine is about to add. Every ValueError names the field and both numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamfold.samples.experts import count_rows, loaded

if TYPE_CHECKING:
    import numpy.typing as npt

    from streamfold._types import SampleLike

    Int32 = npt.NDArray[np.int32]

__all__ = ["check_expert_rows", "check_lengths", "check_offsets", "check_uniform", "generated_before", "has_generated"]


def check_lengths(sample: SampleLike) -> None:
    """Check that everything beside the tokens of a sample has the length that they require.

    Raises:
        ValueError: two lengths disagree.
    """
    length, total = sample.response_length, len(sample.tokens)
    if not 0 <= length <= total:
        raise ValueError(f"response_length is {length}, but there are {total} tokens in all")
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name, None)
        if values is not None and len(values) != length:
            raise ValueError(f"{name} has {len(values)} entries, but response_length is {length}")
    _check_top_p(sample, length)
    for name in ("rollout_routed_experts", "rollout_indexer_topk"):
        rows = count_rows(sample, name)
        if rows > max(0, total - 1):
            raise ValueError(f"{name} has {rows} rows, but at most {max(0, total - 1)} fit {total} tokens")


def _check_top_p(sample: SampleLike, length: int) -> None:
    ids = getattr(sample, "rollout_top_p_token_ids", None)
    offsets = getattr(sample, "rollout_top_p_token_offsets", None)
    if (ids is None) != (offsets is None):
        raise ValueError(
            "rollout_top_p_token_ids and rollout_top_p_token_offsets go together: one of the two is missing"
        )
    if ids is not None and offsets is not None:
        count = count_rows(sample, "rollout_top_p_token_ids")
        check_offsets("rollout_top_p_token_offsets", np.asarray(loaded(offsets)), count, length)


def check_offsets(name: str, offsets: Int32, ids: int, tokens: int) -> None:
    """Check that ``offsets`` divide ``ids`` top-p ids among ``tokens`` tokens.

    Raises:
        ValueError: they are not one more than ``tokens``, or do not increase from 0 to ``ids``.
    """
    if len(offsets) != tokens + 1:
        raise ValueError(f"{name} has {len(offsets)} entries for {tokens} tokens: it must have {tokens + 1}")
    if offsets[0] != 0 or offsets[-1] != ids or (np.diff(offsets) < 0).any():
        raise ValueError(f"{name} must start at 0, end at {ids} (the number of ids) and never decrease")


def has_generated(sample: SampleLike) -> bool:
    """Whether any token of a response was generated: otherwise all are a tool's, which nothing was requested for."""
    is_trained = sample.loss_mask is None or any(sample.loss_mask)
    return sample.response_length > 0 and (is_trained or bool(getattr(sample, "version_spans", None)))


def generated_before(sample: SampleLike) -> int:
    """The number of tokens with which new ones have to be uniform: none, if all are a tool's."""
    return sample.response_length if has_generated(sample) else 0


def check_uniform(what: str, *, before: int, has: bool, more: int | None, gets: bool) -> None:
    """Check that all tokens of a response have ``what``, or that none has.

    Args:
        what: log-probabilities, for example.
        before: the number of tokens of the response so far.
        has: whether they have it.
        more: the number of tokens that are added; None if it is not known yet.
        gets: whether those have it.

    Raises:
        ValueError: some would have it and others not.
    """
    if has == gets or more == 0 or (gets and not before):
        return
    some, others = ("have", "lack") if has else ("lack", "have")
    new = "the next ones" if more is None else f"the next {more}"
    raise ValueError(
        f"{before} response tokens {some} {what}, but {new} {others} them: request them in every call or in none"
    )


def check_expert_rows(experts: npt.NDArray[Any], rows: int, *, kept: int = 0) -> None:
    """Check that routed experts, ``[n, num_layers, top_k]``, have ``rows`` rows, or those without the first ``kept``.

    Raises:
        ValueError: another number of rows or dimensions.
    """
    if experts.ndim != 3 or len(experts) not in {rows, rows - kept}:
        raise ValueError(
            f"routed experts are of shape {experts.shape}, but {rows} rows (tokens - 1) are needed, and {kept} are kept"
        )
