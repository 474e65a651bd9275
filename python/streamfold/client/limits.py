"""How long to wait, how much at once, how often again."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Deadline", "Limits", "Retries", "Slots", "Timeouts"]

_LONGEST_ASKED = 600.0  # seconds of a Retry-After
_LATE = 0.02  # a deadline looks again after so many seconds: a busy event loop is not a silent engine


@dataclass(frozen=True)
class Timeouts:
    """How long each phase of a call may last, in seconds. There is no limit on the whole of a call.

    Attributes:
        connect: to open the connection, and again to agree on TLS. None: as long as the operating system allows.
        first_token: from sending the request to the first token, headers included. It has to cover the engine's
            queue and prefill. None: no limit.
        next_token: from one token to the next. Comments and events that bring no token do not count. None: no limit.
        drain: how long an abort goes on reading for side data, which comes only with the terminal event.

    Raises:
        ValueError: a value is negative, or not a number.
    """

    connect: float | None = 10.0
    first_token: float | None = 600.0
    next_token: float | None = 300.0
    drain: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_seconds(field.name, getattr(self, field.name), optional=field.name != "drain")


@dataclass(frozen=True)
class Limits:
    """How much one client does at once.

    Attributes:
        calls: how many calls run at the same time; the others wait their turn, first come, first served, and no
            time-out runs for them. Each running call holds one socket: mind ``ulimit -n``.
        max_event_bytes: the longest event of a stream, in bytes; a longer one is a ``DecodeError`` (``too_large``).

    Raises:
        ValueError: a limit is below 1.
    """

    calls: int = 4096
    max_event_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be an integer of at least 1, not {value!r}")


@dataclass(frozen=True)
class Retries:
    """How often something is asked for again that failed for a while, and the pauses in between.

    Attributes:
        tries: requests for one call at most, the first one included, while no token has come; and likewise how often
            one sample is gone on with.
        first: seconds before the second try; each later pause is twice as long.
        longest: seconds that no pause exceeds, unless the engine itself asks for a longer one (``Retry-After``).
        jitter: the share of a pause by which chance may shorten it, and lengthen one that the engine asks for, so
            that calls that failed together do not come back together. 0: none.

    Raises:
        ValueError: ``tries`` is below 1, a pause is negative or endless, or ``jitter`` is no share.
    """

    tries: int = 60
    first: float = 0.5
    longest: float = 10.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.tries, int) or self.tries < 1:
            raise ValueError(f"tries must be an integer of at least 1 (1: never again), not {self.tries!r}")
        check_seconds("first", self.first, optional=False)
        check_seconds("longest", self.longest, optional=False)
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be a share, 0 to 1, not {self.jitter!r}")

    def pause(self, failures: int, retry_after: float | None = None) -> float:
        """Seconds to wait after so many failures; at least ``retry_after``, if the engine has asked for that.

        An engine that asks for more than ten minutes is asked after ten: one wrong clock must not park a rollout.
        """
        chance = self.jitter * random.random()  # noqa: S311  # it only keeps clients apart
        usual = min(self.longest, self.first * 2.0 ** min(failures - 1, 64)) * (1 - chance)
        return usual if retry_after is None else max(usual, min(retry_after, _LONGEST_ASKED) * (1 + chance))


class Deadline:
    """One timer for a deadline that moves at each token: the timer itself moves only when it fires.

    ``expired`` is called once a deadline has passed. Bound to the running event loop.
    """

    def __init__(self, expired: Callable[[], None]) -> None:
        self._expired = expired
        self._loop = asyncio.get_running_loop()
        self._when = math.inf
        self._late = False
        self._timer: asyncio.Handle | None = None
        self._fires = math.inf

    def set(self, seconds: float | None) -> None:
        """Expire in so many seconds from now; None: never."""
        self._late = False
        self._when = math.inf if seconds is None else self._loop.time() + seconds
        if self._when < self._fires:
            self._start(self._when)
        elif seconds is None:
            self._start(math.inf)

    def _start(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires = when  # not the timer's word: uvloop's has none if it is to fire at once
        self._timer = self._loop.call_at(when, self._fire) if when < math.inf else None

    def _fire(self) -> None:
        self._timer, self._fires = None, math.inf
        if self._loop.time() < self._when:
            self._start(self._when)
        elif not self._late:
            self._late = True
            self._start(self._loop.time() + _LATE)
        else:
            self._expired()


def check_seconds(name: str, value: float | None, *, optional: bool) -> None:
    """Raise ValueError unless ``value`` is a length of time (or None, if it is ``optional``)."""
    if value is None and optional:
        return
    if value is None or not 0 <= value < math.inf:
        hint = ", or None for no limit" if optional else ""
        raise ValueError(f"{name} must be a number of seconds, 0 or more{hint}; not {value!r}")


class Slots:
    """A fixed number of places, handed out first come, first served.

    Unlike a semaphore's, its waiters need not be cancelled to be sent away: see :meth:`leave`.

    Args:
        size: how many places there are.
        per_pass: how many of them are handed out in one pass of the event loop, so that thousands of starts in the same
            moment let others run in between.
    """

    def __init__(self, size: int, *, per_pass: int = sys.maxsize) -> None:
        self._free = size
        self._waiting: OrderedDict[asyncio.Future[bool], None] = OrderedDict()  # who leaves is gone at once
        self._per_pass = per_pass
        self._left = per_pass  # of this pass

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return self._free

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    def request(self) -> asyncio.Future[bool]:
        """Queue up. The future becomes True once a place is held, which must then be released."""
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = None
        self._hand_out()
        return place

    def release(self) -> None:
        """Give a place back: to the next in the queue, if there is one."""
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self._free and self._left:
            place, _ = self._waiting.popitem(last=False)
            if not place.done():
                if self._left == self._per_pass:  # the first one of this pass
                    place.get_loop().call_soon(self._next_pass)
                self._free -= 1
                self._left -= 1
                place.set_result(True)

    def _next_pass(self) -> None:
        self._left = self._per_pass
        self._hand_out()

    def leave(self, place: asyncio.Future[bool]) -> None:
        """Send one away who waits, with False. Nothing happens to a place that is held already."""
        self._waiting.pop(place, None)
        if not place.done():
            place.set_result(False)

    def dismiss(self) -> None:
        """Send everybody away who waits, with False."""
        for place in list(self._waiting):
            self.leave(place)

    async def wait(self, place: asyncio.Future[bool]) -> bool:
        """Wait for a requested place; False if it was sent away. A cancelled wait holds no place."""
        try:
            return await place
        except asyncio.CancelledError:
            self._waiting.pop(place, None)
            if not place.cancelled() and place.result():
                self.release()  # it came in the same moment
            raise
