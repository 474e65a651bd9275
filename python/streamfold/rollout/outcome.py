"""``GroupOutcome``: a group while it is in flight, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from streamfold.rollout.groups import count_tokens, samples_of, sort_key, unfinished_samples

if TYPE_CHECKING:
    from streamfold.rollout.groups import Group
    from streamfold.samples.sample import Sample

__all__ = ["GroupOutcome"]


@dataclass
class GroupOutcome:
    """What became of a group: filled while it is in flight.

    Attributes:
        group: the list that was started. Its elements are updated in place.
        version: the rollout, or in a pool the weight version, in which it was started.
        failures: what generate and reward functions raised, each with its sample.
        is_cancelled: whether something other than an abort cancelled its task.
        started_at: the event loop's time at which it was started.
        generating: how many generate functions are running.
    """

    group: Group
    version: int
    failures: list[tuple[Sample, BaseException]] = field(default_factory=list)
    is_cancelled: bool = False
    started_at: float = 0.0
    generating: int = 0

    @property
    def index(self) -> int:
        """The number of its prompt."""
        return sort_key(self.elements)[0]

    @property
    def state(self) -> str:
        """What its samples do, in words."""
        samples = samples_of(self.elements)
        unfinished = len(unfinished_samples(samples))
        tokens = f"{count_tokens(samples)} tokens kept so far"
        if not unfinished:
            return f"all {len(samples)} samples are generated, rewards are not; {tokens}"
        waiting = f", {unfinished - self.generating} wait for a place" if unfinished > self.generating else ""
        finished = len(samples) - unfinished
        return f"{finished} of {len(samples)} samples are generated, {self.generating} run{waiting}; {tokens}"

    @property
    def elements(self) -> list[Sample | list[Sample]]:
        """The group, typed with the elements that it has where a generate function returned several samples."""
        return cast("list[Sample | list[Sample]]", self.group)
