"""The integrations' clients: one :class:`~streamfold.Client` for each event loop and router, closed with the loop."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from streamfold.client._internal import internals_of
from streamfold.client.abort_signal import AbortSignal
from streamfold.client.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from contextlib import AbstractContextManager

    from streamfold._core import Experts
    from streamfold.integrations.settings import Settings

__all__ = ["ClientHandle", "client_handle"]

_GRACE_SECONDS: Final = 5.0  # after the drain: time for an abort of whole servers to end the streams


@dataclass(eq=False)
class ClientHandle:
    """A client, and what all calls made with it share.

    Attributes:
        client: of one router.
        stop_ids: tokens that end a response: the tokenizer's EOS, and those at which the engine was seen to stop.
    """

    client: Client
    stop_ids: set[int] = field(default_factory=set)
    _closing: AsyncGenerator[None, None] | None = None  # referenced here, as the loop holds its generators weakly
    _signals: dict[int, tuple[object, AbortSignal]] = field(default_factory=dict)  # by the id of the state

    def __post_init__(self) -> None:
        self._late_abort = _LateAbort(self.client, internals_of(self.client).timeouts.drain + _GRACE_SECONDS)

    def abort_signal(self, state: Any) -> AbortSignal:  # noqa: ANN401  # the trainer's GenerateState
        """The flag ``state.aborted`` as one signal for all calls with that state; a trainer may have several."""
        found = self._signals.get(id(state))
        if found is None:
            found = self._signals[id(state)] = state, AbortSignal(lambda: state.aborted)
        return found[1]

    def watch(self, abort: AbortSignal) -> AbstractContextManager[None]:
        """Inside the block, abort the client's calls that are still running some seconds after the trainer's abort.

        A trainer that aborts whole servers waits until every stream has ended. A request that reached its engine just
        after that abort would run, or wait in the queue, without end.
        """
        return self._late_abort.watch(abort)


class _LateAbort:
    """Aborts all calls of a client that are running ``seconds`` after a signal was set, while any caller watches it."""

    def __init__(self, client: Client, seconds: float) -> None:
        self._client = client
        self._seconds = seconds
        self._watching = 0
        self._unsubscribe: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watch(self, abort: AbortSignal) -> Iterator[None]:
        if self._unsubscribe is None:
            self._unsubscribe = abort.subscribe(lambda: self._start_timer(abort))
        self._watching += 1
        try:
            yield
        finally:
            self._watching -= 1
            if not self._watching:
                self._stop()

    def _start_timer(self, abort: AbortSignal) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._abort_calls, abort)

    def _abort_calls(self, abort: AbortSignal) -> None:
        if abort.is_set():
            self._task = asyncio.get_running_loop().create_task(self._client.abort_all())

    def _stop(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        for pending in (self._timer, self._task):
            if pending is not None:
                pending.cancel()
        self._unsubscribe = self._timer = self._task = None


_handles: dict[asyncio.AbstractEventLoop, dict[object, ClientHandle]] = {}


async def client_handle(
    engine: Literal["sglang", "vllm"], url: str, settings: Settings, experts: Experts | None = None
) -> ClientHandle:
    """The running event loop's client for a router, created on first use and closed with the loop.

    Raises:
        ValueError: ``url`` is no address, or the key or a header cannot be sent.
    """
    loop = asyncio.get_running_loop()
    if loop not in _handles:
        for closed in [other for other in list(_handles) if other.is_closed()]:
            _handles.pop(closed, None)
        _handles[loop] = {}
    limits, timeouts, retries = settings.limits, settings.timeouts, settings.retries
    headers = tuple(sorted((settings.headers or {}).items()))
    extra = orjson.dumps(settings.extra, option=orjson.OPT_SORT_KEYS)
    key = (engine, url, limits, timeouts, retries, experts, settings.api_key, headers, extra)
    found = _handles[loop].get(key)
    if found is None:
        client = Client(
            url,
            engine=engine,
            timeouts=timeouts,
            limits=limits,
            retries=retries,
            experts=experts,
            api_key=settings.api_key,
            headers=settings.headers,
            extra=settings.extra,
        )
        closing = _close_with_loop(loop, client)
        await closing.__anext__()  # registers it with the loop; does not suspend
        found = _handles[loop][key] = ClientHandle(client, _closing=closing)
    return found


async def _close_with_loop(loop: asyncio.AbstractEventLoop, client: Client) -> AsyncGenerator[None, None]:
    # asyncio.run and its like close the loop's asynchronous generators before they close the loop.
    try:
        yield
    finally:
        _handles.pop(loop, None)
        await client.aclose()
