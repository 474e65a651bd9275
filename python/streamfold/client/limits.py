"""Timeouts, Limits and Retries of a client, and the deadlines and concurrency slots that enforce them."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections import OrderedDict
from dataclasses import dataclass, fields

__all__ = ["Default", "Limits", "Retries", "Slots", "Timeouts", "check_seconds"]

_MAX_RETRY_AFTER = 600.0  # seconds


class Default(float):
    """A number of seconds that nobody has set: equal to any other float of its value."""

    __slots__ = ()


_FIRST_TOKEN = Default(600.0)


@dataclass(frozen=True)
class Timeouts:
    """Timeouts for each phase of a try, in seconds. There is no total timeout.

    Attributes:
        connect: to open the connection, and again to agree on TLS. None: as long as the operating system allows.
        first_token: from sending the request to the first token, headers included. It has to cover the engine's
            queue and prefill. None: no limit. If it is left out, and requests wait at the engine when it has passed,
            it is extended once, to twice its length, which is logged.
        next_token: from one token to the next. Comments and events that bring no token do not count. None: no limit.
        drain: how long an abort reads on for side data (routed experts, top-p), which only the terminal event carries.
            vLLM's weight versions are waited for too: until no abort has got its terminal event for 0.1 s.

    Raises:
        ValueError: a value is negative, or not a number.
    """

    connect: float | None = 10.0
    first_token: float | None = _FIRST_TOKEN
    next_token: float | None = 300.0
    drain: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_seconds(field.name, getattr(self, field.name), optional=field.name != "drain")


@dataclass(frozen=True)
class Limits:
    """Limits of one client.

    Attributes:
        calls: how many calls run at once. The others wait in order, without a timeout. Each running call holds one
            socket: mind ``ulimit -n``.
        max_event_bytes: the longest event of a stream, in bytes. A longer one is a ``DecodeError`` (``too_large``).

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
    """Retries of calls that fail before their first token, and resumes of samples: how often, with which backoff.

    Retried are timeouts, refused or reset connections, truncated streams, the statuses 408, 429 and 5xx, and a refusal
    because the request id is in use, unless the caller gave it. A call that got three empty replies with status 200 is
    not retried any more if another call of the client has succeeded since its first try.

    Attributes:
        tries: requests of one call at most, the first one included; also calls of one sample at most in ``complete()``.
            None: no limit.
        first: seconds before the first retry; each later pause is twice as long.
        longest: the longest pause in seconds, unless the engine demands a longer one (``Retry-After``, up to 600 s).
        jitter: 0 to 1: the random share by which a pause is shortened, or a ``Retry-After`` lengthened, so that calls
            that failed together are not retried together. 0: none.

    Raises:
        ValueError: ``tries`` is below 1, a pause is negative or infinite, or ``jitter`` is not 0 to 1.
    """

    tries: int | None = 60
    first: float = 0.5
    longest: float = 10.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if self.tries is not None and (not isinstance(self.tries, int) or self.tries < 1):
            raise ValueError(
                f"tries must be an integer of at least 1 (1: no retries), or None for no limit; not {self.tries!r}"
            )
        check_seconds("first", self.first, optional=False)
        check_seconds("longest", self.longest, optional=False)
        if not (_lies_in(self.jitter, 0, 1) or self.jitter == 1):
            raise ValueError(f"jitter must be a number from 0 to 1, not {self.jitter!r}")

    def is_last(self, tries: int) -> bool:
        """Whether no other try may follow the one with this number, counted from 1."""
        return self.tries is not None and tries >= self.tries

    def pause(self, failures: int, retry_after: float | None = None) -> float:
        """Seconds to wait after ``failures`` failed tries; at least ``retry_after``, if the engine sent that.

        At most 600 s of ``retry_after`` count: one wrong clock must not stop a rollout.
        """
        jitter = self.jitter * random.random()  # noqa: S311  # no secret: it only spreads retries
        backoff = min(self.longest, self.first * 2.0 ** min(failures - 1, 64)) * (1 - jitter)
        return backoff if retry_after is None else max(backoff, min(retry_after, _MAX_RETRY_AFTER) * (1 + jitter))


def check_seconds(name: str, value: float | None, *, optional: bool) -> None:
    """Raise ValueError unless ``value`` is a duration in seconds (or None, if that is ``optional``)."""
    if value is None and optional:
        return
    if not _lies_in(value, 0, math.inf):
        hint = ", or None for no limit" if optional else ""
        raise ValueError(f"{name} must be a number of seconds, 0 or more{hint}; not {value!r}")


def _lies_in(value: object, least: float, end: float) -> bool:
    """Whether a value of any type is a number from ``least`` to below ``end``."""
    try:
        return bool(least <= value < end)  # type: ignore[operator]  # any other type is what this finds out
    except TypeError:
        return False


class Slots:
    """A fixed number of slots, granted in order of their requests.

    Unlike a semaphore's, a waiter need not be cancelled to leave the queue: see :meth:`leave`.

    Args:
        size: how many slots there are.
        per_pass: how many are granted in one pass of the event loop, so that thousands of simultaneous starts do not
            block it.
    """

    def __init__(self, size: int, *, per_pass: int = sys.maxsize) -> None:
        self._free = size
        self._queue: OrderedDict[asyncio.Future[bool], None] = OrderedDict()  # constant time to leave
        self._per_pass = per_pass
        self._left = per_pass  # of this pass

    @property
    def free(self) -> int:
        """Slots that are not held."""
        return self._free

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def request(self) -> asyncio.Future[bool]:
        """Join the queue. The future becomes True when the slot is held; it must then be released."""
        slot = asyncio.get_running_loop().create_future()
        if self._queue or not (self._free and self._left):
            self._queue[slot] = None
        else:
            self._hold(slot)
        return slot

    def release(self) -> None:
        """Return a slot, which the next in the queue gets."""
        self._free += 1
        self._grant()

    def _grant(self) -> None:
        while self._queue and self._free and self._left:
            slot, _ = self._queue.popitem(last=False)
            if not slot.done():
                self._hold(slot)

    def _hold(self, slot: asyncio.Future[bool]) -> None:
        if self._left == self._per_pass:  # the first one of this pass
            slot.get_loop().call_soon(self._next_pass)
        self._free -= 1
        self._left -= 1
        slot.set_result(True)

    def _next_pass(self) -> None:
        self._left = self._per_pass
        self._grant()

    def leave(self, slot: asyncio.Future[bool]) -> None:
        """Leave the queue: the future becomes False. A slot that is held already stays held."""
        self._queue.pop(slot, None)
        if not slot.done():
            slot.set_result(False)

    def dismiss(self) -> None:
        """Let all in the queue leave it."""
        for slot in list(self._queue):
            self.leave(slot)

    async def wait(self, slot: asyncio.Future[bool]) -> bool:
        """Wait for a requested slot; False if it left the queue. A cancelled wait holds no slot."""
        try:
            return await slot
        except asyncio.CancelledError:
            self._queue.pop(slot, None)
            if not slot.cancelled() and slot.result():
                self.release()  # it was granted in the same moment
            raise
