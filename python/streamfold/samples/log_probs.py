"""Log-probabilities of a sample: one for each token of its response, or none at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamfold.samples.validation import check_uniform, generated_before

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamfold._types import SampleLike

__all__ = ["log_probs_after"]


def log_probs_after(
    sample: SampleLike, new: Sequence[float] | None, more: int, *, trainable: bool
) -> list[float] | None:
    """The log-probabilities of a sample after ``more`` tokens; those that are not trained on get 0.0 behind others.

    Raises:
        ValueError: some tokens would have them, and others not.
    """
    kept = sample.rollout_log_probs
    if new is None and not trainable and kept is not None:
        return [*kept, *[0.0] * more]
    if new is not None and len(new) != more:
        raise ValueError(f"{len(new)} log_probs for {more} tokens")
    if not more and sample.response_length:
        return kept
    before = generated_before(sample)
    check_uniform("log-probabilities", before=before, has=kept is not None, more=more, gets=new is not None)
    return kept if new is None else [*(kept or [0.0] * sample.response_length), *new]
