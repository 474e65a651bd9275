"""A data source with a buffer that outlives its process: ``--data-source-path streamfold.slime.DataSource``, or vime's.

The hosts save how far prompts were read, and lose what waits in the buffer. This one saves, beside the host's own file,
all groups that were drawn and that the trainer has not got yet: partial ones, finished ones that wait, and those in
flight. So a run that goes on from a checkpoint gives the trainer no group twice, and none is missing.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from streamfold.rollout.buffer import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamfold.integrations.base import Args, Host
    from streamfold.rollout.groups import Group

__all__ = ["DurableSource", "data_source"]

log = logging.getLogger("streamfold")

T = TypeVar("T")
_Source: TypeAlias = Any  # the data source, by its attributes that are the host's

_COUNTERS: Final = ("epoch_id", "sample_group_index", "sample_index", "sample_offset")


class DurableSource:
    """What our ``DataSource`` adds to the host's ``RolloutDataSourceWithBuffer``.

    Groups are taken from the buffer first, oldest first, or as ``buffer_filter_path`` chooses; then new ones are drawn.
    Rollout functions of streamfold tell it what becomes of each group. To others it is what the host's is, a buffer of
    what came back; that is saved as well.

    Attributes:
        buffer: a :class:`~streamfold.rollout.buffer.Buffer`.
        keeps_account: whether groups that were taken are in flight until somebody tells :meth:`done`.
    """

    _package: str  # the host's name
    _draw: Callable[[_Source], Group]
    _sample_type: type[Any]

    def __init__(self, args: Args) -> None:
        self._super.__init__(args)
        here: _Source = self
        self._chooses = bool(
            getattr(args, "buffer_filter_path", None) or getattr(args, "buffer_sort_by_staleness", False)
        )
        prompts = None if here.dataset is None else _Prompts(here, self._draw, self._package)
        self._new_buffer = functools.partial(Buffer, prompts, self._sample_type)
        self.buffer = self._new_buffer()
        self.keeps_account = False
        self._delivered: tuple[int, list[Group]] | None = None
        self._call: Callable[[Callable[[], Any]], Any] | None = None

    @property
    def _super(self) -> _Source:
        return super()

    # Groups.

    def get_samples(self, num_samples: int) -> list[Group]:
        """Give so many groups, waiting ones first.

        Raises:
            RuntimeError: there are no prompts to draw, and fewer groups wait.
        """
        return self._there(lambda: self._take(num_samples))

    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back.

        Raises:
            ValueError: one has not ``n_samples_per_prompt`` samples, or waits already; none has been taken then.
        """
        size = self._host_args.n_samples_per_prompt
        for group in samples:
            if len(group) != size:
                raise ValueError(f"a group that comes back has {len(group)} samples; n_samples_per_prompt is {size}")
        self._there(lambda: self.buffer.put(samples))

    def done(self, groups: list[Group]) -> None:
        """Forget groups that the trainer got, or that were dropped."""
        self._there(lambda: self.buffer.done(groups))

    def delivered(self, groups: list[Group], rollout_id: int) -> None:
        """Take note which groups a rollout gave the trainer, as the state of an earlier one may be saved after that."""
        self._delivered = (rollout_id, groups)

    def get_buffer_length(self) -> int:
        """Groups that wait."""
        return len(self.buffer)

    def lives_in(self, call: Callable[[Callable[[], Any]], Any] | None) -> None:
        """Say how to call a function where groups are being written; None: anywhere."""
        self._call = call

    # The file.

    def save(self, rollout_id: int) -> None:
        """Write ``{args.save}/rollout/streamfold_buffer_{rollout_id}``, and the host's own file.

        What the trainer got in a later rollout than ``rollout_id``, as an asynchronous trainer does before it saves,
        counts as not delivered: a run that goes on from here gives it that again.

        Raises:
            ValueError: a sample cannot be written; the message names it and the field.
            OSError: the disk is full, or gone.
        """
        path = _path(self._host_args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write = self._there(lambda: self._saving(path, rollout_id))
        write()  # here: a disk may be slow, and streams are read there
        self._super.save(rollout_id)  # second: without ours it would be a state that has lost the buffer

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from what :meth:`save` wrote for that rollout; from the host's file alone if there is no other.

        Raises:
            ValueError: our file is damaged, or of something else.
            RuntimeError: groups are in flight.
        """
        args = self._host_args
        if getattr(args, "load", None) is None:
            return
        if self._call is not None:
            raise RuntimeError(f"groups are in flight: call streamfold.{self._package}.close_rollout() before load()")
        path = _path(args.load, rollout_id)
        try:
            self._super.load(rollout_id)
        except Exception as error:
            if not path.exists():
                raise
            log.warning(
                "%s's own state of rollout %s cannot be read (%r); ours is enough", self._package, rollout_id, error
            )
        if path.exists():
            self.buffer.load(path)
            self._delivered = None
            log.info("%s: %d groups wait, %d have been drawn", path, len(self.buffer), self.buffer.position)
            return
        here: _Source = self
        self.buffer = self._new_buffer(position=here.sample_group_index)
        if self.buffer.position:
            log.warning("there is no %s: what waited when rollout %s was saved is not here", path, rollout_id)

    # Inside.

    @property
    def _host_args(self) -> Args:
        here: _Source = self
        return here.args

    def _there(self, function: Callable[[], T]) -> T:
        """Call a function where groups are being written."""
        if self._call is None:
            return function()
        result: T = self._call(function)
        return result

    def _take(self, count: int) -> list[Group]:
        here: _Source = self
        if here.dataset is None and len(self.buffer) < count:
            raise RuntimeError(
                f"{count} groups are asked for, {len(self.buffer)} wait, and there are no prompts to draw: "
                "add groups, or give --prompt-data and --rollout-global-dataset"
            )
        taken = self._chosen(count) if self._chooses else self.buffer.take(count)
        if not self.keeps_account:
            self.buffer.done(taken)
        return taken

    def _chosen(self, count: int) -> list[Group]:
        """Groups that the host's filter chooses among those that wait, and new ones."""
        here: _Source = self
        waiting = self.buffer.take(len(self.buffer))
        rest, chosen = list(waiting), []
        try:
            if waiting and count:
                chosen = here.buffer_filter(here.args, None, rest, count)
            new = self.buffer.take(count - len(chosen))
        except BaseException:
            self.buffer.put(waiting)
            raise
        left = {id(group) for group in rest} - {id(group) for group in chosen}
        kept = {*left, *map(id, chosen)}
        self.buffer.put([group for group in rest if id(group) in left])
        dropped = [group for group in waiting if id(group) not in kept]
        if dropped:
            log.info("the buffer's filter dropped %d groups", len(dropped))
        self.buffer.done(dropped)
        return [*chosen, *new]

    def _saving(self, path: Path, rollout_id: int) -> Callable[[], None]:
        later, groups = self._delivered or (rollout_id, [])
        ahead = groups if later > rollout_id else []
        self.buffer.put(ahead)
        try:
            return self.buffer.saving(path)
        finally:
            self.buffer.done(ahead)


class _Prompts:
    """The host's groups, one at a time, from where the host has got to; that can be set."""

    def __init__(self, source: _Source, draw: Callable[[_Source], Group], package: str) -> None:
        self._source = source
        self._draw = draw
        self._package = package

    def __iter__(self) -> Iterator[Group]:
        while True:
            yield self._draw(self._source)

    def seek(self, position: int) -> None:
        """Go behind so many groups. The host's own file says the same, if it was not lost on the way."""
        source = self._source
        told = source.sample_group_index
        if told == position:
            return
        log.warning("%s's own state tells of %d groups, ours of %d: ours counts", self._package, told, position)
        if told > position:
            for name in _COUNTERS:
                setattr(source, name, 0)
            if getattr(source.args, "rollout_shuffle", False):
                source.dataset.shuffle(0)
        while source.sample_group_index < position:
            self._draw(source)


def _path(folder: str, rollout_id: int | None) -> Path:
    return Path(folder) / "rollout" / f"streamfold_buffer_{rollout_id}"


def data_source(host: Host) -> type[Any]:
    """The class that is both the host's and ours: ``DataSource`` of our module for it.

    Raises:
        ModuleNotFoundError: the host is not installed.
    """
    try:
        module: Any = host.module("rollout.data_source")
    except ModuleNotFoundError:  # older releases
        module = host.module("ray.rollout_data_source")
    sample_type = host.module("utils.types").Sample
    return _made(host.package, module.RolloutDataSource, module.RolloutDataSourceWithBuffer, sample_type)


@functools.cache
def _made(package: str, plain: Any, buffered: Any, sample_type: type[Any]) -> type[Any]:  # noqa: ANN401  # the host's
    members = {
        "__doc__": DurableSource.__doc__,
        "__module__": f"streamfold.{package}",
        "_package": package,
        "_draw": staticmethod(lambda source: plain.get_samples(source, 1)[0]),
        "_sample_type": sample_type,
    }
    return type("DataSource", (DurableSource, buffered), members)
