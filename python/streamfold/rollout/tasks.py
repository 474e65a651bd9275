"""Runs generate and reward functions in tasks that an abort can cancel; separates aborts from other cancels."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection

__all__ = ["AbortMode", "AbortableTasks", "Aborted", "CancelledByItself", "TimeLimit", "wait_all"]

T = TypeVar("T")

AbortMode: TypeAlias = Literal["request", "server", "reward"]
"""How an abort ends a task: ``"request"`` by cancelling it at once, ``"server"`` by aborting the engines, after which
it returns by itself, ``"reward"`` by waiting for it. Each of them is cancelled if it does not end in time."""


class Aborted(Exception):  # internal: the scheduler catches it
    """The task was cancelled by :meth:`AbortableTasks.abort`, or reached its time limit."""


class CancelledByItself(asyncio.CancelledError):
    """The work raised a ``CancelledError``, which is the cause, or something cancelled its task that is not known."""


@dataclass
class TimeLimit:
    """How long a task may run.

    Attributes:
        seconds: after these the task is cancelled. None: no limit.
        is_reached: whether it was.
    """

    seconds: float | None
    is_reached: bool = False


class AbortableTasks:
    """Runs awaitables, each in a task of its own that :meth:`abort` can cancel."""

    def __init__(self) -> None:
        self._modes: dict[asyncio.Task[Any], tuple[AbortMode, object]] = {}
        self._aborted: set[asyncio.Task[Any]] = set()

    def count(self, *modes: AbortMode) -> int:
        """On behalf of how many owners tasks of these modes are running."""
        return len({id(owner) for mode, owner in self._modes.values() if mode in modes})

    async def run(
        self, work: Awaitable[T], mode: AbortMode, *, owner: object = None, limit: TimeLimit | None = None
    ) -> T:
        """Await ``work`` in a task of its own, which has ended when this returns or raises.

        Args:
            work: what is awaited.
            mode: how an abort ends it.
            owner: on whose behalf; :meth:`abort` can be limited to one.
            limit: after which the task is cancelled. If it returns a value all the same, that is returned.

        Raises:
            Aborted: :meth:`abort` or the limit cancelled the task.
            CancelledByItself: the work raised a ``CancelledError``, and nothing here had cancelled the task.
            asyncio.CancelledError: the caller was cancelled.
        """
        task = asyncio.ensure_future(work)
        self._modes[task] = mode, owner
        timer = None
        if limit is not None and limit.seconds is not None:
            timer = task.get_loop().call_later(limit.seconds, self._end, task, limit)
        try:
            # Not `await task`: its CancelledError does not say which of the two was cancelled.
            cancelled = await wait_all([task])
        finally:
            if timer is not None:
                timer.cancel()
            del self._modes[task]
            was_aborted = task in self._aborted
            self._aborted.discard(task)
        if cancelled is not None:
            if not task.cancelled():
                task.exception()  # mark it as retrieved
            raise cancelled
        if task.cancelled() and was_aborted:
            raise Aborted
        try:
            return task.result()
        except asyncio.CancelledError as error:
            raise CancelledByItself from error

    def abort(self, *modes: AbortMode, owner: object = None) -> None:
        """Cancel all running tasks of these modes, including those that were cancelled before.

        Args:
            modes: of the tasks.
            owner: on whose behalf they run. None: anybody's.
        """
        for task, (mode, its_owner) in list(self._modes.items()):
            if mode in modes and (owner is None or its_owner is owner):
                self._cancel(task)

    def _end(self, task: asyncio.Task[Any], limit: TimeLimit) -> None:
        limit.is_reached = True
        self._cancel(task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self._aborted.add(task)
        task.cancel()


async def wait_all(tasks: Collection[asyncio.Future[Any]]) -> asyncio.CancelledError | None:
    """Wait until all tasks are done. A cancel of the caller is passed on to them, and returned instead of raised."""
    cancelled = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:  # noqa: PERF203  # one round, plus one for each cancel
            cancelled = error
            for task in pending:
                task.cancel()
    return cancelled
