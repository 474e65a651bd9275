"""Fully asynchronous rollouts: ``--rollout-function-path streamfold.slime.generate_rollout_async``, or of ``vime``.

Groups stay in flight while the trainer trains, in an event loop of their own; see
:class:`~streamfold.rollout.pool.Pool`. A rollout takes the finished ones, those first that ended first. When engines
abort their requests to take new weights, the samples go on from the tokens that they have, with ``--partial-rollout``;
otherwise they start again. The weights' version is the number of the rollout: ``streamfold_max_staleness`` counts
rollouts.

Otherwise as :mod:`streamfold.integrations.rollout`, whose settings hold here too. ``keep_when_insufficient`` of a
dynamic filter has no meaning: no batch comes out too small.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

from streamfold.integrations.rollout import HostRollout, evaluate, host_rollout, train_output, whole_number
from streamfold.rollout.pool import Pool
from streamfold.rollout.rollout import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from streamfold.integrations.base import Args, Host

__all__ = ["close_rollout", "generate_rollout_async"]

log = logging.getLogger("streamfold")

T = TypeVar("T")

_LONGEST_END: Final = 60.0  # seconds that the end may take, with what users' functions do in it


def generate_rollout_async(host: Host, args: Args, rollout_id: int, data_source: Any, *, evaluation: bool) -> Any:  # noqa: ANN401
    """Give the next ``rollout_batch_size`` finished groups, or evaluate beside those in flight.

    The first call starts a thread with an event loop; :func:`close_rollout` ends both, as the end of the process does.
    The data source is used in that thread: our ``DataSource`` takes care that it is saved
    there too.

    Args:
        host: the trainer. Each has a thread of its own.
        args: its settings, those of the first call. Read, never changed.
        rollout_id: which one it is.
        data_source: as of :func:`~streamfold.integrations.rollout.generate_rollout`. With another one than before,
        everything
            in flight goes back to that one first.
        evaluation: likewise.

    Returns:
        As :func:`~streamfold.integrations.rollout.generate_rollout`, the groups in the order in which they ended.

    Raises:
        StreamfoldError: too many groups have failed since the last call.
        Exception: what the data source, a filter, or an evaluation raised. In both cases everything that was taken has
            gone back to the data source, and the next call begins anew.
        ValueError: a setting makes no sense.
    """
    with _lock:
        background = _backgrounds.get(host.package)
        if background is None:
            background = _backgrounds[host.package] = _Background(host)
    if evaluation:  # there too, as what the host shares between samples belongs to one event loop
        return background.run(evaluate(host, args, rollout_id))
    return background.run(background.rollout(args, rollout_id, data_source))


def close_rollout(host: Host) -> None:
    """Abort what is in flight, give everything back to its data source, and end the thread. Safe to call twice."""
    with _lock:
        background = _backgrounds.pop(host.package, None)
    if background is not None:
        background.end()


class _Background:
    """A thread with an event loop, and the pool that lives there."""

    def __init__(self, host: Host) -> None:
        self.host: Final = host
        self._loop: asyncio.AbstractEventLoop
        self._process = os.getpid()
        self._is_up = threading.Event()
        self._pool: Pool | None = None
        self._rollout: HostRollout | None = None
        self._source: Any = None
        self._closes = contextlib.AsyncExitStack()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._live(),), name="streamfold rollouts", daemon=True
        )
        self._thread.start()
        self._is_up.wait()

    async def _live(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._is_up.set()
        await self._end.wait()

    # Called from other threads.

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something there, and wait for it here; if that is interrupted, it is cancelled."""
        if os.getpid() != self._process:
            work.close()
            raise RuntimeError("groups are in flight in the process that this one was forked from: ask for them there")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Call a function there, between the steps of everything else."""

        async def step() -> T:
            return function()

        return function() if threading.current_thread() is self._thread else self.run(step())

    def end(self) -> None:
        """End everything, within bounds."""
        try:
            self.run(asyncio.wait_for(self._close(), _LONGEST_END))
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_LONGEST_END)

    # Here.

    async def rollout(self, args: Args, rollout_id: int, data_source: Any) -> Any:  # noqa: ANN401
        """The next groups."""
        try:
            if self._pool is None or self._source is not data_source:
                await self._close()
                await self._open(args, rollout_id, data_source)
            pool, rollout = self._pool, self._rollout
            assert pool is not None  # noqa: S101  # for the reader and the type checker
            assert rollout is not None  # noqa: S101
            pool.version = rollout_id
            groups = await pool.next(args.rollout_batch_size)
        except Exception:
            await self._close()
            raise
        return train_output(rollout, data_source, rollout_id, groups, pool.metrics())

    async def _open(self, args: Args, version: int, data_source: Any) -> None:  # noqa: ANN401
        rollout = await host_rollout(self.host, args, data_source, pooled=True)
        in_flight = whole_number(args, "in_flight", None)
        if in_flight is None:
            engines = await parts_of(rollout).count_engines()
            in_flight = max(1, rollout.config.concurrency * engines // args.n_samples_per_prompt)
        if hasattr(data_source, "lives_in"):
            data_source.lives_in(self.call)
            self._closes.callback(data_source.lives_in, None)
        self._closes.callback(rollout.reset)
        pool = Pool(rollout, data_source, in_flight=in_flight, version=version)
        self._pool = await self._closes.enter_async_context(pool)
        self._rollout, self._source = rollout, data_source

    async def _close(self) -> None:
        self._pool = self._rollout = self._source = None
        await self._closes.aclose()


def _close_at_exit() -> None:
    for background in list(_backgrounds.values()):
        try:
            close_rollout(background.host)
        except Exception:  # noqa: PERF203  # there are two at most
            log.exception("the end of the process found groups in flight, and could not give them back")


def _begin_anew() -> None:
    _backgrounds.clear()
    _lock.release()


_backgrounds: Final[dict[str, _Background]] = {}  # of each host by its name, one for the process
_lock = threading.Lock()
atexit.register(_close_at_exit)
# A child has neither the thread nor what is in flight in it: it begins anew, and has nothing to end.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_anew)
