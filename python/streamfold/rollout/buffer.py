"""``Buffer``: holds the groups that have left the prompt source and not reached the trainer, across checkpoints.

An aborted rollout leaves partial groups; over-sampling leaves finished groups that were not needed. They
wait here, and are given to the next rollout before new ones. :meth:`Buffer.save` writes every group that has left the
source and has not reached the trainer, so that after a restart no group is missing and none is given twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from streamfold._types import SampleLike
from streamfold.rollout import serialization
from streamfold.rollout.opaque import Opaque, type_name
from streamfold.samples.metadata import rename_old_keys
from streamfold.samples.sample import Sample

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from streamfold.rollout.groups import AnyGroup, Group

__all__ = ["Buffer", "Opaque", "SavedSample", "decode_group", "encode_group"]

# The name of our sample type in files. It does not change if the class is moved.
_OURS: Final = "streamfold.Sample"
# Under which names files hold our keys of metadata; files without the entry have the old ones.
_METADATA_KEYS: Final = 2


class SavedSample(SampleLike, Protocol):
    """A sample type that a buffer can save. ``Sample`` is saved field by field, without these methods."""

    def to_dict(self) -> dict[str, Any]:
        """All fields; arrays of numpy and torch may be among the values."""
        ...

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SampleLike:
        """The sample with the fields that :meth:`to_dict` returned."""
        ...


class Buffer:
    """The groups that wait and those that are in flight, between a source of prompts and the trainer.

    Every group of the source is at any time in exactly one place: not drawn yet, waiting, in flight, or done. A group
    is identified by the ``group_index`` of its first sample, so it may be put back as another list; without a
    ``group_index`` by the identity of its list. No two groups in the buffer may have the same index, also not if they
    are of different epochs.

    Call all methods in the thread that writes the samples: saving reads those in flight.

    Args:
        source: groups, as of :func:`~streamfold.prompt_groups`, which are drawn one at a time when they are needed; it
            may be infinite. For the data source of a host::

                def groups(data_source):
                    while drawn := data_source.get_samples(1):
                        yield from drawn

            After :meth:`load` as many groups are drawn and dropped as had been drawn before, so the source must give
            the same groups again. If it has a method ``seek(position)``, that is called instead.
        sample_type: the type of all samples here. Other types than ``Sample`` are saved by their ``to_dict`` and
            restored by their ``from_dict``. Tensors are restored on the CPU.
        position: how many groups were drawn before the first one that ``source`` gives.
    """

    def __init__(
        self, source: Iterable[AnyGroup] | None = None, sample_type: type[SavedSample] = Sample, *, position: int = 0
    ) -> None:
        self._source = source
        self._sample_type = sample_type
        self._waiting: dict[Hashable, Group] = {}  # oldest first
        self._in_flight: dict[Hashable, Group] = {}
        self._position = position
        self._iterator: Iterator[Group] | None = None  # of the source
        self._drawn = position  # by the iterator: less than _position after a load, until it has caught up

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._waiting)

    def __repr__(self) -> str:
        kind = "" if self._sample_type is Sample else f" of {_name_of_type(self._sample_type)}"
        return f"<Buffer{kind}: {len(self)} groups wait, {self.in_flight} in flight, {self._position} drawn>"

    @property
    def in_flight(self) -> int:
        """Groups that were taken, and neither put back nor done."""
        return len(self._in_flight)

    @property
    def position(self) -> int:
        """Groups that were drawn from the source since its beginning."""
        return self._position

    def take(self, n: int) -> list[Group]:
        """Return ``n`` groups, which are in flight then: those that have waited longest, then new ones of the source.

        Fewer are returned only at the end of the source. If the source raises, the groups drawn before that wait here.

        Raises:
            ValueError: ``n`` is negative, the source gave a group with the index of another group here, or after a load
                it ended before the position that it had when the buffer was saved.
        """
        if n < 0:
            raise ValueError(f"{n} groups cannot be taken: n must be 0 or more")
        while len(self._waiting) < n and (group := self._draw()) is not None:
            key = _key(group)
            if key in self._waiting or key in self._in_flight:
                raise ValueError(
                    f"the source gave {_describe(group)}, but a group of that index is in the buffer: "
                    "the source must not restart group_index at a new epoch"
                )
            self._waiting[key] = group
        taken = list(self._waiting.items())[:n]
        for key, group in taken:
            del self._waiting[key]
            self._in_flight[key] = group
        return [group for _, group in taken]

    def put(self, groups: Iterable[AnyGroup]) -> None:
        """Take groups back, partial or finished ones; they wait behind those that wait. They need not be of the source.

        Raises:
            ValueError: a group waits already. None of the groups has been put then.
        """
        returned: dict[Hashable, AnyGroup] = {}
        for group in groups:
            key = _key(group)
            if key in self._waiting or key in returned:
                raise ValueError(
                    f"{_describe(group)} waits already: it was put back twice, or two groups have its index"
                )
            returned[key] = group
        for key in returned:
            self._in_flight.pop(key, None)
        self._waiting.update(returned)

    def done(self, groups: Iterable[AnyGroup]) -> None:
        """Forget groups that the trainer has got or that were dropped, whether they are in flight or wait.

        Idempotent; unknown groups are ignored.
        """
        for key in [_key(group) for group in groups]:
            self._in_flight.pop(key, None)
            self._waiting.pop(key, None)

    # The names that the hosts' data sources use, and with them `streamfold.Source`.
    get_samples = take
    add_samples = put

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the groups that wait and those in flight, as they are at this moment, and the position in the source.

        The file is replaced atomically and durably; after an error it has its old content. It is bit-exact, and has a
        checksum. ``metadata``, ``label`` and all other fields may hold any value that can be pickled: None, bool, int,
        float, str, bytes, list, tuple, dict, arrays and scalars of numpy, torch tensors and Pillow images are stored
        as they are, a value of any other type is pickled; see :meth:`load`.

        Raises:
            ValueError: a value cannot be pickled; the message names sample and field.
            OSError: the file cannot be written.
        """
        self.saving(path)()

    def saving(self, path: str | os.PathLike[str]) -> Callable[[], None]:
        """Take a snapshot of what :meth:`save` writes, and return the function that writes it, in any thread.

        A slow disk then does not block the event loop::

            await asyncio.to_thread(buffer.saving(path))

        Raises:
            ValueError: as :meth:`save`. The returned function raises the ``OSError``.
        """
        content = {
            "position": self._position,
            "sample_type": _name_of_type(self._sample_type),
            "metadata_keys": _METADATA_KEYS,
            "waiting": [encode_group(group, self._sample_type) for group in self._waiting.values()],
            "in_flight": [encode_group(group, self._sample_type) for group in self._in_flight.values()],
        }
        try:
            return functools.partial(serialization.Snapshot(content).write, Path(path))
        except serialization.UnsupportedValue as error:
            culprit = _describe_location(content, error.location)
            raise ValueError(f"{path} was not written: {culprit} {error.problem}") from error

    def load(self, path: str | os.PathLike[str], *, trusted: bool = False) -> None:
        """Replace the content of the buffer by that of a file.

        Groups that were in flight wait again, before those that waited, in the same order. After an error the buffer is
        unchanged.

        Args:
            path: the file that :meth:`save` wrote.
            trusted: whether to unpickle the values that were pickled (see :meth:`save`). Unpickling can run any code,
                so use it only for files that you wrote. Otherwise nothing in the file is run: each of these values is
                an :class:`~streamfold.rollout.buffer.Opaque`, which is saved again unchanged.

        Raises:
            ValueError: the file is damaged, of another kind, of a later version or of other samples; a pickled value
                cannot be unpickled; or the source cannot go back to the position that it had.
            ImportError: the file holds torch tensors or images, and torch or pillow is not installed.
            OSError: the file cannot be read.
        """
        content = serialization.load(Path(path), trusted=trusted)
        saved, ours = content["sample_type"], _name_of_type(self._sample_type)
        if (saved == _OURS) != (ours == _OURS):
            raise ValueError(
                f"{path} holds samples of type {saved}, but this buffer makes {ours}: "
                "pass that type to Buffer(source, sample_type=...)"
            )
        has_old_names = "metadata_keys" not in content
        waiting: dict[Hashable, Group] = {}
        for encoded in (*content["in_flight"], *content["waiting"]):
            try:
                group = decode_group(encoded, self._sample_type, has_old_names=has_old_names)
            except Exception as error:
                raise ValueError(
                    f"{path} holds a sample of type {saved} from which {ours} cannot be made ({error!r}): "
                    "load it with the version of that type with which it was saved"
                ) from error
            waiting[_key(group)] = group
        self._seek(content["position"], path)
        self._waiting, self._in_flight = waiting, {}

    def _draw(self) -> Group | None:
        """The next group of the source, after the iterator has caught up with the position; None at its end."""
        if self._source is None:
            return None
        if self._iterator is None:
            self._iterator = iter(self._source)
        for group in self._iterator:
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

    def _seek(self, position: int, path: str | os.PathLike[str]) -> None:
        """Set the position. The groups before it are skipped by the next draw, as that cannot be undone."""
        if (seek := getattr(self._source, "seek", None)) is not None:
            seek(position)
            self._iterator, self._drawn = None, position
        elif not isinstance(self._source, Iterator):
            self._iterator, self._drawn = None, 0
        elif self._drawn > position:
            raise ValueError(
                f"{path} was saved after {position} groups of the source, but {self._drawn} have been drawn from this "
                "iterator, which cannot go back: load into a new Buffer with a fresh source"
            )
        self._position = position


