"""The sample as what calls are made for: see :mod:`streamfold.client.observer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamfold.client.observer import Subject
from streamfold.samples.routing import session_of

if TYPE_CHECKING:
    from streamfold._types import SampleLike

__all__ = ["subject_of"]


def subject_of(sample: SampleLike) -> Subject:
    """The same for all calls, turns and rollouts of a sample."""
    label = "sample" if sample.index is None else f"sample {sample.index}"
    return Subject(session_of(sample) or f"{label} {id(sample):x}", label)
