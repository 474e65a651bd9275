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
    from collections.abc import Sequence

    from streamfold.client.deadlines import Deadlines
    from streamfold.client.drivers.base import Driver, Exchange, Failure, Fields, Head, Kind

__all__ = ["ControlRequests", "EndpointMissing", "Reply", "Silent", "Unreachable"]

_TIMEOUT_SECONDS = 3.0  # for one request, from the connect to the end of its response
_MAX_CONCURRENT = 32  # requests to each worker, so that one that hangs does not delay aborts at the others
_MAX_RESPONSE_BYTES = 1 << 20
_NO_ENDPOINT = (403, 404, 405)

_Method = Literal["GET", "POST"]


class EndpointMissing(EngineError):
    """The server does not have this endpoint, or denies access to it."""


class Unreachable(EngineError):
    """No connection to the server could be made."""


class Silent(EngineError):
    """There is a connection, but no reply came in time."""


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

    @property
    def pipelines(self) -> bool:
        """Whether :meth:`post` takes several bodies."""
        return self._driver.pipelines

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
            Unreachable: no connection in time.
            EngineError: no response in time or before ``stop`` was set, or one with a status of 300 or more.
        """
        return await self._send(self._request(method, base, path, body), base, Reply(), stop)

    async def post(self, base: str, path: str, bodies: Sequence[dict[str, Any]], reply: Reply) -> None:
        """Send a POST for each of ``bodies`` to the server at base URL ``base``, in one go; several: if it pipelines.

        A reply that is not the last may end it early without an error: then ``reply.passed`` is less than all but one.

        Raises:
            Unreachable: no connection in time.
            Silent: no reply in time, counted anew from each.
            EngineError: no reply to one of them, or a status of 300 or more; ``reply.passed`` before were good.
        """
        first, *more = bodies
        request = self._request("POST", base, path, first)
        await self._send(request._replace(more=tuple(map(orjson.dumps, more))), base, reply)

    async def _send(self, request: HttpRequest, base: str, reply: Reply, stop: AbortSignal | None = None) -> bytes:
        slots = self._slots[base]
        slot = slots.request()

        def end() -> None:
            slots.leave(slot)
            reply.stop()

        unsubscribe = (stop or AbortSignal()).subscribe(end)
        try:
            if not await slots.wait(slot):
                raise EngineError(
                    f"no request was sent to {request.url}: the client is being closed, or the time given to "
                    f"abort_engines is over"
                )
            try:
                return await self._exchange(reply, request)
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

    async def _exchange(self, reply: Reply, request: HttpRequest) -> bytes:
        """Send a request and return the body of its response, within ``_TIMEOUT_SECONDS``, anew from each reply."""
        passed = 0

        def expired() -> None:
            nonlocal passed
            if reply.passed > passed:
                passed = reply.passed
                deadline.set(_TIMEOUT_SECONDS)
            else:
                reply.stop()

        deadline = Deadline(self._deadlines, expired, reply.urgent)
        deadline.set(_TIMEOUT_SECONDS)
        try:
            await reply.receive(self._driver, request)
            if reply.is_stale:  # the server had closed a kept connection
                await reply.receive(self._driver, request._replace(fresh=True))
        finally:
            deadline.close()
        return reply.result(request.url)


class Reply:
    """The reply to one request, or those to several that were sent in one go: see :class:`HttpRequest`.

    Attributes:
        head: status and headers, once they were received.
        failure: why there is none.
        stopped: whether :meth:`stop` was called before the end.
        connected: whether there was a connection.
    """

    def __init__(self) -> None:
        self.head: Head | None = None
        self._body = b""
        self.failure: Failure | None = None
        self.stopped: bool = False
        self.connected: bool = False
        self._exchange: Exchange | None = None
        self._over: asyncio.Future[None] | None = None

    def result(self, url: str) -> bytes:
        """The body.

        Raises:
            Unreachable: there was no connection.
            Silent: there was one, but no reply in time.
            EngineError: there is none, or the status is 300 or more.
        """
        if self.failure is not None and not self.stopped:
            failed = Unreachable if self.failure.is_unconnected else EngineError
            raise failed(f"no reply from {url}: {self.failure.message}", retryable=True) from self.failure.cause
        if self.head is None:
            failed = Silent if self.connected else Unreachable
            raise failed(f"no reply from {url} within {_TIMEOUT_SECONDS:g} s", retryable=True)
        if self.stopped:
            raise Silent(f"the response from {url} did not end within {_TIMEOUT_SECONDS:g} s", retryable=True)
        if self.head.status >= 300:
            kind = EndpointMissing if self.head.status in _NO_ENDPOINT else EngineError
            raise kind(error_message(self._body), status=self.head.status)
        return self._body

    @property
    def passed(self) -> int:
        """Good replies before the one that is reported."""
        return 0 if self._exchange is None else self._exchange.passed

    @property
    def is_stale(self) -> bool:
        """Whether a kept connection failed before the first byte of the reply."""
        return self.failure is not None and self.failure.is_stale

    async def receive(self, driver: Driver, request: HttpRequest) -> None:
        """Send ``request`` and wait for the end of its reply."""
        if self.stopped:
            return
        self.failure = None
        self.connected = False
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
            self.connected = True
            self._exchange.send()
        elif kind == "head":
            self.head = detail
        elif kind == "failed":
            self.failure = detail
        elif kind == "ended" and self._over is not None and not self._over.done():
            self._over.set_result(None)
