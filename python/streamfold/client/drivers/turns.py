"""Turns: connections to an address begin one after another, as fast as its Pacing allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from streamfold.client.drivers.pacing import Pacing

if TYPE_CHECKING:
    import asyncio

    from streamfold.client.drivers.sockets import Address

__all__ = ["Turns"]

# Several that wait begin at once: a timer for each would cost more than its connection.
_TICK_SECONDS = 0.005

Waiting = dict[object, Callable[[], None]]


class Turns:
    """Who may begin a connection now, and who waits for it.

    Args:
        loop: the event loop that all calls are made in.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[tuple[Address, float], _Queue] = {}

    def take(self, address: Address, rate: float) -> bool:
        """Whether a connection may begin now; then it has to."""
        queue = self._queue(address, rate)
        return not queue.is_waited_for and queue.pacing.take(self._loop.time())

    def wait(self, address: Address, rate: float, begin: Callable[[], None], *, first: bool) -> Callable[[], None]:
        """Call ``begin`` when a connection may begin; not before this returns.

        Args:
            address: where to.
            rate: connections per second. Those with the same rate share their turns.
            begin: called once.
            first: whether to wait before all that are not ``first``.

        Returns:
            What cancels. Idempotent.
        """
        return self._queue(address, rate).add(begin, first=first)

    def opened(self, address: Address, rate: float, began: float) -> None:
        """A connection that began at ``began`` (``loop.time()``) is open."""
        self._queue(address, rate).pacing.opened(began, self._loop.time())

    def _queue(self, address: Address, rate: float) -> _Queue:
        queue = self._queues.get((address, rate))
        if queue is None:
            now = self._loop.time()
            self._queues = {key: queue for key, queue in self._queues.items() if not queue.is_forgettable(now)}
            queue = self._queues[address, rate] = _Queue(self._loop, Pacing(rate))
        return queue


class _Queue:
    """Those who wait to begin a connection to one address."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pacing: Pacing) -> None:
        self.pacing = pacing
        self._loop = loop
        self._first: Waiting = {}
        self._others: Waiting = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_waited_for(self) -> bool:
        return bool(self._first or self._others)

    def is_forgettable(self, now: float) -> bool:
        return not self.is_waited_for and self.pacing.is_full(now)

    def add(self, begin: Callable[[], None], *, first: bool) -> Callable[[], None]:
        ticket, waiting = object(), self._first if first else self._others
        waiting[ticket] = begin
        if self._timer is None:
            self._arm()

        def leave() -> None:
            waiting.pop(ticket, None)
            if not self.is_waited_for and self._timer is not None:
                self._timer.cancel()
                self._timer = None

        return leave

    def _arm(self) -> None:
        wait = max(self.pacing.wait(self._loop.time()), _TICK_SECONDS)
        self._timer = self._loop.call_later(wait, self._proceed)

    def _proceed(self) -> None:
        self._timer = None
        while self.is_waited_for and self.pacing.take(self._loop.time()):
            waiting = self._first or self._others
            waiting.pop(next(iter(waiting)))()
        if self.is_waited_for and self._timer is None:
            self._arm()
