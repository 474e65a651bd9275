"""The rules of a group: the samples of one prompt, ours or a host's, which end, go back and start again together.

A group is a plain list. Where a generator made several samples of one, its element is a list of samples itself.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from streamfold.samples.metadata import START_ROLLOUT_ID
from streamfold.samples.reset import restart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from streamfold.samples.sample import Sample

__all__ = [
    "Group", "Source", "begun_in", "index_of", "is_begun", "is_finished", "is_over", "is_partial", "keep_indices",
    "open_ones", "prompt_groups", "samples_of", "stamp", "start_again", "tokens_of",
]  # fmt: skip

Group: TypeAlias = list[Any]

# FAILED is a host's word for a result of its own generator: whatever it is, it is not for us to generate again.
_FINISHED: Final = ("COMPLETED", "TRUNCATED", "FAILED")


class Source(Protocol):
    """Where groups come from and go back to: a :class:`~streamfold.rollout.buffer.Buffer`, or a host's data source.

    One that has ``done(groups)`` too keeps account of what it gave away: it is told of every group, and gets back each
    one that was not used up. Others get what a later rollout can go on with.
    """

    def get_samples(self, num_samples: int, /) -> list[Group]:
        """Give so many groups, those that came back first; fewer at the source's end."""

    def add_samples(self, samples: list[Group], /) -> object:
        """Take groups back."""


def prompt_groups(samples: Iterable[Sample], n_samples_per_prompt: int) -> Iterator[Group]:
    """Make a group of each sample: so many copies, numbered through in ``index``, and ``group_index``.

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


def samples_of(group: Group) -> list[Any]:
    """All samples of a group, or of an element of one, in one flat list."""
    return [sample for element in group for sample in (element if isinstance(element, list) else [element])]


def index_of(group: Group) -> tuple[int, int]:
    """By which groups are sorted."""
    first = next(iter(samples_of(group)), None)
    return getattr(first, "group_index", None) or 0, getattr(first, "index", None) or 0


def is_finished(sample: Any) -> bool:  # noqa: ANN401  # ours or a host's
    """Whether a sample has come to its end. One that has is never generated again."""
    return sample.status.name in _FINISHED


def open_ones(group: Group) -> list[Any]:
    """The samples that are not at their end."""
    return [sample for sample in samples_of(group) if not is_finished(sample)]


def is_over(group: Group, *, judged: bool) -> bool:
    """Whether nothing is left to do: all samples are at their end, and have a reward if they are ``judged``."""
    return all(is_finished(s) and not (judged and s.reward is None) for s in samples_of(group))


def is_partial(group: Group) -> bool:
    """Whether there is something to go on with: a sample that is not at its end has a response."""
    return any(sample.response_length for sample in open_ones(group))


def is_begun(group: Group) -> bool:
    """Whether any sample has a response, or is at its end."""
    return any(sample.response_length or is_finished(sample) for sample in samples_of(group))


def keep_indices(sample: Any, made: Iterable[Any]) -> None:  # noqa: ANN401  # ours or a host's
    """Give what was made of a sample its indices, where it has none: a source knows its groups by them."""
    for each in made:
        for name in ("group_index", "index"):
            if getattr(each, name, None) is None:
                setattr(each, name, getattr(sample, name, None))


def tokens_of(samples: Iterable[Any]) -> int:
    """How many tokens their responses have."""
    return sum(sample.response_length for sample in samples)


def start_again(samples: Iterable[Any]) -> int:
    """Take samples back to their prompts, clean in every field, and give the number of tokens that this drops."""
    samples = list(samples)
    dropped = tokens_of(samples)
    for sample in samples:
        restart(sample)
    return dropped


def stamp(group: Group, rollout_id: int) -> None:
    """Note in which rollout the responses were begun, once on each sample that has one."""
    for sample in samples_of(group):
        if sample.response_length and START_ROLLOUT_ID not in (sample.metadata or {}):
            sample.metadata = {**(sample.metadata or {}), START_ROLLOUT_ID: rollout_id}  # the old dict may be shared


def begun_in(group: Group, now: int) -> int:
    """The rollout in which its oldest response was begun; ``now`` if none is noted."""
    noted: list[int] = [
        s.metadata[START_ROLLOUT_ID] for s in samples_of(group) if START_ROLLOUT_ID in (s.metadata or {})
    ]
    return min([now, *noted])
