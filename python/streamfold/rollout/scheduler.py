"""Keeps groups in flight, one task each, and aborts all of them in bounded time."""

from __future__ import annotations

import asyncio
import copy
import logging
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from streamfold.rollout.groups import samples_of, sort_key
from streamfold.rollout.outcome import GroupOutcome
from streamfold.rollout.runner import GroupRunner
from streamfold.rollout.spans import NO_SPANS
from streamfold.rollout.tasks import wait_all
from streamfold.rollout.user_code import UserCode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from streamfold.client.observer import Observer
    from streamfold.rollout.callbacks import Generate
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.rewards import Rewards
    from streamfold.rollout.spans import Spans
    from streamfold.rollout.tasks import AbortMode
    from streamfold.samples.sample import Sample

__all__ = ["GroupScheduler", "Scheduler"]

_logger = logging.getLogger("streamfold")

_ABORT_SECONDS: Final = 2.0  # of one abort of the engines: one that cannot be reached must not delay the next at others
_ABORT_INTERVAL: Final = 0.05  # seconds between two aborts of the engines, as requests may arrive in between
_GRACE_SECONDS: Final = 5.0  # for tasks to end that were cancelled because they exceeded abort_seconds


class Scheduler(ABC):
    """Keeps groups in flight, one task each, until it is aborted. It cannot be used again after that."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: dict[asyncio.Task[None], GroupOutcome] = {}
        self._outcomes: deque[GroupOutcome] = deque()
        self._has_outcome = asyncio.Event()

    def __len__(self) -> int:
        """Groups in flight: those that run, and those whose outcome has not been taken yet."""
        return len(self._running) + len(self._outcomes)

    @property
    @abstractmethod
    def aborted(self) -> bool:
        """Whether an abort has begun."""

    @property
    def oldest(self) -> GroupOutcome | None:
        """Of the groups that run, the one that was started first."""
        return next(iter(self._running.values()), None)

    def start(self, group: Group, version: int) -> None:
        """Start a group, in the rollout or weight version ``version``.

        Raises:
            RuntimeError: the scheduler has been aborted.
        """
        if self.aborted:
            raise RuntimeError("the scheduler has been aborted: start groups in a new one")
        outcome = GroupOutcome(group, version, started_at=self._loop.time())
        task = self._loop.create_task(self._run(outcome), name=f"streamfold group {outcome.index}")
        self._running[task] = outcome
        task.add_done_callback(self._on_done)

    async def next_outcome(self) -> GroupOutcome | None:
        """Wait for the next group to end; None if none is in flight.

        Raises:
            StreamfoldError: no group can run here any more. Those that were in flight stay outcomes.
        """
        while not self._outcomes and self._running:
            self._has_outcome.clear()
            await self._has_outcome.wait()
        self._check()
        return self.pop_outcome()

    def pop_outcome(self) -> GroupOutcome | None:
        """The outcome of a group that has ended and was not returned yet, if there is one."""
        return self._outcomes.popleft() if self._outcomes else None

    @abstractmethod
    async def abort(self, *, now: bool = False, keeps_rewards: Callable[[Group], bool] = lambda _group: True) -> None:
        """End everything that runs.

        Args:
            now: cancel rewards at once.
            keeps_rewards: whether rewards of a group are of use. If not, they are cancelled at once.

        Raises:
            asyncio.CancelledError: the caller was cancelled. All tasks were cancelled then, and have ended.
        """

    def abandon_running(self) -> list[tuple[Group, Group]]:
        """After an abort: the groups whose tasks ignore being cancelled, each with a copy that can be used instead."""
        stuck = [outcome.group for outcome in self._running.values()]
        for group in stuck:
            _logger.error("group %d ignores being cancelled: its task is left running", sort_key(group)[0])
        self._running.clear()
        return [(group, copy.deepcopy(group)) for group in stuck]

    def snapshot(self, sample: Sample) -> Sample:
        """A copy of a sample that runs here, as an abort at this moment would leave it; itself if it does not run."""
        return sample

    def _check(self) -> None:  # noqa: B027  # most can always run groups
        """Raise StreamfoldError if no group can run here any more."""

    @abstractmethod
    async def _run(self, outcome: GroupOutcome) -> None:
        """Generate and judge the group of ``outcome``."""

    def _on_done(self, task: asyncio.Task[None]) -> None:
        outcome = self._running.pop(task, None)
        if outcome is None:  # abandoned
            return
        if task.cancelled():
            outcome.is_cancelled = True
        elif (error := task.exception()) is not None:
            outcome.failures.append((samples_of(outcome.group)[0], error))
        self._outcomes.append(outcome)
        self._has_outcome.set()


class GroupScheduler(Scheduler):
    """Runs groups in this process.

    Args:
        config: limits and rules.
        generate: called for each sample that is not finished.
        rewards: called for each finished sample, or group. None: there are no rewards.
        concurrency: how many samples may run at the same time.
        abort_engines: aborts all requests on the engines, within the given number of seconds.
        on_abort: called when an abort begins, before any task is cancelled.
        stats: counts.
        version: the rollout or weight version of now; None: that in which a group was started.
        spans: of a trainer's trace.
        observers: are told of all calls and rewards.
    """

    def __init__(
        self,
        config: RolloutConfig,
        generate: Generate,
        *,
        rewards: Rewards | None,
        concurrency: int,
        abort_engines: Callable[[float], Coroutine[Any, Any, object]],
        on_abort: Callable[[], object],
        stats: RolloutStats,
        version: Callable[[], int] | None = None,
        spans: Spans = NO_SPANS,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__()
        self._config = config
        self._abort_engines = abort_engines
        self._on_abort = on_abort
        self._stats = stats
        self._runner = GroupRunner(
            config,
            generate,
            rewards=rewards,
            concurrency=concurrency,
            stats=stats,
            version=version,
            spans=spans,
            observers=observers,
        )

    @property
    def aborted(self) -> bool:
        """Whether an abort has begun."""
        return self._runner.aborted

    async def abort(self, *, now: bool = False, keeps_rewards: Callable[[Group], bool] = lambda _group: True) -> None:
        """End everything that runs, and cancel what is left after its time.

        Nothing is started any more. Generate functions with ``abort_mode = "request"`` are cancelled at once; for the
        others the engines are aborted repeatedly until they have returned. ``config.abort_seconds`` after this began
        they are all cancelled. Rewards are waited for until ``config.reward_seconds`` after this began.

        Args:
            now: cancel rewards at once.
            keeps_rewards: whether rewards of a group are of use. If not, they are cancelled at once.

        Raises:
            asyncio.CancelledError: the caller was cancelled. All tasks were cancelled then, and have ended.
        """
        started_at = self._loop.time()
        self._begin_abort(now=now, keeps_rewards=keeps_rewards)
        engine_aborts = None
        if self._runner.tasks.count("server"):
            engine_aborts = self._loop.create_task(self._keep_aborting_engines(started_at + self._config.abort_seconds))
        cancelled = await self._wait_until_ended(started_at)
        if engine_aborts is not None:
            engine_aborts.cancel()
            cancelled = await wait_all([engine_aborts]) or cancelled
        self._stats.abort_seconds += self._loop.time() - started_at
        if cancelled is not None:
            raise cancelled

    def snapshot(self, sample: Sample) -> Sample:
        """A copy of a sample that runs, as an abort at this moment would leave it; itself if it does not run."""
        return self._runner.snapshot(sample)

    async def _run(self, outcome: GroupOutcome) -> None:
        await self._runner.run(outcome)

    def _begin_abort(self, *, now: bool, keeps_rewards: Callable[[Group], bool]) -> None:
        if not self._runner.aborted:
            self._runner.stop_starting(keeps_rewards)
            try:
                with UserCode("on_abort"):
                    self._on_abort()
            except Exception:
                _logger.exception("on_abort raised an error; the abort continues")
        if now:
            self._runner.abort_rewards()
        for outcome in self._running.values():
            if not keeps_rewards(outcome.group):
                self._runner.tasks.abort("reward", owner=outcome)
        self._runner.tasks.abort("request")

    async def _wait_until_ended(self, started_at: float) -> asyncio.CancelledError | None:
        """Wait until no group runs. Generate functions and rewards have a limit each, in either order."""
        cancelled = None
        generating, judging = self._config.abort_seconds, self._config.reward_seconds
        generate_modes: tuple[AbortMode, ...] = ("request", "server")
        reward_modes: tuple[AbortMode, ...] = ("reward",)
        for seconds, modes in sorted([(generating, generate_modes), (judging, reward_modes)]):
            # What is waited for with the first limit may still start a reward; behind it there is only its own kind.
            if seconds == min(generating, judging) or self._runner.tasks.count(*modes):
                cancelled = await self._wait(started_at + seconds) or cancelled
            if self._cancel(modes, seconds):
                cancelled = await self._wait(self._loop.time() + _GRACE_SECONDS) or cancelled
        return cancelled

    def _cancel(self, modes: tuple[AbortMode, ...], seconds: float) -> bool:
        """Cancel what runs in these modes, after ``seconds``; whether there was anything."""
        count = self._runner.tasks.count(*modes)
        if "reward" in modes:
            self._runner.abort_rewards()
            if count:
                _logger.info("%d groups had no rewards within %g s; they are computed later", count, seconds)
        elif count:
            self._runner.tasks.abort(*modes)
            _logger.warning("%d groups did not end within %g s and are cancelled", count, seconds)
        return count > 0

    async def _wait(self, until: float) -> asyncio.CancelledError | None:
        """Wait until no group runs, at most ``until``. A cancel of the caller cancels all tasks, and is returned."""
        cancelled = None
        while self._running and (left := until - self._loop.time()) > 0:
            try:
                await asyncio.wait(self._running, timeout=left)
            except asyncio.CancelledError as error:  # noqa: PERF203  # one round, plus one for each cancel
                cancelled = error
                self._runner.abort_rewards()
                self._runner.tasks.abort("request", "server")
        return cancelled

    async def _keep_aborting_engines(self, until: float) -> None:
        """Abort the engines repeatedly, while a generate function runs that ends only by that."""
        while self._runner.tasks.count("server") and (left := until - self._loop.time()) > 0:
            try:
                await self._abort_engines(min(left, _ABORT_SECONDS))
            except Exception:
                _logger.exception("the engines could not be aborted; waiting for their requests to end")
            await asyncio.sleep(_ABORT_INTERVAL)
