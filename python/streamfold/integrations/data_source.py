"""A data source whose buffer survives a crash: ``--data-source-path streamfold.slime.DataSource``.

For vime it is ``streamfold.vime.DataSource``.

slime and vime save how many prompts were read, and lose the groups in the buffer. This data source also saves, beside
the trainer's own file, every group that was drawn and not delivered yet: partial ones, finished ones that wait for the
next rollout, and those in flight. A run that resumes from a checkpoint delivers each group exactly once. Metadata that
is neither JSON nor arrays is pickled: load checkpoints that you trust, as for the trainer's own.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from streamfold.rollout.buffer import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamfold.integrations.base import Integration
    from streamfold.integrations.settings import Args
    from streamfold.rollout.groups import Group

__all__ = ["DurableBuffer", "data_source_class", "durable_buffer"]

_logger = logging.getLogger("streamfold")

T = TypeVar("T")
TrainerSource: TypeAlias = Any  # the trainer's RolloutDataSourceWithBuffer

_COUNTERS: Final = ("epoch_id", "sample_group_index", "sample_index", "sample_offset")


class DurableBuffer:
    """The buffer of our ``DataSource``: which groups are in flight or waiting, and the file in which they are saved.

    Waiting groups are served first, oldest first or as ``--buffer-filter-path`` chooses; then new ones are drawn.

    Args:
        source: the trainer's data source, used for its options, its prompts and its buffer filter.
        draw: draws one new group from the trainer's prompts.
        sample_type: the trainer's ``Sample``.
        package: the trainer's name, for log messages.

    Attributes:
        buffer: the groups. :meth:`load` may replace it.
        tracks_in_flight: whether groups that were taken are in flight until :meth:`done`. Our rollout functions set it,
            as they report every group. Others only give back what they do not use: then taken groups count as done.
    """

    def __init__(self, source: TrainerSource, draw: Callable[[], Group], sample_type: type[Any], package: str) -> None:
        args = source.args
        self._source = source
        self._package = package
        self._has_filter = bool(
            getattr(args, "buffer_filter_path", None) or getattr(args, "buffer_sort_by_staleness", False)
        )
        self._new_buffer = functools.partial(Buffer, _Prompts(source, draw, package), sample_type)
        self.buffer: Buffer = self._new_buffer()
        self.tracks_in_flight = False
        self._delivered: tuple[int, list[Group]] | None = None  # the last rollout, and its groups
        self._run: Callable[[Callable[[], Any]], Any] | None = None

    # Groups.

    def take(self, count: int) -> list[Group]:
        """Give ``count`` groups, waiting ones first.

        Raises:
            Exception: the trainer's, if fewer groups wait and it gives none without prompts. Those that wait stay.
        """
        return self._in_loop(lambda: self._take(count))

    def put(self, groups: list[Group]) -> None:
        """Take groups back.

        Raises:
            ValueError: a group has not ``n_samples_per_prompt`` samples, or waits already. Then none is taken.
        """
        size = self._source.args.n_samples_per_prompt
        for group in groups:
            if len(group) != size:
                raise ValueError(f"a returned group has {len(group)} samples; n_samples_per_prompt is {size}")
        self._in_loop(lambda: self.buffer.put(groups))

    def done(self, groups: list[Group]) -> None:
        """Forget groups that were delivered or dropped."""
        self._in_loop(lambda: self.buffer.done(groups))

    def delivered(self, groups: list[Group], rollout_id: int) -> None:
        """Note the groups that a rollout delivered: the state of an earlier rollout may be saved after that."""
        self._delivered = (rollout_id, groups)

    def run_in(self, run: Callable[[Callable[[], Any]], Any] | None) -> None:
        """While groups are in flight in another thread: ``run`` calls a function there. None: no such thread."""
        self._run = run

    # The file.

    def save(self, rollout_id: int) -> None:
        """Write ``{args.save}/rollout/streamfold_buffer_{rollout_id}``.

        Groups delivered by a later rollout than ``rollout_id``, as an asynchronous trainer has them before it saves,
        are saved as not delivered: a run that resumes from here delivers them again.

        Raises:
            ValueError: a sample cannot be saved; the message names it and the field.
            OSError: the disk is full or not writable.
        """
        path = _path(self._source.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write = self._in_loop(lambda: self._packed(path, rollout_id))
        write()  # in this thread: a slow disk must not block the streams

    def load(self, rollout_id: int | None, load_trainer_state: Callable[[int | None], object]) -> None:
        """Restore what :meth:`save` wrote for a rollout; if there is no such file, the trainer's own state alone.

        Raises:
            ValueError: our file is damaged, or of another kind.
            RuntimeError: groups are in flight.
        """
        args = self._source.args
        if getattr(args, "load", None) is None:
            return
        if self._run is not None:
            raise RuntimeError(f"groups are in flight: call streamfold.{self._package}.close_rollout() before load()")
        path = _path(args.load, rollout_id)
        try:
            load_trainer_state(rollout_id)
        except Exception as error:
            if not path.exists():
                raise
            _logger.warning(
                "%s's own state of rollout %s cannot be read (%r); ours is enough", self._package, rollout_id, error
            )
        if path.exists():
            self.buffer.load(path, trusted=True)  # as the trainer trusts its own state beside it
            self._delivered = None
            _logger.info("%s: %d groups wait, %d have been drawn", path, len(self.buffer), self.buffer.position)
            return
        self.buffer = self._new_buffer(position=self._source.sample_group_index)
        if self.buffer.position:
            _logger.warning("there is no %s: groups that waited when rollout %s was saved are lost", path, rollout_id)

    # Inside.

    def _in_loop(self, function: Callable[[], T]) -> T:
        """Call a function in the thread that writes samples, so that it sees none half written."""
        if self._run is None:
            return function()
        result: T = self._run(function)
        return result

    def _take(self, count: int) -> list[Group]:
        taken = self._take_filtered(count) if self._has_filter else self.buffer.take(count)
        if not self.tracks_in_flight:
            self.buffer.done(taken)
        return taken

    def _take_filtered(self, count: int) -> list[Group]:
        """The groups that the trainer's buffer filter chooses among the waiting ones, then new ones."""
        waiting = self.buffer.take(len(self.buffer))
        rest, chosen = list(waiting), []
        try:
            if waiting and count:
                chosen = self._source.buffer_filter(self._source.args, None, rest, count)  # which changes rest
            new = self.buffer.take(count - len(chosen))
        except BaseException:
            self.buffer.put(waiting)
            raise
        left = {id(group) for group in rest} - {id(group) for group in chosen}
        kept = {*left, *map(id, chosen)}
        self.buffer.put([group for group in rest if id(group) in left])
        dropped = [group for group in waiting if id(group) not in kept]
        if dropped:
            _logger.info("the buffer filter dropped %d groups", len(dropped))
        self.buffer.done(dropped)
        return [*chosen, *new]

    def _packed(self, path: Path, rollout_id: int) -> Callable[[], None]:
        """Serialize now; the result writes the file."""
        later, groups = self._delivered or (rollout_id, [])
        ahead = groups if later > rollout_id else []
        self.buffer.put(ahead)
        try:
            return self.buffer.saving(path)
        finally:
            self.buffer.done(ahead)


