"""IdlePool: open connections that wait for their next request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from streamfold.client.drivers.connector import Opened
    from streamfold.client.urls import Origin

__all__ = ["KEPT_SECONDS", "IdlePool"]

# uvicorn, which most engines use, closes after 5 seconds, and a request that meets that would have to be repeated.
KEPT_SECONDS = 4.0


class _Kept(NamedTuple):
    opened: Opened
    until: float


class IdlePool:
    """Keeps connections for a few seconds, and closes them with one timer.

    Args:
        loop: the event loop that all calls are made in.
        on_closed: called when the pool has closed a connection.
        seconds: how long a connection is kept.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_closed: Callable[[Opened], None], *, seconds: float = KEPT_SECONDS
    ) -> None:
        self._loop = loop
        self._on_closed = on_closed
        self._seconds = seconds
        self._kept: dict[Origin, list[_Kept]] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def put(self, origin: Origin, opened: Opened) -> None:
        """Keep a connection."""
        self._kept.setdefault(origin, []).append(_Kept(opened, self._loop.time() + self._seconds))
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._close_old)

    def take(self, origin: Origin, *, is_control: bool) -> Opened | None:
        """The connection that was used last, if there is one. Those of the reserve are for control requests only."""
        kept = self._kept.get(origin, [])
        for index in range(len(kept) - 1, -1, -1):
            if is_control or not kept[index].opened.is_reserved:
                opened = kept.pop(index).opened
                if not kept:
                    del self._kept[origin]
                return opened
        return None

    def close_oldest(self) -> bool:
        """Close the connection that has been idle longest, to make room. Returns whether there was one.

        Not one of the reserve: its descriptor is not for calls.
        """
        candidates = [
            (kept.until, number, origin, kept)
            for number, (origin, queue) in enumerate(self._kept.items())
            for kept in queue
            if not kept.opened.is_reserved
        ]
        if not candidates:
            return False
        _, _, origin, oldest = min(candidates, key=lambda candidate: candidate[:2])
        self._kept[origin].remove(oldest)
        if not self._kept[origin]:
            del self._kept[origin]
        self._close(oldest)
        return True

    def close(self) -> None:
        """Close all. Idempotent."""
        queues, self._kept = self._kept, {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for queue in queues.values():
            for kept in queue:
                self._close(kept)

    def _close_old(self) -> None:
        self._timer = None
        now = self._loop.time()
        for origin, queue in list(self._kept.items()):
            while queue and queue[0].until <= now:
                self._close(queue.pop(0))
            if not queue:
                self._kept.pop(origin, None)
        if self._kept:
            until = min(queue[0].until for queue in self._kept.values())
            self._timer = self._loop.call_later(max(0.0, until - now), self._close_old)

    def _close(self, kept: _Kept) -> None:
        kept.opened.connection.end()
        self._on_closed(kept.opened)
