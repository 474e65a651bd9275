"""Types of the functions that users pass to :class:`~streamfold.Rollout`: generate, reward, filter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from streamfold.rollout.groups import Group
from streamfold.samples.sample import Sample

__all__ = ["Filter", "Generate", "Reward", "RewardFunction", "SampleFilter"]

Reward: TypeAlias = float | dict[str, Any] | None
"""A sample's reward: a finite number, also of numpy or torch, or a dict. In a dict every number must be finite, and
there must be one; what is no number is a note. None if the reward function has set ``sample.reward`` itself."""

RewardFunction: TypeAlias = (
    Callable[[Sample], Reward | Awaitable[Reward]] | Callable[[Group], Sequence[Reward] | Awaitable[Sequence[Reward]]]
)
"""Takes a finished sample; with ``RolloutConfig.group_reward`` a finished group, and returns a list of rewards."""

Filter: TypeAlias = Callable[[Group], bool | tuple[bool, str | None]]
"""Takes a finished group; whether the trainer gets it, or a pair of that and the reason if it does not."""

SampleFilter: TypeAlias = Callable[[list[Group]], object]
"""Takes all groups of a rollout, and may set ``remove_sample`` on some of their samples."""


class Generate(Protocol):
    """Generates one sample, or resumes it.

    An optional attribute ``abort_mode`` says how an abort ends it: ``"request"``: by cancelling its task, after which
    the sample must hold what was received. Anything else: by aborting all requests on the engines, after which it
    returns by itself. It may also be a function of the sample that returns one of these.

    At ``RolloutConfig.sample_seconds`` its task is cancelled, whatever the mode, and the sample must hold what was
    received. An optional method ``async truncate(sample, sampling_params)`` finishes such a sample, and returns it or
    a list of samples made of it; without this method the sample just gets the status TRUNCATED.
    """

    def __call__(
        self, sample: Sample, sampling_params: dict[str, Any], /, *, aborted: Callable[[], bool]
    ) -> Awaitable[Sample | list[Sample]]:
        """Return the sample, or a list of samples that were made of it, none of them PENDING.

        Args:
            sample: a sample that is not finished. One that has a response is to be resumed.
            sampling_params: a copy of ``RolloutConfig.sampling_params``, which it may change.
            aborted: whether the rollout is being aborted. While it returns True no request may be sent.
        """
        ...
