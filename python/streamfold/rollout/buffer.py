"""Groups on their way between a source of prompts and the trainer, kept safe from the death of the process.

A rollout that is cut leaves partial groups, and one that starts more than it needs leaves finished ones. They wait
here, and are served before anything new. :meth:`Buffer.save` writes down all that is neither in the source any more nor
with the trainer yet, so that after a restart from that file no group comes twice, and none is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from streamfold._types import SampleLike
from streamfold.rollout import serialization as archive
from streamfold.samples.sample import Sample

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Hashable, Iterable, Mapping

__all__ = ["Buffer", "Group", "SavedSample"]

Group: TypeAlias = list[Any]
"""The samples of one prompt, each a ``SampleLike``; where a generate function made several of one, a list of them."""

# What a file calls our own sample, wherever the class may move to.
_OURS: Final = "streamfold.Sample"


class SavedSample(SampleLike, Protocol):
    """What saving and loading need of a host's sample. Ours is saved field by field, without these."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values and arrays."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SampleLike:
        """The sample that :meth:`to_dict` told."""


class Buffer:
    """Groups that wait, and those in flight, between a source of prompts and the trainer.

    Each group of the source is at any time in exactly one place: not yet drawn, waiting, in flight, or done. A group is
    known by the ``group_index`` of its first sample, so it may come back as another list; without one, by the identity
    of its list. Indices must differ among the groups that are here, from epoch to epoch too.

    All calls come from the thread in which samples are written: a save looks into those in flight.

    Args:
        source: groups, read one at a time when they are needed; it may be endless. A host's data source makes one::

            def groups(data_source):
                while drawn := data_source.get_samples(1):
                    yield from drawn

            After :meth:`load` as many groups are drawn and dropped as had been drawn before, so it has to give the same
            ones again; a source that has ``seek(position)`` is told how many instead.
        sample_type: of all samples here. What is not ours is saved by its ``to_dict`` and made again by its
            ``from_dict``; what ``to_dict`` gives may hold arrays of numpy and torch, which come back on the CPU.
        position: how many groups were drawn before the first one that ``source`` will give.
    """

    def __init__(
        self, source: Iterable[Group] | None = None, sample_type: type[SavedSample] = Sample, *, position: int = 0
    ) -> None:
        self._source = source
        self._sample_type = sample_type
        self._waiting: dict[Hashable, Group] = {}  # oldest first, as in every dict
        self._in_flight: dict[Hashable, Group] = {}
        self._position = position
        self._groups: Iterator[Group] | None = None  # the source as it is being read,
        self._drawn = position  # and how far that is: after a load it has to catch up

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Groups that were taken, and neither put back nor done."""
        return len(self._in_flight)

    @property
    def position(self) -> int:
        """Groups drawn from the source, from its beginning."""
        return self._position

    def take(self, n: int) -> list[Group]:
        """Give the ``n`` groups that have waited longest, then new ones; they are in flight from now on.

        Fewer come only when the source has ended. If the source raises, what it gave before waits here.

        Raises:
            ValueError: the source gave a group whose index is that of another one here; or after a load it ended before
                the place where it had been.
        """
        if n < 0:
            raise ValueError(f"{n} groups cannot be taken: n must be 0 or more")
        while len(self._waiting) < n and (group := self._draw()) is not None:
            key = _key(group)
            if key in self._waiting or key in self._in_flight:
                raise ValueError(
                    f"the source gave {_name(group)}, but one of that index is here: go on counting from epoch to epoch"
                )
            self._waiting[key] = group
        taken = list(self._waiting.items())[:n]
        for key, group in taken:
            del self._waiting[key]
            self._in_flight[key] = group
        return [group for _, group in taken]

    def put(self, groups: Iterable[Group]) -> None:
        """Take groups back, partial ones or finished ones that nobody needs yet; they wait behind those that wait.

        A group that was never taken is welcome.

        Raises:
            ValueError: a group waits already; none has been put then.
        """
        back: dict[Hashable, Group] = {}
        for group in groups:
            key = _key(group)
            if key in self._waiting or key in back:
                raise ValueError(
                    f"{_name(group)} waits already: it was put back twice, or there are two groups of its index"
                )
            back[key] = group
        for key in back:
            self._in_flight.pop(key, None)
        self._waiting.update(back)

    def done(self, groups: Iterable[Group]) -> None:
        """Forget groups: they are with the trainer, or a filter dropped them.

        In flight or waiting makes no difference, and one that is not here is none: telling it twice does no harm.
        """
        for key in [_key(group) for group in groups]:
            self._in_flight.pop(key, None)
            self._waiting.pop(key, None)

    # The hosts' names.
    get_samples = take
    add_samples = put

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file what waits and what is in flight, as it is at this moment, and how far the source is read.

        The file is replaced at once and for good, and nobody sees half of it; after an error it is what it was. It is
        checked as a whole when it is loaded.

        Raises:
            ValueError: a sample cannot be written; the message names it and the field.
            OSError: the disk is full, or gone.
        """
        self.saving(path)()

    def saving(self, path: str | os.PathLike[str]) -> Callable[[], None]:
        """Take down now what :meth:`save` writes, and give the function that writes it, in whatever thread.

        Disks may be slow where event loops have to go on::

            await asyncio.to_thread(buffer.saving(path))

        Raises:
            ValueError: as :meth:`save`. The function raises the ``OSError``.
        """
        content = {
            "position": self._position,
            "sample_type": _type_name(self._sample_type),
            "waiting": [self._told(group) for group in self._waiting.values()],
            "in_flight": [self._told(group) for group in self._in_flight.values()],
        }
        try:
            return functools.partial(archive.Packed(content).write, Path(path))
        except archive.Unwritable as error:
            raise ValueError(f"{path} was not written: {_culprit(content, error.place)} {error.problem}") from None

    def load(self, path: str | os.PathLike[str]) -> None:
        """Put what a file holds in place of all that is here.

        What was in flight waits again, before what waited then, each in its order. After an error everything is as it
        was.

        Raises:
            ValueError: the file is damaged, of something else, of a later version or of other samples; or the source
                cannot go back to where it had been.
            ImportError: the file holds torch tensors, and torch is not installed.
            OSError: the file cannot be read.
        """
        content = archive.load(Path(path))
        there, here = content["sample_type"], _type_name(self._sample_type)
        if (there == _OURS) != (here == _OURS):
            raise ValueError(
                f"{path} holds samples of type {there}, but this buffer makes {here}: "
                "give Buffer(source, sample_type=...) the type that the file holds"
            )
        waiting: dict[Hashable, Group] = {}
        for told in (*content["in_flight"], *content["waiting"]):
            try:
                group = self._restored(told)
            except Exception as error:
                raise ValueError(
                    f"{path} holds a sample of type {there} of which {here} makes none ({error!r}): "
                    "load it where its type is as it was when it was saved"
                ) from error
            waiting[_key(group)] = group
        self._go_to(content["position"], path)
        self._waiting, self._in_flight = waiting, {}

    def _draw(self) -> Group | None:
        """One more group of the source, which first catches up with our position; None at its end."""
        if self._source is None:
            return None
        if self._groups is None:
            self._groups = iter(self._source)
        for group in self._groups:
            self._drawn += 1
            if self._drawn > self._position:
                self._position = self._drawn
                return group
        if self._drawn < self._position:
            raise ValueError(
                f"the source ended after {self._drawn} groups, but {self._position} had been drawn when the buffer was "
                "saved: give it the source that it had then"
            )
        return None

    def _go_to(self, position: int, path: str | os.PathLike[str]) -> None:
        """Let the source go on behind so many groups; to drop them is left to the next draw, as it cannot be undone."""
        if (seek := getattr(self._source, "seek", None)) is not None:
            seek(position)
            self._groups, self._drawn = None, position
        elif not isinstance(self._source, Iterator):
            self._groups, self._drawn = None, 0
        elif self._drawn > position:
            raise ValueError(
                f"{path} was saved after {position} groups of the source, but {self._drawn} have been drawn from this "
                "one, which cannot go back: load into a new Buffer with a fresh source"
            )
        self._position = position

    def _told(self, group: Group) -> list[Any]:
        return [
            [self._sample_told(sample) for sample in item] if isinstance(item, list) else self._sample_told(item)
            for item in group
        ]

    def _sample_told(self, sample: SampleLike) -> dict[str, Any]:
        name = f"sample {getattr(sample, 'index', None)} of group {getattr(sample, 'group_index', None)}"
        if type(sample) is not self._sample_type:
            raise ValueError(
                f"{name} is of type {_type_name(type(sample))}, but this buffer would restore it as one of type "
                f"{_type_name(self._sample_type)}: give Buffer(source, sample_type=...) the type of its samples"
            )
        try:
            if type(sample) is Sample:  # as it is: arrays stay arrays, and what others have added goes with it
                return {**vars(sample), "status": Sample.Status(sample.status).value}
            return sample.to_dict()
        except Exception as error:
            raise ValueError(f"{name} cannot be saved ({error!r}): mend it, or tell done() of its group") from error

    def _restored(self, told: list[Any]) -> Group:
        return [
            [self._sample(sample) for sample in item] if isinstance(item, list) else self._sample(item) for item in told
        ]

    def _sample(self, told: dict[str, Any]) -> SampleLike:
        if self._sample_type is not Sample:
            return self._sample_type.from_dict(told)
        sample = Sample()
        vars(sample).update(told, status=Sample.Status(told["status"]))
        return sample


