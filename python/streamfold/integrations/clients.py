"""The adapters' clients: one :class:`~streamfold.Client` for each event loop and router, closed with the loop."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from streamfold.client.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from streamfold._core import Experts
    from streamfold.client.limits import Timeouts
    from streamfold.integrations.settings import Settings

__all__ = ["LOOK_SECONDS", "ClientHandle", "client_handle", "pause"]

LOOK_SECONDS: Final = 0.1  # how often those who wait look whether the trainer is aborting
_WATCH_SECONDS: Final = 0.5  # how often the trainer's flag is checked for requests that outlived its abort
_GRACE_SECONDS: Final = 5.0  # after the drain: time for an abort of whole servers to end the streams


@dataclass(eq=False)
class ClientHandle:
    """A client, and what all calls made with it share.

    Attributes:
        client: of one router.
        timeouts: the client's.
        stop_ids: tokens that end a response: the tokenizer's EOS, and those at which the engine was seen to stop.
    """

    client: Client
    timeouts: Timeouts
    stop_ids: set[int] = field(default_factory=set)
    _closing: AsyncGenerator[None, None] | None = None  # referenced here, as the loop holds its generators weakly
    _users: int = 0
    _watch: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watched(self, aborted: Callable[[], bool]) -> Iterator[None]:
        """Inside the block, abort the client's calls that are still running some seconds after the trainer's abort.

        A trainer that aborts whole servers waits until every stream has ended. A request that reached its engine just
        after that abort would run, or wait in the queue, without end.
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
            await asyncio.sleep(_WATCH_SECONDS)
            looks = looks + 1 if aborted() else 0
            if looks * _WATCH_SECONDS > self.timeouts.drain + _GRACE_SECONDS:
                await self.client.abort_all()


_handles: dict[asyncio.AbstractEventLoop, dict[object, ClientHandle]] = {}


async def client_handle(
    engine: Literal["sglang", "vllm"], url: str, settings: Settings, experts: Experts | None = None
) -> ClientHandle:
    """The running event loop's client for a router, created on first use and closed with the loop.

    Raises:
        ValueError: ``url`` is no address.
    """
    loop = asyncio.get_running_loop()
    if loop not in _handles:
        for closed in [other for other in list(_handles) if other.is_closed()]:
            _handles.pop(closed, None)
        _handles[loop] = {}
    limits, timeouts, retries = settings.limits, settings.timeouts, settings.retries
    key = (engine, url, limits, timeouts, retries, experts)
    found = _handles[loop].get(key)
    if found is None:
        client = Client(url, engine=engine, timeouts=timeouts, limits=limits, retries=retries, experts=experts)
        closing = _close_with_loop(loop, client)
        await closing.__anext__()  # registers it with the loop; does not suspend
        found = _handles[loop][key] = ClientHandle(client, timeouts, _closing=closing)
    return found


async def _close_with_loop(loop: asyncio.AbstractEventLoop, client: Client) -> AsyncGenerator[None, None]:
    # asyncio.run and its like close the loop's asynchronous generators before they close the loop.
    try:
        yield
    finally:
        _handles.pop(loop, None)
        await client.aclose()


async def pause(seconds: float, aborted: Callable[[], bool]) -> None:
    """Sleep, but not after the trainer has started to abort."""
    clock = asyncio.get_running_loop().time
    until = clock() + seconds
    while (left := until - clock()) > 0 and not aborted():  # noqa: ASYNC110  # the trainer's flag
        await asyncio.sleep(min(left, LOOK_SECONDS))