def encode_group(group: AnyGroup, sample_type: type[SavedSample] = Sample) -> list[Any]:
    """A group as a tree that :mod:`streamfold.rollout.serialization` takes.

    Raises:
        ValueError: a sample is not of ``sample_type``, or its ``to_dict`` raised an error.
    """
    return [
        [_encode_sample(sample, sample_type) for sample in element]
        if isinstance(element, list)
        else _encode_sample(element, sample_type)
        for element in group
    ]


def _encode_sample(sample: Any, sample_type: type[SavedSample]) -> dict[str, Any]:  # noqa: ANN401  # ours or a host's
    name = f"sample {getattr(sample, 'index', None)} of group {getattr(sample, 'group_index', None)}"
    if type(sample) is not sample_type:
        raise ValueError(
            f"{name} is of type {_name_of_type(type(sample))}, but this buffer would restore it as "
            f"{_name_of_type(sample_type)}: pass that type to Buffer(source, sample_type=...)"
        )
    try:
        if type(sample) is Sample:  # all attributes, including those that users have added; arrays stay arrays
            return {**vars(sample), "status": Sample.Status(sample.status).value}
        fields: dict[str, Any] = sample.to_dict()
    except Exception as error:
        raise ValueError(f"{name} cannot be saved ({error!r}): correct it, or pass its group to done()") from error
    return fields


