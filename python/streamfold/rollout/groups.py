"""Groups, the samples of one prompt: their type, :func:`prompt_groups`, and the rules that rollout and pool share.

A group is a plain list of :class:`~streamfold.samples.sample.Sample`. The samples of a host have the same fields and
pass through the same code. Where a generate function returned several samples for one, the element of the group is a
list of samples; :func:`samples_of` flattens it.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from streamfold.samples.metadata import START_ROLLOUT_ID, metadata_of, own_metadata
from streamfold.samples.reset import restart
from streamfold.samples.sample import Sample
from streamfold.samples.status import is_finished

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Elements: TypeAlias = Sequence[Sample | list[Sample]]

__all__ = [
    "AnyGroup", "Group", "Source", "copy_indices", "count_tokens", "has_started", "is_complete", "is_partial",
    "mark_start", "prompt_groups", "restart_samples", "samples_of", "sort_key", "start_of", "unfinished_samples",
]  # fmt: skip

Group: TypeAlias = list[Sample]
"""The samples of one prompt, which are judged, filtered and trained on together.

Where a generate function returned several samples for one, that element is a list of samples. The type leaves this
rare case out: ``cast`` such a group, or check its elements with ``isinstance(element, list)``.
"""

AnyGroup: TypeAlias = list[Any]
"""A group where it is passed in: of samples of ours or of a host's, or with elements that are lists of them."""


class Source(Protocol):
    """Where a rollout takes groups from and returns them to: a :class:`~streamfold.Buffer`, or a host's data source.

    A source that also has ``done(groups)`` tracks the groups that it gave out: every group is either returned to it, or
    passed to ``done``, when the trainer has got it or it was dropped. A source without it gets back only the groups
    that a later rollout can use.
    """

    def get_samples(self, num_samples: int, /) -> list[Group]:
        """Return ``num_samples`` groups (not samples), returned ones first; fewer at the end of the source."""
        ...

    def add_samples(self, samples: list[Group], /) -> object:
        """Take groups back."""
        ...


def prompt_groups(samples: Iterable[Sample], n_samples_per_prompt: int) -> Iterator[Group]:
    """Make a group of each sample: ``n_samples_per_prompt`` deep copies with ``group_index`` and ``index`` set.

    Both are counted from 0: ``group_index`` over the prompts, ``index`` over all samples.

    Raises:
        ValueError: ``n_samples_per_prompt`` is below 1.
    """
    if n_samples_per_prompt < 1:
        raise ValueError(f"n_samples_per_prompt must be at least 1, not {n_samples_per_prompt}")
    numbers = itertools.count()
    for group_index, sample in enumerate(samples):
        group = [copy.deepcopy(sample) for _ in range(n_samples_per_prompt)]
        for member in group:
            member.group_index, member.index = group_index, next(numbers)
        yield group


def samples_of(group: Elements) -> list[Sample]:
    """All samples of a group in one flat list."""
    return [sample for element in group for sample in (element if isinstance(element, list) else [element])]


def sort_key(group: Elements) -> tuple[int, int]:
    """The indices of a group and of its first sample: groups are given to the trainer in this order."""
    first = next(iter(samples_of(group)), None)
    return getattr(first, "group_index", None) or 0, getattr(first, "index", None) or 0


def unfinished_samples(group: Elements) -> list[Sample]:
    """The samples that are not finished."""
    return [sample for sample in samples_of(group) if not is_finished(sample)]


def is_complete(group: Elements, *, needs_reward: bool) -> bool:
    """Whether all samples are finished, and have a reward if they need one."""
    return all(is_finished(s) and not (needs_reward and s.reward is None) for s in samples_of(group))


def is_partial(group: Elements) -> bool:
    """Whether an unfinished sample has a response, which a later rollout can resume."""
    return any(sample.response_length for sample in unfinished_samples(group))


def has_started(group: Elements) -> bool:
    """Whether any sample has a response or is finished."""
    return any(sample.response_length or is_finished(sample) for sample in samples_of(group))


def copy_indices(sample: Sample, made: Iterable[Sample]) -> None:
    """Set ``group_index`` and ``index`` of samples that were made of ``sample``, where they have none.

    A source identifies its groups by them.
    """
    for each in made:
        for name in ("group_index", "index"):
            if getattr(each, name, None) is None:
                setattr(each, name, getattr(sample, name, None))


def count_tokens(samples: Iterable[Sample]) -> int:
    """The number of tokens in the responses of all samples."""
    return sum(sample.response_length for sample in samples)


def restart_samples(samples: Iterable[Sample]) -> int:
    """Reset samples to their prompts, in every field; returns the number of response tokens that this drops."""
    samples = list(samples)
    dropped = count_tokens(samples)
    for sample in samples:
        restart(sample)
    return dropped


def mark_start(group: Elements, version: int) -> None:
    """Set ``metadata["start_rollout_id"]`` of each sample that has a response and no such key."""
    for sample in samples_of(group):
        if sample.response_length and START_ROLLOUT_ID not in metadata_of(sample):
            own_metadata(sample)[START_ROLLOUT_ID] = version


def start_of(group: Elements, version: int) -> int:
    """The rollout (or weight version) in which the oldest response of the group started; ``version`` if none is set."""
    metadata = [metadata_of(sample) for sample in samples_of(group)]
    starts: list[int] = [each[START_ROLLOUT_ID] for each in metadata if START_ROLLOUT_ID in each]
    return min([version, *starts])
