"""Work in tasks of its own, so that an abort can cut it and nothing else, and everybody knows who cancelled whom."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection

__all__ = ["Cut", "Cuttable", "Mode", "settled"]

T = TypeVar("T")

Mode: TypeAlias = Literal["request", "server", "reward"]
"""How work is ended early: generators by request, by an abort of the servers they ask; rewards only if need be."""


class Cut(Exception):  # not an error: it never leaves the loop
    """The work has been ended by an abort."""


class Cuttable:
    """Work that runs, each in a task of its own, by its mode."""

    def __init__(self) -> None:
        self._modes: dict[asyncio.Task[Any], Mode] = {}
        self._cut: set[asyncio.Task[Any]] = set()

    def has(self, mode: Mode) -> bool:
        """Whether any such work runs."""
        return mode in self._modes.values()

    async def run(self, work: Awaitable[T], mode: Mode) -> T:
        """Await ``work`` in a task of its own.

        Raises:
            Cut: an abort has cancelled it.
            asyncio.CancelledError: somebody else has, or this was cancelled; in either case it has ended.
        """
        task = asyncio.ensure_future(work)
        self._modes[task] = mode
        try:
            # Not by awaiting it: that could not tell who has been cancelled, it or this.
            cancelled = await settled([task])
        finally:
            del self._modes[task]
            was_cut = task in self._cut
            self._cut.discard(task)
        if cancelled is not None:
            if not task.cancelled():
                task.exception()  # seen
            raise cancelled
        if task.cancelled() and was_cut:
            raise Cut
        return task.result()

    def cut(self, *modes: Mode) -> None:
        """Cancel all work of these modes; again, if it has been cancelled before."""
        for task in [task for task, mode in self._modes.items() if mode in modes]:
            self._cut.add(task)
            task.cancel()


async def settled(tasks: Collection[asyncio.Future[Any]]) -> asyncio.CancelledError | None:
    """Wait until all are done. A cancel is passed on to them, and given back."""
    cancelled = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:  # noqa: PERF203  # one round, and one for each cancel
            cancelled = error
            for task in pending:
                task.cancel()
    return cancelled
