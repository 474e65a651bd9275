"""Rollouts without ends: groups stay in flight while the trainer trains, and finished ones wait for it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from streamfold.errors import StreamfoldError
from streamfold.rollout.metrics import EventLoopLag, RolloutStats
from streamfold.rollout.tasks import settled

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from streamfold.rollout.groups import Group, Source
    from streamfold.rollout.rollout import Rollout
    from streamfold.rollout.scheduler import GroupScheduler

__all__ = ["Pool"]

log = logging.getLogger("streamfold")


class Pool:
    """Keeps groups in flight across rollouts, up to a number; fully asynchronous training.

    ::

        async with Pool(Rollout(client, config, reward=reward), buffer) as pool:
            while training:
                groups = await pool.next(64)
                ...
                await pool.pause()      # requests are aborted, what they brought is kept
                ...                     # new weights into the engines
                pool.version += 1
                pool.resume()

    Every group that was taken from the source is at any time in flight, finished and waiting here, back in the source,
    or with the trainer. Finished ones are never dropped, but for those that the filter sorts out. Leaving the block
    gives everything back to the source.

    Args:
        rollout: how it is done: client, configuration, reward, filter and generator. ``groups`` of the configuration
            counts for nothing here; ``max_staleness`` counts weight versions; ``max_failures`` goes from one call of
            :meth:`next` to the following one.
        source: of groups. One that keeps account of its groups, as a :class:`~streamfold.rollout.buffer.Buffer`, is
        told of
            those that the trainer got.
        in_flight: how many groups are in flight. None: what the configuration asks the source for at a time. No new
            ones are begun while as many are finished and wait.

    Attributes:
        version: the version of the weights, a number that the trainer raises. Noted on samples as
            ``metadata["start_rollout_id"]``; a group that was begun more than ``max_staleness`` versions ago starts
            again from its prompt instead of being given to the trainer, or gone on with.

    Raises:
        ValueError: ``in_flight`` is below 1.
    """

    def __init__(self, rollout: Rollout, source: Source, *, in_flight: int | None = None, version: int = 0) -> None:
        self.version = version
        self._most = rollout.config.ask if in_flight is None else in_flight
        if self._most < 1:
            raise ValueError(f"in_flight must be at least 1, not {in_flight}")
        self._rollout = rollout
        self._stats = RolloutStats()
        self._tracker = rollout.tracker(source, self._stats, gives_back_all=True)
        self._scheduler: GroupScheduler | None = None  # None: paused
        self._keeper: asyncio.Task[None] | None = None
        self._error: BaseException | None = _not_open()
        self._wanted = 0  # groups that are being waited for
        self._retried = rollout.client.retried  # requests, when this was counted last

    async def __aenter__(self) -> Self:
        """Begin, in the running event loop."""
        self._rewards = self._rollout.rewards()
        self._engines = await self._rollout.engines()
        self._turn = asyncio.Lock()  # of those who end what is in flight
        self._news = asyncio.Event()  # for those who wait for groups
        self._work = asyncio.Event()  # for the keeper
        self._watch = EventLoopLag(None, lambda: (0, ""))
        self._watch.start()
        self._error = None
        self.resume()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what is in flight, and give everything back to the source."""
        try:
            await self._land(now=error is not None)
        finally:
            self._error = self._error or _not_open()
            self._watch.stop()
            self._tracker.return_all()
            if self._rewards is not None:
                self._rewards.report()
            self._tell()

    @property
    def in_flight(self) -> int:
        """Groups in flight."""
        return 0 if self._scheduler is None else len(self._scheduler)

    @property
    def ready(self) -> int:
        """Finished groups that wait here."""
        return len(self._tracker.ready)

    async def next(self, n: int) -> list[Group]:
        """Wait for ``n`` finished groups and give them, those first that ended first.

        While the pool is paused this waits for what is missing, until somebody resumes it.

        Returns:
            The groups; fewer only if the source has no more and nothing is in flight.

        Raises:
            StreamfoldError: too many groups have failed since the last call.
            Exception: what the source or the filter raised. In either case everything has gone back to the source,
                and the pool is over.
        """
        tracker = self._tracker
        self._wanted += n
        try:
            await self._wait_for(n)
        finally:
            self._wanted -= n
        tracker.settle_failed()
        groups = tracker.ready[:n]
        if self._rollout.sample_filter is not None:
            self._rollout.sample_filter(groups)
        del tracker.ready[:n]
        for group in groups:
            tracker.deliver(group, self.version)
        self._fill()
        return groups

    async def pause(self) -> None:
        """Abort what is in flight, within ``config.abort_seconds``; nothing is begun until :meth:`resume`.

        What was cut goes back to the source, and is gone on with. Rewards that are being computed are waited for.
        """
        try:
            await self._land()
        finally:
            self._tracker.settle()

    def resume(self) -> None:
        """Go on after :meth:`pause`. What was cut is served first, if the source does so."""
        if self._scheduler is None and self._error is None:
            self._scheduler = self._rollout.scheduler(self._stats, self._rewards, self._engines)
            self._keeper = asyncio.get_running_loop().create_task(self._keep(self._scheduler), name="streamfold pool")
            self._keeper.add_done_callback(lambda _keeper: self._tell())

    def metrics(self) -> dict[str, float]:
        """What has happened since the last time this was asked; names as of a rollout's."""
        retried = self._rollout.client.retried
        self._stats.retries, self._retried = retried - self._retried, retried
        told = self._stats.metrics(self._watch)
        self._stats.clear()
        self._watch.restart()
        return told

    async def _wait_for(self, n: int) -> None:
        """Wait until so many groups are ready, or no more will be."""
        while True:
            await self._check()
            self._tracker.weed(self.version)
            self._fill()
            if self.ready >= n:
                return
            if self._error is not None:
                continue
            if self._scheduler is None or len(self._scheduler):
                await self._news.wait()
            elif not self._tracker.settle_failed():
                log.warning("the source ran dry: %d of %d groups", self.ready, n)
                return

    async def _keep(self, scheduler: GroupScheduler) -> None:
        """File groups as they end, and begin others."""
        while self._error is None:
            self._fill()
            ended = await scheduler.ended()
            if ended is None:
                self._work.clear()
                self._tell()
                await self._work.wait()
                continue
            self._tracker.enter(ended)
            if ended.is_cancelled:
                raise StreamfoldError("somebody has cancelled a task of the pool")
            self._tell()

    def _fill(self) -> None:
        """Begin as many groups as there is room for. What the source raises is told by the next call."""
        scheduler, tracker = self._scheduler, self._tracker
        enough = max(self._most, self._wanted)
        try:
            while scheduler is not None and len(tracker.ready) < enough and (room := self._most - len(scheduler)) > 0:
                taken = tracker.take(room, self.version)
                for group in taken:
                    scheduler.start(group, self.version)
                if not taken:
                    break
                self._work.set()
        except Exception as error:  # noqa: BLE001  # anybody's source
            self._error = error

    def _tell(self) -> None:
        self._news.set()
        self._news.clear()  # those who wait have been woken

    async def _check(self) -> None:
        """Raise what has gone wrong, if anything has; the pool is over then."""
        if self._scheduler is not None and (
            self._error is not None or (self._keeper is not None and self._keeper.done())
        ):
            await self._land(now=True)
        if self._error is not None:
            self._tracker.return_all()
            raise self._error

    async def _land(self, *, now: bool = False) -> None:
        """End what is in flight, and file it."""
        async with self._turn:
            scheduler, keeper = self._scheduler, self._keeper
            if scheduler is None or keeper is None:
                return
            self._scheduler = None
            by_us = keeper.cancel()
            cancelled = await settled([keeper])
            if not keeper.cancelled():
                self._error = self._error or keeper.exception()
            elif not by_us:
                self._error = StreamfoldError("somebody has cancelled the pool's own task")
            try:
                await scheduler.abort(now=now or cancelled is not None)
            finally:
                self._tracker.enter_rest(scheduler, wanted=True)
            if cancelled is not None:
                raise cancelled


def _not_open() -> StreamfoldError:
    return StreamfoldError("a pool gives groups inside its block: async with Pool(...) as pool")
