"""``Spans``: context managers around groups and samples, with which an integration marks them in a trainer's trace."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from streamfold.rollout.groups import Group
    from streamfold.samples.sample import Sample

__all__ = ["NO_SPANS", "Spans"]


@dataclass(frozen=True, kw_only=True)
class Spans:
    """What is entered while something runs, in the task that runs it.

    Attributes:
        group: around the generation and the rewards of a group.
        sample: around those of a sample, or of a list of samples that stands in its place.
    """

    group: Callable[[Group], AbstractContextManager[object]] = nullcontext
    sample: Callable[[Sample | list[Sample]], AbstractContextManager[object]] = nullcontext


NO_SPANS: Final = Spans()
