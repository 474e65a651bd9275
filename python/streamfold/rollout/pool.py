"""``Pool``: fully asynchronous rollouts. Groups stay in flight while the trainer trains; finished ones wait for it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from streamfold.errors import StreamfoldError
from streamfold.rollout.metrics import EventLoopLag, RolloutStats
from streamfold.rollout.rollout import parts_of
from streamfold.rollout.tasks import wait_all
from streamfold.rollout.user_code import UserCode
from streamfold.rollout.watch import StallWatch

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from streamfold.rollout.groups import Group, Source
    from streamfold.rollout.rollout import Rollout
    from streamfold.rollout.scheduler import Scheduler

__all__ = ["Pool"]

_logger = logging.getLogger("streamfold")


class Pool:
    """Keeps up to ``in_flight`` groups in flight across rollouts, for fully asynchronous training.

    ::

        async with Pool(Rollout(client, config, reward=reward), buffer) as pool:
            while training:
                groups = await pool.next(64)
                ...
                await pool.pause()      # requests are aborted, what they generated is kept
                ...                     # load new weights into the engines
                pool.version += 1
                pool.resume()

    Every group that was taken from the source is at any time in flight, ready here, returned to the source, or with the
    trainer. Ready groups are only dropped by the filter. Leaving the block returns all other groups to the source.

    Args:
        rollout: client, configuration, reward, filter and generate functions. Of the configuration, ``groups`` is
            not used except as the default of ``over_sampling`` and as the size of a batch before the first call of
            :meth:`next`, ``max_staleness`` counts weight versions, and
            ``max_failures``, ``max_failure_rate`` and ``max_groups_drawn`` count from one call of :meth:`next` to the
            following one.
        source: of groups. If it has ``done``, as a :class:`~streamfold.Buffer`, that is called with the groups that the
            trainer got.
        in_flight: how many groups are in flight. None: ``over_sampling`` of the configuration, or else its
            ``groups``. No group is started while as many are ready.
        version: the initial :attr:`version`.

    Attributes:
        version: the version of the weights, an integer that the trainer increases by 1 for each batch that it takes. It
            is set on samples as ``metadata["start_rollout_id"]``. With ``max_staleness`` no more groups are started
            than can be given in time: ``max_staleness + 1`` batches, less the groups that are in flight, ready, or
            given in this version; a batch is the ``n`` of the last :meth:`next`. Tokens that become staler all the
            same, of responses that take many versions, are treated as ``config.stale`` says.

    Raises:
        ValueError: ``in_flight`` is below 1.
    """

    def __init__(self, rollout: Rollout, source: Source, *, in_flight: int | None = None, version: int = 0) -> None:
        self.version = version
        self._parts = parts_of(rollout)
        self._max_in_flight = self._parts.config.take_size if in_flight is None else in_flight
        if self._max_in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, not {in_flight}")
        self._stats = RolloutStats()
        self._tracker = self._parts.tracker(source, self._stats, returns_all=True)
        self._scheduler: Scheduler | None = None  # None: paused
        self._worker: asyncio.Task[None] | None = None
        self._error: BaseException | None = _not_open()
        self._batch = self._parts.config.groups  # the size of the last next()
        self._delivered, self._delivered_version = 0, version  # groups that were given in that version
        self._wanted = 0  # groups that callers of next() wait for
        self._counted_retries = self._parts.client.retried

    async def __aenter__(self) -> Self:
        """Start, in the running event loop."""
        self._rewards = self._parts.rewards()
        self._engines = await self._parts.count_engines()
        self._stop_lock = asyncio.Lock()
        self._changed = asyncio.Event()  # wakes the callers of next()
        self._started = asyncio.Event()  # wakes the worker
        self._lag = EventLoopLag()
        self._lag.start()
        self._progress = self._parts.progress("pool", None, self._stats, self._tracker, lambda: self.in_flight)
        self._progress.start()
        self._watch = StallWatch(self._tracker, self._stats, lambda: self._scheduler)
        self._watch.start()
        self._error = None
        self.resume()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Abort what is in flight, and return all groups to the source."""
        try:
            await self._stop(now=error is not None)
        finally:
            self._error = self._error or _not_open()
            self._lag.stop()
            self._progress.stop()
            self._watch.stop()
            self._tracker.return_all()
            if self._rewards is not None:
                self._rewards.warn_if_running()
            self._notify()

    def __repr__(self) -> str:
        state = "closed" if self._error is not None else "paused" if self._scheduler is None else "open"
        return f"<Pool: {state}, {self.in_flight} groups in flight, {self.ready} ready, version {self.version}>"

    @property
    def in_flight(self) -> int:
        """Groups in flight."""
        return 0 if self._scheduler is None else len(self._scheduler)

    @property
    def ready(self) -> int:
        """Finished groups that :meth:`next` can return at once."""
        return len(self._tracker.ready)

    async def next(self, n: int) -> list[Group]:
        """Wait for ``n`` finished groups and return them, in the order in which they finished.

        While the pool is paused this waits until :meth:`resume`, unless enough groups are ready.

        Returns:
            The groups; fewer than ``n`` only if nothing is in flight, and the source has no more or
            ``max_groups_drawn`` groups were taken since the last call. The log says which.

        Raises:
            StreamfoldError: more groups have failed since the last call than ``max_failures`` or ``max_failure_rate``
                allow.
            Exception: what the source or the filter raised. In both cases every group has been returned to the source,
                and the pool cannot be used any more.
        """
        tracker = self._tracker
        self._batch = n or self._batch
        self._wanted += n
        try:
            await self._wait_until_ready(n)
        finally:
            self._wanted -= n
        tracker.return_failed()
        groups = tracker.ready[:n]
        if self._parts.sample_filter is not None:
            with UserCode("the sample filter"):
                self._parts.sample_filter(groups)
        del tracker.ready[:n]
        for group in groups:
            tracker.deliver(group, self.version)
        self._delivered += len(groups)
        tracker.count_anew()
        self._start_groups()
        return groups

    async def pause(self) -> None:
        """Abort what is in flight, within ``config.abort_seconds``; nothing starts until :meth:`resume`.

        Unfinished groups are returned to the source, and resumed later. Rewards that are being computed are waited for
        until ``config.reward_seconds``; later ones are computed when their group is resumed.
        """
        try:
            await self._stop()
        finally:
            self._tracker.return_unused()

    def resume(self) -> None:
        """Start groups again after :meth:`pause`, aborted ones first if the source gives them first."""
        if self._scheduler is None and self._error is None:
            version = lambda: self.version  # noqa: E731  # of now, whenever it is called
            self._scheduler = self._parts.scheduler(self._stats, self._rewards, self._engines, version)
            self._worker = asyncio.get_running_loop().create_task(self._work(self._scheduler), name="streamfold pool")
            self._worker.add_done_callback(lambda _worker: self._notify())

    def metrics(self) -> dict[str, float]:
        """The metrics since the last call, under the same names as those of a rollout."""
        retried = self._parts.client.retried
        self._stats.retries, self._counted_retries = retried - self._counted_retries, retried
        metrics = self._stats.metrics(self._lag)
        self._stats.clear()
        self._lag.restart()
        return metrics

    async def _wait_until_ready(self, n: int) -> None:
        """Wait until ``n`` groups are ready, or no more will be."""
        while True:
            await self._raise_error()
            self._tracker.drop_stale(self.version)
            self._start_groups()
            if self.ready >= n:
                return
            if self._error is not None:
                continue
            if self._scheduler is None or len(self._scheduler):
                await self._changed.wait()
            elif not self._tracker.return_failed():
                why = self._tracker.note_shortage()
                losses = self._stats.explain_shortage()
                _logger.warning("%s: %d of %d groups are ready%s", why, self.ready, n, losses)
                return

    async def _work(self, scheduler: Scheduler) -> None:
        """Record groups as they end, and start others."""
        while self._error is None:
            self._start_groups()
            outcome = await scheduler.next_outcome()
            if outcome is None:
                self._started.clear()
                self._notify()
                await self._started.wait()
                continue
            self._tracker.record(outcome, len(scheduler))
            if outcome.is_cancelled:
                raise StreamfoldError("a task of the pool was cancelled from outside")
            self._notify()

    def _start_groups(self) -> None:
        """Start as many groups as there is room for. An error of the source is raised by the next call."""
        scheduler, tracker = self._scheduler, self._tracker
        enough = max(self._max_in_flight, self._wanted)
        try:
            while scheduler is not None and len(tracker.ready) < enough and (room := self._room(scheduler)) > 0:
                taken = tracker.take(room, self.version)
                for group in taken:
                    scheduler.start(group, self.version)
                if not taken:
                    break
                self._started.set()
        except Exception as error:  # noqa: BLE001  # a user's source
            self._error = error

    def _room(self, scheduler: Scheduler) -> int:
        """How many groups may be started now, by ``in_flight`` and by ``max_staleness``.

        A version takes one batch. What is in flight or ready is given to the trainer before a group that is started
        now, so with more than ``max_staleness + 1`` batches of them it would be too stale when its turn comes.
        """
        room, limit = self._max_in_flight - len(scheduler), self._parts.config.max_staleness
        if limit is None:
            return room
        if self.version != self._delivered_version:
            self._delivered, self._delivered_version = 0, self.version
        held = len(scheduler) + self.ready
        admitted = (limit + 1) * self._batch - (self._delivered + held)
        return min(room, max(admitted, self._wanted - held))  # what is given at once is not stale

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()  # those that were waiting have been woken

    async def _raise_error(self) -> None:
        """Raise the error that has ended the pool, if there is one, after everything has been returned."""
        has_failed = self._error is not None or (self._worker is not None and self._worker.done())
        if self._scheduler is not None and has_failed:
            await self._stop(now=True)
        if self._error is not None:
            self._tracker.return_all()
            raise self._error

    async def _stop(self, *, now: bool = False) -> None:
        """Abort what is in flight, and record it."""
        async with self._stop_lock:
            scheduler, worker = self._scheduler, self._worker
            if scheduler is None or worker is None:
                return
            self._scheduler = None
            was_running = worker.cancel()
            cancelled = await wait_all([worker])
            if not worker.cancelled():
                self._error = self._error or worker.exception()
            elif not was_running:
                self._error = StreamfoldError("the worker task of the pool was cancelled from outside")
            try:
                await scheduler.abort(now=now or cancelled is not None, keeps_rewards=self._tracker.keeps_rewards)
            finally:
                self._tracker.record_remaining(scheduler, are_wanted=True)
            if cancelled is not None:
                raise cancelled


def _not_open() -> StreamfoldError:
    return StreamfoldError("the pool is not open: use it inside `async with Pool(...) as pool:`")