def decode_group(
    encoded: list[Any], sample_type: type[SavedSample] = Sample, *, has_old_names: bool = False
) -> AnyGroup:
    """The group of which :func:`encode_group` made a tree; ``has_old_names``: of our keys in ``metadata``."""

    def decode(fields: dict[str, Any]) -> Any:  # noqa: ANN401  # of our type or a host's
        if has_old_names and "metadata" in fields:
            fields = {**fields, "metadata": rename_old_keys(fields["metadata"])}
        return _decode_sample(fields, sample_type)

    return [
        [decode(fields) for fields in element] if isinstance(element, list) else decode(element) for element in encoded
    ]


def _decode_sample(fields: dict[str, Any], sample_type: type[SavedSample]) -> Any:  # noqa: ANN401  # ours or a host's
    if sample_type is not Sample:
        return sample_type.from_dict(fields)
    sample = Sample()
    vars(sample).update(fields, status=Sample.Status(fields["status"]))
    return sample


def _key(group: AnyGroup) -> Hashable:
    """What identifies a group."""
    index = getattr(_first_sample(group), "group_index", None)
    return ("list", id(group)) if index is None else ("index", index)


def _first_sample(group: Any) -> Any:  # noqa: ANN401  # of our type or a host's; None if there is none
    if not isinstance(group, list):
        raise TypeError(f"a group is a list of samples, not a {_name_of_type(type(group))}: did you mean [group]?")
    for element in group:
        if not isinstance(element, list):
            return element
        if element:
            return element[0]
    return None


def _describe(group: AnyGroup) -> str:
    index = getattr(_first_sample(group), "group_index", None)
    return "a group without group_index" if index is None else f"group {index}"


def _name_of_type(kind: type) -> str:
    return _OURS if kind is Sample else type_name(kind)


def _describe_location(content: Mapping[str, Any], location: tuple[Any, ...]) -> str:
    """The sample and the field of a value in what was to be saved."""
    fields: Any = content[location[0]][location[1]]
    depth = 2
    while not isinstance(fields, dict):
        fields = fields[location[depth]]
        depth += 1
    where = location[0] + "".join(f"[{step}]" for step in location[1:depth])
    field, *inside = location[depth:]
    shown = "".join(f"[{step!r}]" for step in inside[:4]) + "..." * (len(inside) > 4)
    return f"sample {fields.get('index')} of group {fields.get('group_index')} ({where}): {field}{shown}"
