"""Keeps groups in flight, one task each, and aborts all of them within ``RolloutConfig.abort_seconds``."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from streamfold.rollout.groups import samples_of, sort_key
from streamfold.rollout.runner import GroupOutcome, GroupRunner
from streamfold.rollout.tasks import wait_all

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from streamfold.rollout.callbacks import Generate
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.rewards import Rewards

__all__ = ["GroupScheduler"]

_logger = logging.getLogger("streamfold")

_ABORT_SECONDS: Final = 2.0  # of one abort of the engines: one that cannot be reached must not delay the next at others
_ABORT_INTERVAL: Final = 0.05  # seconds between two aborts of the engines, as requests may arrive in between
_GRACE_SECONDS: Final = 5.0  # for tasks to end that were cancelled because they exceeded abort_seconds


class GroupScheduler:
    """Runs groups, each in a task of its own, until it is aborted. It cannot be used again after that.

    Args:
        config: limits and rules.
        generate: called for each sample that is not finished.
        rewards: called for each finished sample, or group. None: there are no rewards.
        concurrency: how many samples may run at the same time.
        abort_engines: aborts all requests on the engines, within the given number of seconds.
        on_abort: called when an abort begins, before any task is cancelled.
        stats: counts.
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
    ) -> None:
        self._config = config
        self._abort_engines = abort_engines
        self._on_abort = on_abort
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._runner = GroupRunner(config, generate, rewards=rewards, concurrency=concurrency, stats=stats)
        self._running: dict[asyncio.Task[None], GroupOutcome] = {}
        self._outcomes: deque[GroupOutcome] = deque()
        self._has_outcome = asyncio.Event()

    def __len__(self) -> int:
        """Groups in flight: those that run, and those whose outcome has not been taken yet."""
        return len(self._running) + len(self._outcomes)

    def start(self, group: Group, version: int) -> None:
        """Start a group, in the rollout or weight version ``version``.

        Raises:
            RuntimeError: the scheduler has been aborted.
        """
        if self._runner.aborted:
            raise RuntimeError("the scheduler has been aborted: start groups in a new one")
        outcome = GroupOutcome(group, version)
        task = self._loop.create_task(self._runner.run(outcome), name=f"streamfold group {sort_key(group)[0]}")
        self._running[task] = outcome
        task.add_done_callback(self._on_done)

    async def next_outcome(self) -> GroupOutcome | None:
        """Wait for the next group to end; None if none is in flight."""
        while not self._outcomes and self._running:
            self._has_outcome.clear()
            await self._has_outcome.wait()
        return self.pop_outcome()

    def pop_outcome(self) -> GroupOutcome | None:
        """The outcome of a group that has ended and was not returned yet, if there is one."""
        return self._outcomes.popleft() if self._outcomes else None

    async def abort(self, *, now: bool = False) -> None:
        """End everything that runs within ``config.abort_seconds``, and cancel what is left after that.

        Nothing is started any more. Generate functions with ``abort_mode = "request"`` are cancelled at once; for the
        others the engines are aborted repeatedly until they have returned. Rewards are waited for, unless ``now``.

        Raises:
            asyncio.CancelledError: the caller was cancelled. All tasks were cancelled then, and have ended.
        """
        started_at = self._loop.time()
        self._begin_abort(now=now)
        engine_aborts = None
        if self._runner.tasks.has("server"):
            engine_aborts = self._loop.create_task(self._keep_aborting_engines(started_at + self._config.abort_seconds))
        cancelled = await self._wait_until_ended()
        if engine_aborts is not None:
            engine_aborts.cancel()
            cancelled = await wait_all([engine_aborts]) or cancelled
        self._stats.abort_seconds += self._loop.time() - started_at
        if cancelled is not None:
            raise cancelled

    def abandon_running(self) -> list[tuple[Group, Group]]:
        """After an abort: the groups whose tasks ignore being cancelled, each with a copy that can be used instead."""
        stuck = [outcome.group for outcome in self._running.values()]
        for group in stuck:
            _logger.error("group %d ignores being cancelled: its task is left running", sort_key(group)[0])
        self._running.clear()
        return [(group, copy.deepcopy(group)) for group in stuck]

    def _begin_abort(self, *, now: bool) -> None:
        if not self._runner.aborted:
            self._runner.stop_starting()
            try:
                self._on_abort()
            except Exception:
                _logger.exception("on_abort raised an error; the abort continues")
        if now:
            self._runner.abort_rewards()
        self._runner.tasks.abort("request")

    async def _wait_until_ended(self) -> asyncio.CancelledError | None:
        cancelled = await self._wait(self._config.abort_seconds)
        if self._running:
            _logger.warning(
                "%d groups did not end within %g s and are cancelled", len(self._running), self._config.abort_seconds
            )
            for task in self._running:
                task.cancel()
            cancelled = await self._wait(_GRACE_SECONDS) or cancelled
        return cancelled

    async def _wait(self, seconds: float) -> asyncio.CancelledError | None:
        """Wait until no group runs, at most ``seconds``. A cancel of the caller cancels all tasks, and is returned."""
        cancelled = None
        until = self._loop.time() + seconds
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
        while self._runner.tasks.has("server") and (left := until - self._loop.time()) > 0:
            try:
                await self._abort_engines(min(left, _ABORT_SECONDS))
            except Exception:
                _logger.exception("the engines could not be aborted; waiting for their requests to end")
            await asyncio.sleep(_ABORT_INTERVAL)

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
