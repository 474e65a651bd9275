"""ControlRequests: sends small requests and reads their responses, with a time limit and a concurrency limit."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal

import orjson

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.deadlines import Deadline
from streamfold.client.drivers.base import HttpRequest
from streamfold.client.limits import Slots
from streamfold.client.responses import error_message
from streamfold.client.urls import BaseUrl
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from streamfold.client.deadlines import Deadlines
    from streamfold.client.drivers.base import Driver, Exchange, Failure, Fields, Head, Kind

__all__ = ["ControlRequests", "EndpointMissing"]

_TIMEOUT_SECONDS = 3.0  # for one request, from the connect to the end of its response
_MAX_CONCURRENT = 32  # requests to each worker, so that one that hangs does not delay aborts at the others
_MAX_RESPONSE_BYTES = 1 << 20
_NO_ENDPOINT = (403, 404, 405)

_Method = Literal["GET", "POST"]


class EndpointMissing(EngineError):
    """The server does not have this endpoint, or denies access to it."""


class ControlRequests:
    """Sends them. Bound to the running event loop.

    Args:
        driver: carries the requests.
        fields: the headers of each request.
        deadlines: of the client.
    """

    def __init__(self, driver: Driver, fields: Fields, deadlines: Deadlines) -> None:
        self._driver = driver
        self._fields = fields
        self._deadlines = deadlines
        self._slots: defaultdict[str, Slots] = defaultdict(lambda: Slots(_MAX_CONCURRENT))

    @property
    def timeout(self) -> float:
        """Seconds that one request takes at most, without its wait for a slot."""
        return _TIMEOUT_SECONDS

    def dismiss(self) -> None:
        """Let the requests fail that queue for a worker."""
        for slots in self._slots.values():
            slots.dismiss()

    async def send(
        self,
        method: _Method,
        base: str,
        path: str,
        body: dict[str, Any] | None = None,
        stop: AbortSignal | None = None,
    ) -> bytes:
        """Send one request to the server at base URL ``base``, and return the body of its response.

        Raises:
            EngineError: no response in time or before ``stop`` was set, or one with a status of 300 or more.
        """
        slots = self._slots[base]
        slot = slots.request()
        reply = _Reply()

        def end() -> None:
            slots.leave(slot)
            reply.stop()

        unsubscribe = (stop or AbortSignal()).subscribe(end)
        try:
            if not await slots.wait(slot):
                raise EngineError(
                    f"no request was sent to {base}{path}: the client is being closed, or the time given to "
                    f"abort_engines is over"
                )
            try:
                return await self._exchange(reply, self._request(method, base, path, body))
            finally:
                slots.release()
        finally:
            unsubscribe()

    def _request(self, method: _Method, base: str, path: str, body: dict[str, Any] | None) -> HttpRequest:
        url = BaseUrl.parse(base)
        return HttpRequest(
            origin=url.origin,
            method=method,
            target=url.prefix + path,
            fields=self._fields,
            body=b"" if body is None else orjson.dumps(body),
            max_body_bytes=_MAX_RESPONSE_BYTES,
            connect_timeout=_TIMEOUT_SECONDS,
        )

    async def _exchange(self, reply: _Reply, request: HttpRequest) -> bytes:
        """Send one request and return the body of its response, within ``_TIMEOUT_SECONDS``."""
        deadline = Deadline(self._deadlines, reply.stop, reply.urgent)
        deadline.set(_TIMEOUT_SECONDS)
        try:
            await reply.receive(self._driver, request)
            if reply.is_stale:  # the server had closed a kept connection
                await reply.receive(self._driver, request._replace(fresh=True))
        finally:
            deadline.set(None)
        return reply.result(request.url)


class _Reply:
    """The reply to one request.

    Attributes:
        head: status and headers, once they were received.
        failure: why there is none.
        stopped: whether :meth:`stop` was called before the end.
    """

    def __init__(self) -> None:
        self.head: Head | None = None
        self._body = b""
        self.failure: Failure | None = None
        self.stopped = False
        self._exchange: Exchange | None = None
        self._over: asyncio.Future[None] | None = None

    def result(self, url: str) -> bytes:
        """The body.

        Raises:
            EngineError: there is none, or the status is 300 or more.
        """
        if self.failure is not None and not self.stopped:
            raise EngineError(f"no reply from {url}: {self.failure.message}", retryable=True) from self.failure.cause
        if self.head is None:
            raise EngineError(f"no reply from {url} within {_TIMEOUT_SECONDS:g} s", retryable=True)
        if self.stopped:
            raise EngineError(f"the response from {url} did not end within {_TIMEOUT_SECONDS:g} s", retryable=True)
        if self.head.status >= 300:
            kind = EndpointMissing if self.head.status in _NO_ENDPOINT else EngineError
            raise kind(error_message(self._body), status=self.head.status)
        return self._body

    @property
    def is_stale(self) -> bool:
        """Whether a kept connection failed before the first byte of the reply."""
        return self.failure is not None and self.failure.is_stale

    async def receive(self, driver: Driver, request: HttpRequest) -> None:
        """Send ``request`` and wait for the end of its reply."""
        if self.stopped:
            return
        self.failure = None
        self._over = asyncio.get_running_loop().create_future()
        self._exchange = exchange = driver.start(request, self._listen)
        del request
        try:
            await self._over
        finally:
            exchange.end()
        self._body = exchange.take_body()

    def urgent(self) -> None:
        """Read what has arrived."""
        if self._exchange is not None:
            self._exchange.urgent()

    def stop(self) -> None:
        """End the exchange now, or let none begin."""
        if self._over is None or not self._over.done():
            self.stopped = True
            if self._exchange is not None:
                self._exchange.end()

    def _listen(self, kind: Kind, detail: Any) -> None:  # noqa: ANN401  # each kind has its own
        if kind == "connected" and self._exchange is not None:
            self._exchange.send()
        elif kind == "head":
            self.head = detail
        elif kind == "failed":
            self.failure = detail
        elif kind == "ended" and self._over is not None and not self._over.done():
            self._over.set_result(None)
