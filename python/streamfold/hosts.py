"""What the adapters for trainers share: settings, and one client for each event loop and router.

Settings are attributes of the host's ``args`` or environment variables; attributes win. For time-outs ``none`` (in YAML
``null``) stands for no limit.

================================== =============================== ========== ========================================
attribute                          variable                        default    meaning
================================== =============================== ========== ========================================
``streamfold_resume``              STREAMFOLD_RESUME               continue   after a stream broke off: ``continue``
                                                                              from the tokens that came, ``restart``
                                                                              without them, or ``raise``
``streamfold_tries``               STREAMFOLD_TRIES                60         requests for one call while no token has
                                                                              come, and resumes of one sample
``streamfold_timeout_connect``     STREAMFOLD_TIMEOUT_CONNECT      10         seconds to open a connection
``streamfold_timeout_first_token`` STREAMFOLD_TIMEOUT_FIRST_TOKEN  600        seconds from the request to its first
                                                                              token: queue and prefill
``streamfold_timeout_next_token``  STREAMFOLD_TIMEOUT_NEXT_TOKEN   300        seconds from one token to the next
``streamfold_drain``               STREAMFOLD_DRAIN                2          seconds that an abort waits for routed
                                                                              experts and top-p ids, which come last
``streamfold_concurrency``         STREAMFOLD_CONCURRENCY          4096       requests at once, to each router; each
                                                                              holds one socket
``streamfold_max_event_bytes``     STREAMFOLD_MAX_EVENT_BYTES      1073741824 bytes in one event; more is an error
================================== =============================== ========== ========================================
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast, get_args

from streamfold.client import Client
from streamfold.limits import Limits, Retries, Timeouts
from streamfold.resume import Resume

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from streamfold._core import Experts

__all__ = ["Seat", "address", "resume_policy", "seat", "setting"]

Args: TypeAlias = Any  # the host's own; releases differ, so what may be missing is read with getattr
Value: TypeAlias = Any  # of a setting

_NO_LIMIT: Final = ("none", "null", "")
_UNSET: Final = object()
_LOOK_SECONDS: Final = 0.5
_GRACE_SECONDS: Final = 5.0  # besides the drain: for streams to end that an abort of whole servers has reached


def setting(args: Args, name: str, default: Value) -> Value:
    """One of the settings above, named without its prefix."""
    value = getattr(args, f"streamfold_{name}", _UNSET)
    if value is _UNSET:
        value = os.environ.get(f"STREAMFOLD_{name.upper()}", default)
    return None if isinstance(value, str) and value.lower() in _NO_LIMIT else value


def resume_policy(args: Args) -> Resume:
    """What to do after a stream broke off.

    Raises:
        ValueError: the setting is none of the three words.
    """
    policy = setting(args, "resume", "continue")
    if policy not in get_args(Resume):
        raise ValueError(f"streamfold_resume must be one of {', '.join(get_args(Resume))}, not {policy!r}")
    return cast("Resume", policy)


def address(host: str, port: int) -> str:
    """The URL of a router that is told as host and port; a bare IPv6 address gets its brackets."""
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


@dataclass(eq=False)
class Seat:
    """Where calls to one router are made from, in one event loop."""

    client: Client
    drain: float
    ends: set[int] = field(default_factory=set)  # tokens at which the engine was seen to stop
    _closes: AsyncGenerator[None, None] | None = None  # kept for the loop, which closes it at its own end
    _users: int = 0
    _watch: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watched(self, aborted: Callable[[], bool]) -> Iterator[None]:
        """End what is left of our calls a while after the host has begun to abort.

        A host that aborts whole servers waits for every stream to end. A request that reached its engine just after
        the sweep may run, or wait, for ever.
        """
        self._users += 1
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._look(aborted))
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._watch.cancel()
                self._watch = None

    async def _look(self, aborted: Callable[[], bool]) -> None:
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            looks = looks + 1 if aborted() else 0
            if looks * _LOOK_SECONDS > self.drain + _GRACE_SECONDS:
                await self.client.abort_all()


_seats: dict[asyncio.AbstractEventLoop, dict[object, Seat]] = {}


async def seat(args: Args, url: str, experts: Experts | None = None) -> Seat:
    """The running loop's client for this router, made on first use and closed with the loop.

    Raises:
        ValueError: a setting is none, or ``url`` no address.
    """
    loop = asyncio.get_running_loop()
    if loop not in _seats:
        for gone in [other for other in list(_seats) if other.is_closed()]:
            _seats.pop(gone, None)
        _seats[loop] = {}
    limits, timeouts, retries = _limits(args), _timeouts(args), Retries(tries=_number(args, "tries", 60, int) or 1)
    key = (url, limits, timeouts, retries, experts)
    found = _seats[loop].get(key)
    if found is None:
        client = Client(url, timeouts=timeouts, limits=limits, retries=retries, experts=experts)
        closes = _closing(loop, client)
        await closes.__anext__()  # which makes it known to the loop, and waits for nothing
        found = _seats[loop][key] = Seat(client, timeouts.drain, _closes=closes)
    return found


async def _closing(loop: asyncio.AbstractEventLoop, client: Client) -> AsyncGenerator[None, None]:
    # asyncio.run and its like end by closing the loop's asynchronous generators.
    try:
        yield
    finally:
        _seats.pop(loop, None)
        await client.aclose()


def _number(args: Args, name: str, default: float | None, kind: type[float] = float) -> Value:
    value = setting(args, name, default)
    try:
        return None if value is None else kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"streamfold_{name} must be a number, or none; not {value!r}") from None


def _timeouts(args: Args) -> Timeouts:
    usual = Timeouts()
    return Timeouts(
        connect=_number(args, "timeout_connect", usual.connect),
        first_token=_number(args, "timeout_first_token", usual.first_token),
        next_token=_number(args, "timeout_next_token", usual.next_token),
        drain=_number(args, "drain", usual.drain),
    )


def _limits(args: Args) -> Limits:
    usual = Limits()
    at_once = _number(args, "concurrency", usual.calls, int)
    longest = _number(args, "max_event_bytes", usual.max_event_bytes, int)
    if at_once is None or longest is None:
        raise ValueError("streamfold_concurrency and streamfold_max_event_bytes must be numbers: they need a limit")
    return Limits(at_once, longest)
