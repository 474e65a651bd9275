"""Runs generate and reward functions in tasks that an abort can cancel; separates aborts from other cancels."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection

__all__ = ["AbortMode", "AbortableTasks", "Aborted", "wait_all"]

T = TypeVar("T")

AbortMode: TypeAlias = Literal["request", "server", "reward"]
"""How an abort ends a task: ``"request"`` by cancelling it at once, ``"server"`` by aborting the engines, after which
it returns by itself, ``"reward"`` by waiting for it. Each of them is cancelled if it does not end in time."""


class Aborted(Exception):  # internal: the scheduler catches it
    """The task was cancelled by :meth:`AbortableTasks.abort`."""


class AbortableTasks:
    """Runs awaitables, each in a task of its own that :meth:`abort` can cancel."""

    def __init__(self) -> None:
        self._modes: dict[asyncio.Task[Any], AbortMode] = {}
        self._aborted: set[asyncio.Task[Any]] = set()

    def has(self, mode: AbortMode) -> bool:
        """Whether a task of this mode is running."""
        return mode in self._modes.values()

    async def run(self, work: Awaitable[T], mode: AbortMode) -> T:
        """Await ``work`` in a task of its own, which has ended when this returns or raises.

        Raises:
            Aborted: :meth:`abort` cancelled the task.
            asyncio.CancelledError: the caller was cancelled, or something else cancelled the task.
        """
        task = asyncio.ensure_future(work)
        self._modes[task] = mode
        try:
            # Not `await task`: its CancelledError does not say which of the two was cancelled.
            cancelled = await wait_all([task])
        finally:
            del self._modes[task]
            was_aborted = task in self._aborted
            self._aborted.discard(task)
        if cancelled is not None:
            if not task.cancelled():
                task.exception()  # mark it as retrieved
            raise cancelled
        if task.cancelled() and was_aborted:
            raise Aborted
        return task.result()

    def abort(self, *modes: AbortMode) -> None:
        """Cancel all running tasks of these modes, including those that were cancelled before."""
        for task in [task for task, mode in self._modes.items() if mode in modes]:
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
