"""Descriptors of the process: who waits for one, and a reserve for requests that must not wait."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["HINT", "DescriptorQueue", "Reserve", "is_shortage"]

HINT = "raise the limit of open files (`ulimit -n`), or run fewer calls at once (`Limits.calls`)"

# The process may close files of which nothing is known here.
_RETRY_SECONDS = 0.05

_MOST_RESERVED = 8


def is_shortage(error: OSError) -> bool:
    """Whether the process, or the system, has no more descriptors."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


class DescriptorQueue:
    """Those who found no descriptor free, and try again in their order.

    Args:
        loop: the event loop that all calls are made in.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._first: OrderedDict[object, Callable[[], None]] = OrderedDict()
        self._others: OrderedDict[object, Callable[[], None]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_waited_for(self) -> bool:
        """Whether anybody waits."""
        return bool(self._first or self._others)

    @property
    def is_waited_for_first(self) -> bool:
        """Whether a request waits that goes before calls."""
        return bool(self._first)

    def wait(self, retry: Callable[[], None], *, first: bool, again: bool) -> Callable[[], None]:
        """Call ``retry`` once when a descriptor may be free; not before this returns.

        Args:
            retry: tries again.
            first: whether to wait before all that are not ``first``.
            again: whether it has tried again before, in vain: then it keeps its place.

        Returns:
            What cancels. Idempotent.
        """
        ticket, waiting = object(), self._first if first else self._others
        waiting[ticket] = retry
        waiting.move_to_end(ticket, last=not again)
        self._arm()

        def leave() -> None:
            waiting.pop(ticket, None)
            self._arm()

        return leave

    def freed(self) -> None:
        """A descriptor may be free: let the next one try again."""
        if not self.is_waited_for:
            return
        _, retry = (self._first or self._others).popitem(last=False)
        self._arm()
        retry()

    def _arm(self) -> None:
        if self.is_waited_for and self._timer is None:
            self._timer = self._loop.call_later(_RETRY_SECONDS, self._on_timer)
        elif not self.is_waited_for and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self.freed()
        self._arm()


class Reserve:
    """A few descriptors that are held open, and lent to requests that must not wait.

    Args:
        size: how many. None: one of 64 that the process may have, at most 8.
    """

    def __init__(self, size: int | None = None) -> None:
        if size is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            size = _MOST_RESERVED if soft == resource.RLIM_INFINITY else max(1, min(_MOST_RESERVED, soft // 64))
        self._size = size
        self._held: list[int] = []
        self._lent = 0

    def fill(self) -> None:
        """Open what is neither held nor lent, as far as descriptors are free."""
        with contextlib.suppress(OSError):
            while len(self._held) + self._lent < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def lend(self) -> bool:
        """Close one, so that a socket can have its place. Returns whether there was one."""
        if not self._held:
            return False
        os.close(self._held.pop())
        self._lent += 1
        return True

    def take_back(self, count: int = 1) -> None:
        """Sockets that had the place of lent ones are closed: the next :meth:`fill` opens them again."""
        self._lent -= count

    def close(self) -> None:
        """Close all. Idempotent."""
        while self._held:
            os.close(self._held.pop())

    def __del__(self) -> None:
        """Of a client that was not closed before its event loop was."""
        self.close()
