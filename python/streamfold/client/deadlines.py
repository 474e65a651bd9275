"""Deadlines: all deadlines of a client in one heap, behind one timer of the event loop."""

from __future__ import annotations

import asyncio
import math
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Deadline", "Deadlines"]

_EXPIRY_GRACE: Final = 0.02  # seconds between a deadline and its expiry: a busy event loop is not a silent engine
_MIN_DROPPED: Final = 64  # entries, below which the heap is not cleaned up


# An entry of the heap: when it is due, a number that orders those that are due at once, and the Deadline, or None once
# that has no use for it. A list: to compare instances of a class would call Python code.
_Entry = list[Any]
_WHEN: Final = 0
_DEADLINE: Final = 2


class Deadlines:
    """The heap and its timer. Bound to the running event loop.

    Attributes:
        now: gives the time of the event loop.
    """

    def __init__(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.now: Callable[[], float] = loop.time
        self._heap: list[_Entry] = []
        self._numbers = count()
        self._dropped = 0
        self._timer: asyncio.Handle | None = None
        self._fires_at = math.inf

    def add(self, deadline: Deadline, when: float) -> _Entry:
        """Add an entry."""
        entry = [when, next(self._numbers), deadline]
        heappush(self._heap, entry)
        if when < self._fires_at:
            self._start(when)
        return entry

    def drop(self, entry: _Entry) -> None:
        """Give up an entry. It is removed when many are."""
        entry[_DEADLINE] = None
        self._dropped += 1
        if self._dropped > _MIN_DROPPED and self._dropped > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[_DEADLINE] is not None]
            heapify(self._heap)
            self._dropped = 0
            if not self._heap:
                self.close()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._fires_at = None, math.inf

    def _start(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = when  # not timer.when(): uvloop's timers lack it if they are due at once
        self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer, self._fires_at = None, math.inf
        now = self._loop.time()
        try:
            while self._heap and self._heap[0][_WHEN] <= now:
                deadline = heappop(self._heap)[_DEADLINE]
                if deadline is None:
                    self._dropped -= 1
                else:
                    deadline.fire(now)
        finally:
            if self._heap and self._heap[0][_WHEN] < self._fires_at:
                self._start(self._heap[0][_WHEN])


class Deadline:
    """A deadline that may be moved often: only an earlier one adds an entry to the heap.

    :meth:`close` it in the end: the two callables are usually methods of who owns it, and references in a circle are
    freed only by the garbage collector.

    Args:
        deadlines: the heap.
        expired: called once the deadline and a short grace have passed.
        look: called when the deadline has passed, before the grace: what has arrived by now may move the deadline.
    """

    __slots__ = ("_deadlines", "_entry", "_expired", "_in_grace", "_look", "_when")

    def __init__(
        self, deadlines: Deadlines, expired: Callable[[], object], look: Callable[[], object] | None = None
    ) -> None:
        self._deadlines = deadlines
        self._expired = expired
        self._look = look
        self._when = math.inf
        self._entry: _Entry | None = None
        self._in_grace = False

    def set(self, seconds: float | None) -> None:
        """Expire ``seconds`` from now; None: never."""
        self._in_grace = False
        if seconds is None or seconds == math.inf:
            self._when = math.inf
            self._leave()
            return
        self._when = when = self._deadlines.now() + seconds
        entry = self._entry
        if entry is None:
            self._entry = self._deadlines.add(self, when)
        elif when < entry[_WHEN]:
            self._deadlines.drop(entry)
            self._entry = self._deadlines.add(self, when)

    def close(self) -> None:
        """Never expire, whatever is set."""
        self.set(None)
        self._expired, self._look = _do_nothing, None

    def _leave(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._deadlines.drop(entry)

    def fire(self, now: float) -> None:
        """Called by the heap when the entry is due."""
        self._entry = None
        if now < self._when:
            if self._when < math.inf:
                self._entry = self._deadlines.add(self, self._when)
        elif self._in_grace:
            self._expired()
        else:
            self._in_grace = True
            if self._look is not None:
                self._look()
            if self._in_grace and self._entry is None:  # it was not moved
                self._when = now
                self._entry = self._deadlines.add(self, now + _EXPIRY_GRACE)


def _do_nothing() -> None:
    pass