class _Prompts:
    """The trainer's prompts as a source for :class:`~streamfold.rollout.buffer.Buffer`, one group at a time."""

    def __init__(self, source: TrainerSource, draw: Callable[[], Group], package: str) -> None:
        self._source = source
        self._draw = draw
        self._package = package

    def __iter__(self) -> Iterator[Group]:
        while True:
            yield self._draw()

    def seek(self, position: int) -> None:
        """Continue behind that many groups. The trainer's own file says the same, unless it was lost or replaced."""
        source = self._source
        drawn = source.sample_group_index
        if drawn == position:
            return
        _logger.warning(
            "%s's own state is after %d groups, ours after %d: ours is used", self._package, drawn, position
        )
        if drawn > position:
            for name in _COUNTERS:
                setattr(source, name, 0)
            if getattr(source.args, "rollout_shuffle", False) and source.dataset is not None:
                source.dataset.shuffle(0)
        while source.sample_group_index < position:
            self._draw()


def _path(folder: str, rollout_id: int | None) -> Path:
    return Path(folder) / "rollout" / f"streamfold_buffer_{rollout_id}"


def durable_buffer(data_source: TrainerSource) -> DurableBuffer | None:
    """The durable buffer of our ``DataSource``; None: it is another data source."""
    durable = getattr(data_source, "durable", None)
    return durable if isinstance(durable, DurableBuffer) else None


def data_source_class(integration: Integration) -> type[Any]:
    """``DataSource`` of :mod:`streamfold.slime` or :mod:`streamfold.vime`: a subclass of the trainer's own class.

    Raises:
        ModuleNotFoundError: the trainer is not installed.
    """
    try:
        module: Any = integration.module("rollout.data_source")
    except ModuleNotFoundError:  # older releases
        module = integration.module("ray.rollout_data_source")
    sample_type = integration.module("utils.types").Sample
    return _subclass(integration, module.RolloutDataSource, module.RolloutDataSourceWithBuffer, sample_type)


@functools.cache  # one class for each installed trainer, so that isinstance works
def _subclass(integration: Integration, prompts_only: Any, with_buffer: Any, sample_type: type[Any]) -> type[Any]:  # noqa: ANN401
    class DataSource(with_buffer):  # type: ignore[misc]  # the trainer's class is known at run time only
        """The trainer's ``RolloutDataSourceWithBuffer``, with a buffer that is saved and loaded with the checkpoint.

        Raises:
            ValueError: ``rollout_data_transport`` is ``"straw"``.

        Attributes:
            durable: what our rollout functions report their groups to.
            buffer: its groups, a :class:`~streamfold.Buffer`.
        """

        __module__ = f"streamfold.{integration.package}"
        __qualname__ = "DataSource"

        def __init__(self, args: Args) -> None:
            integration.refuse_leases(args, "DataSource")
            super().__init__(args)
            self.durable = DurableBuffer(self, self._draw, sample_type, integration.package)
            self.buffer: Any = self.durable.buffer

        def _draw(self) -> Any:  # noqa: ANN401  # one group
            if self.dataset is not None:
                return prompts_only.get_samples(self, 1)[0]
            # Without a dataset the class with a buffer decides: some releases give blank samples, others raise.
            self.buffer = []
            try:
                return super().get_samples(1)[0]
            finally:
                self.buffer = self.durable.buffer

        def get_samples(self, num_samples: int) -> list[Group]:
            return self.durable.take(num_samples)

        def add_samples(self, samples: list[Group]) -> None:
            self.durable.put(samples)

        def done(self, groups: list[Group]) -> None:
            self.durable.done(groups)

        def get_buffer_length(self) -> int:
            return len(self.buffer)

        def save(self, rollout_id: int) -> None:
            self.durable.save(rollout_id)
            super().save(rollout_id)  # second: alone it would be a state that has lost the buffer

        def load(self, rollout_id: int | None = None) -> None:
            self.durable.load(rollout_id, super().load)
            self.buffer = self.durable.buffer

    return DataSource
