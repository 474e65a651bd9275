"""Fully asynchronous rollouts: ``--rollout-function-path streamfold.slime.generate_rollout_async``.

For vime it is ``streamfold.vime.generate_rollout_async``.

Groups stay in flight while the trainer trains, in an event loop in a thread of their own; see
:class:`~streamfold.Pool`. A rollout returns the groups that finished first. When engines abort their requests to load
new weights, samples carry on from the tokens that they have, as in the trainers' own workers, also without
``--partial-rollout``. The older tokens are masked with ``--partial-rollout --mask-offpolicy-in-partial-rollout``. The
weight version is the number of the rollout: ``streamfold_max_staleness`` counts rollouts.

Otherwise as :mod:`streamfold.integrations.rollout`, settings included. ``keep_when_insufficient`` of a dynamic filter
has no effect: a pool has no batch that could be too small.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from streamfold.integrations.data_source import durable_buffer
from streamfold.integrations.rollout import create_rollout, evaluate
from streamfold.integrations.settings import Settings
from streamfold.rollout.pool import Pool
from streamfold.rollout.rollout import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from streamfold.integrations.base import Integration
    from streamfold.integrations.rollout import TrainerRollout
    from streamfold.integrations.settings import Args

__all__ = ["close_rollout", "generate_rollout_async"]

_logger = logging.getLogger("streamfold")

T = TypeVar("T")

_CLOSE_SECONDS: Final = 60.0  # for closing the pool, including the users' functions that it waits for


def generate_rollout_async(
    integration: Integration,
    args: Args,
    rollout_id: int,
    data_source: Any,  # noqa: ANN401
    *,
    evaluation: bool,
) -> Any:  # noqa: ANN401
    """Return the next ``rollout_batch_size`` finished groups, or evaluate beside those in flight.

    The first call starts a thread with an event loop. :func:`close_rollout` ends both, and so does the end of the
    process. The data source is called in that thread; our ``DataSource`` is saved there too.

    Args:
        integration: the trainer. Each has a thread of its own.
        args: its options, those of the first call. Read, never changed.
        rollout_id: the number of the rollout.
        data_source: as for :func:`~streamfold.integrations.rollout.generate_rollout`. If it is not that of the last
            call, everything in flight is returned to the last call's first.
        evaluation: as for :func:`~streamfold.integrations.rollout.generate_rollout`.

    Returns:
        As :func:`~streamfold.integrations.rollout.generate_rollout`, the groups in the order in which they finished.

    Raises:
        StreamfoldError: too many groups failed since the last call. All groups have been returned to the data source,
            and the next call starts a new pool.
        Exception: what the data source, a filter, or an evaluation raised; the same applies.
        ValueError: a setting is invalid, or ``rollout_data_transport`` is ``"straw"``.
    """
    integration.refuse_leases(args, "generate_rollout_async")
    with _lock:
        background = _backgrounds.get(integration.package)
        if background is None:
            _register_hooks()
            background = _backgrounds[integration.package] = _Background(integration)
    if evaluation:  # in the same event loop, to which the trainer's shared objects belong
        return background.run(evaluate(integration, args, rollout_id))
    return background.run(background.rollout(args, rollout_id, data_source))


def close_rollout(integration: Integration) -> None:
    """Abort what is in flight, return all groups to their data source, and end the thread. Idempotent."""
    with _lock:
        background = _backgrounds.pop(integration.package, None)
    if background is not None:
        background.end()


@dataclass(frozen=True)
class _OpenPool:
    """A pool that is open, and what it was made of."""

    pool: Pool
    trainer_rollout: TrainerRollout
    data_source: Any


class _Background:
    """A thread with an event loop, and the pool that runs in it."""

    def __init__(self, integration: Integration) -> None:
        self.integration: Final = integration
        self._loop: asyncio.AbstractEventLoop
        self._process = os.getpid()
        self._is_up = threading.Event()
        self._current: _OpenPool | None = None
        self._closing = contextlib.AsyncExitStack()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._run_until_end(),), name="streamfold rollouts", daemon=True
        )
        self._thread.start()
        self._is_up.wait()

    async def _run_until_end(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._is_up.set()
        await self._end.wait()

    # Called from other threads.

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for it here; if the wait is interrupted, it is cancelled."""
        if os.getpid() != self._process:
            work.close()
            raise RuntimeError("groups are in flight in the process that this one was forked from: request them there")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the thread, between two steps of its event loop."""

        async def step() -> T:
            return function()

        return function() if threading.current_thread() is self._thread else self.run(step())

    def end(self) -> None:
        """Close the pool and end the thread, within ``_CLOSE_SECONDS`` each."""
        try:
            self.run(asyncio.wait_for(self._close_pool(), _CLOSE_SECONDS))
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_CLOSE_SECONDS)

    # Called in the thread.

    async def rollout(self, args: Args, rollout_id: int, data_source: Any) -> Any:  # noqa: ANN401
        """Return the next groups."""
        try:
            current = self._current
            if current is None or current.data_source is not data_source:
                await self._close_pool()
                current = await self._open_pool(args, rollout_id, data_source)
            current.pool.version = rollout_id
            with current.trainer_rollout.progress.shown(current.pool.ready):
                groups = await current.pool.next(args.rollout_batch_size)
        except Exception:
            await self._close_pool()
            raise
        return current.trainer_rollout.output(rollout_id, groups, current.pool.metrics())

    async def _open_pool(self, args: Args, version: int, data_source: Any) -> _OpenPool:  # noqa: ANN401
        settings = Settings.of(args)
        trainer_rollout = await create_rollout(self.integration, args, settings, data_source, pooled=True)
        rollout, in_flight = trainer_rollout.rollout, settings.in_flight
        if in_flight is None:
            engines = await parts_of(rollout).count_engines()
            in_flight = max(1, rollout.config.concurrency * engines // args.n_samples_per_prompt)
        if (durable := durable_buffer(data_source)) is not None:
            durable.run_in(self.call)
            self._closing.callback(durable.run_in, None)
        self._closing.callback(trainer_rollout.reset)
        pool = Pool(rollout, data_source, in_flight=in_flight, version=version)
        await self._closing.enter_async_context(pool)
        self._current = _OpenPool(pool, trainer_rollout, data_source)
        return self._current

    async def _close_pool(self) -> None:
        self._current = None
        await self._closing.aclose()


def _close_at_exit() -> None:
    for background in list(_backgrounds.values()):
        try:
            close_rollout(background.integration)
        except Exception:  # noqa: PERF203  # two at most
            _logger.exception("at the end of the process groups were in flight, and could not be returned")


def _forget_in_child() -> None:
    _backgrounds.clear()
    _lock.release()


@functools.cache
def _register_hooks() -> None:
    """Register what a process with groups in flight has to do at its end and at a fork; once, when there are any.

    Call it with the lock held. A forked child has neither the thread nor its groups: it starts a new one, and must not
    close the parent's.
    """
    atexit.register(_close_at_exit)
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget_in_child)


_backgrounds: Final[dict[str, _Background]] = {}  # by the trainer's name, one for each in a process
_lock = threading.Lock()
