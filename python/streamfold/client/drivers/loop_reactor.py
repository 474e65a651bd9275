"""LoopReactor: the reactor of an event loop, with all sockets that are read below it."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import weakref
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any

if sys.platform == "linux":
    from streamfold._core import Reactor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from streamfold.client.drivers.sockets import OnEvent

__all__ = ["LONGEST_REST", "SHORTEST_REST", "LoopReactor"]

SHORTEST_REST = 0.005
LONGEST_REST = 0.05
_DISPATCH_SECONDS = 0.003  # in one go: when thousands of streams begin or end, the event loop gets its turn


class LoopReactor:
    """Sweeps a reactor when the loop finds its polls readable, and passes its events on.

    The loop watches both polls all the time. Between two sweeps of the ordinary one the reactor itself rests.

    Get one with :meth:`acquire`, and give it back with :meth:`release`.

    Args:
        loop: the event loop.
        rests: the shortest and the longest rest, in seconds.

    Attributes:
        core: the reactor itself.
        users: how many have acquired it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, rests: tuple[float, float]) -> None:
        if sys.platform != "linux":
            raise NotImplementedError("there is no reactor for this system")
        self.loop: asyncio.AbstractEventLoop = loop
        self.rests: tuple[float, float] = rests
        self.core: Reactor = Reactor(rest_floor=rests[0], rest_ceiling=rests[1])
        self.users: int = 0
        self._process = os.getpid()
        self._handlers: dict[int, OnEvent] = {}
        self._events: deque[tuple[int, str, Any]] = deque()
        self._is_dispatching = False
        self._continuing: asyncio.Handle | None = None
        self._is_closed = False
        self._urgent_fd = self.core.urgent_fileno()
        self._fd = self.core.fileno()
        try:
            loop.add_reader(self._urgent_fd, self._sweep_urgent)
            loop.add_reader(self._fd, self._sweep)
        except BaseException:
            with contextlib.suppress(NotImplementedError):
                loop.remove_reader(self._urgent_fd)
            self.core.close()
            raise

    @classmethod
    def acquire(cls, loop: asyncio.AbstractEventLoop, *, rests: tuple[float, float]) -> LoopReactor:
        """The reactor that all users of ``loop`` with these rests share.

        Raises:
            NotImplementedError: the system has no reactor, or the loop cannot watch descriptors.
            OSError: there are no descriptors left.
        """
        with _LOCK:
            for reactor in list(_REACTORS):
                if reactor.loop.is_closed():
                    reactor.close()
            shared = (reactor for reactor in _REACTORS if reactor.loop is loop and reactor.rests == rests)
            reactor = next(shared, None) or cls(loop, rests)
            reactor.users += 1
            _REACTORS.add(reactor)
            return reactor

    def release(self) -> None:
        """A user has no more use for it; the last one closes it. All of its connections have to be ended before."""
        with _LOCK:
            self.users -= 1
            if self.users <= 0 or self.loop.is_closed():
                self.close()

    def close(self) -> None:
        """Close all sockets and the polls. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        # In a forked child, to tell the loop would tell the parent's. A closed loop watches nothing.
        if self._process == os.getpid() and not self.loop.is_closed():
            # Before the descriptors are closed: the loop would keep their numbers, and miss their next owners.
            self.loop.remove_reader(self._urgent_fd)
            self.loop.remove_reader(self._fd)
        self._handlers.clear()
        self._events.clear()
        self.core.close()
        _REACTORS.discard(self)

    # Connections.

    def listen(self, connection: int, on_event: OnEvent) -> None:
        """Pass the events of a connection on, up to ``"opened"``, ``"secured"`` or ``"ended"``."""
        self._handlers[connection] = on_event

    def end(self, connection: int) -> None:
        """Close a connection. No event of it is passed on any more, not even one that has been read."""
        self._handlers.pop(connection, None)
        self.core.end(connection)

    def dispatch(self, events: Iterable[tuple[int, str, Any]]) -> None:
        """Pass on what waits and then these; those that come of a handler's own calls after it has returned."""
        self._events.extend(events)
        if not self._is_dispatching:
            self._dispatch(until=math.inf)

    def _dispatch(self, until: float) -> None:
        """Pass events on, in their order, up to a time; the event loop calls for the others."""
        self._is_dispatching = True
        waiting, handlers = self._events, self._handlers
        try:
            while waiting:
                connection, kind, payload = waiting.popleft()
                is_last = kind in ("ended", "opened", "secured")
                handler = handlers.pop(connection, None) if is_last else handlers.get(connection)
                if handler is not None:
                    try:
                        handler(kind, payload)
                    except Exception as error:  # noqa: BLE001  # of others it is no fault
                        self.loop.call_exception_handler(
                            {"message": f"the handler of {kind!r} failed", "exception": error}
                        )
                    if monotonic() >= until:
                        break
        finally:
            self._is_dispatching = False
            if waiting and self._continuing is None and not self.loop.is_closed():  # or an interrupt left them
                self._continuing = self.loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._continuing = None
        self._dispatch(until=monotonic() + _DISPATCH_SECONDS)

    # What the loop calls.

    def _sweep_urgent(self) -> None:
        self._pass_on(self.core.sweep_urgent())

    def _sweep(self) -> None:
        self._pass_on(self.core.sweep())

    def _pass_on(self, events: list[tuple[int, str, Any]]) -> None:
        self._events.extend(events)
        if events and self._continuing is None:
            self._continue()


_LOCK = threading.RLock()
_REACTORS: weakref.WeakSet[LoopReactor] = weakref.WeakSet()