def _key(group: Group) -> Hashable:
    """What a group is known by."""
    index = getattr(_first(group), "group_index", None)
    return ("list", id(group)) if index is None else ("index", index)


def _first(group: Group) -> Any:  # noqa: ANN401  # a sample, ours or a host's; None if there is none
    if not isinstance(group, list):
        raise TypeError(f"a group is a list of samples, not a {_type_name(type(group))}: did you mean [group]?")
    for item in group:
        if not isinstance(item, list):
            return item
        if item:
            return item[0]
    return None


def _name(group: Group) -> str:
    index = getattr(_first(group), "group_index", None)
    return "a group without group_index" if index is None else f"group {index}"


def _type_name(kind: type) -> str:
    return _OURS if kind is Sample else f"{kind.__module__}.{kind.__qualname__}"


def _culprit(content: Mapping[str, Any], place: tuple[Any, ...]) -> str:
    """The sample and the field at a place in what was to be saved."""
    told: Any = content[place[0]][place[1]]
    depth = 2
    while not isinstance(told, dict):
        told = told[place[depth]]
        depth += 1
    where = place[0] + "".join(f"[{step}]" for step in place[1:depth])
    field, *inside = place[depth:]
    shown = "".join(f"[{step!r}]" for step in inside[:4]) + "..." * (len(inside) > 4)
    return f"sample {told.get('index')} of group {told.get('group_index')} ({where}): {field}{shown}"
