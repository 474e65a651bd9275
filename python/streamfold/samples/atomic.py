"""Change a sample, ours or a host's, as a whole or not at all."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamfold._types import SampleLike

__all__ = ["all_or_nothing"]

# Lists and counters that hosts' methods change in place.
_IN_PLACE: Final = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "spec_info", "prefix_cache_info")
_EXPERTS: Final = "rollout_routed_experts"


@contextlib.contextmanager
def all_or_nothing(sample: SampleLike) -> Iterator[None]:
    """Inside the block, the lists of a sample are copies; after an exception the sample is what it was.

    Other samples may share its lists, and a host's method may raise anything, after it has changed the sample.
    """
    as_it_was = dict(vars(sample))
    try:
        for name in _IN_PLACE:
            if (shared := getattr(sample, name, None)) is not None:
                setattr(sample, name, copy.copy(shared))
        if isinstance(parts := getattr(sample, _EXPERTS, None), list):  # a host's, of arrays
            setattr(sample, _EXPERTS, list(parts))
        yield
    except BaseException:
        vars(sample).update(as_it_was)
        raise
