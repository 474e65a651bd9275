"""Base class of the endpoints that generate: streamed and unstreamed responses, disconnects, rejected requests."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse

from streamfold.loopback.core.reply import DONE
from streamfold.loopback.core.request_params import EngineFault, InvalidRequest, MalformedBody
from streamfold.loopback.http.responses import OrjsonResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from streamfold.loopback.core.request import EngineRequest, Milestone
    from streamfold.loopback.core.scheduler import Scheduler

__all__ = ["MILESTONES", "Endpoint", "connection_of"]

# Key of the ASGI scope's "extensions": what is done to the request at certain token counts.
MILESTONES = "streamfold.milestones"

T = TypeVar("T")


def connection_of(scope: Scope) -> int:
    """The number of the connection on which a request came; 0 in servers that do not tell."""
    number: int = scope.get("state", {}).get("connection", 0)
    return number


class Endpoint(ABC, Generic[T]):
    """The ASGI application of a path that generates. ``T`` is a parsed body."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config

    @abstractmethod
    def _parse(self, http: HttpRequest, body: bytes) -> T:
        """Parse the body. Raises MalformedBody for what the HTTP layer rejects, before anything is sent."""

    @abstractmethod
    def _is_streamed(self, parsed: T) -> bool:
        """Return whether the response is streamed."""

    @abstractmethod
    def _make_requests(self, parsed: T, notify: Callable[[], None]) -> list[EngineRequest]:
        """Make the requests. Raises InvalidRequest for what the engine rejects after a stream has started."""

    @abstractmethod
    def _error_event(self, error: InvalidRequest) -> bytes:
        """Return the stream event of a rejected request."""

    @abstractmethod
    def _error_response(self, error: InvalidRequest) -> Response:
        """Return the unstreamed response to a rejected request."""

    @abstractmethod
    def _failure_response(self, request: EngineRequest) -> Response | None:
        """Return the unstreamed response with an HTTP error status, if the request finished with one."""

    @abstractmethod
    def _body(self, requests: list[EngineRequest]) -> object:
        """Return the body of an unstreamed response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then generate."""
        http = HttpRequest(scope, receive)
        try:
            parsed = self._parse(http, await http.body())
        except ClientDisconnect:
            return
        except MalformedBody as error:
            await OrjsonResponse(error.content, status_code=error.status)(scope, receive, send)
            return
        client = _ClientWatch(receive, scope)
        milestones = scope.get("extensions", {}).get(MILESTONES, ())
        try:
            if self._is_streamed(parsed):
                await self._stream(parsed, client, send, milestones)
            else:
                response = await self._generate(parsed, client, milestones)
                if response is not None:
                    await response(scope, receive, send)
        finally:
            await client.close()

    async def _stream(self, parsed: T, client: _ClientWatch, send: Send, milestones: Sequence[Milestone]) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        # Headers are sent before the request is checked.
        await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers})
        if not await client.wait_for(self._scheduler.opened()):
            return
        try:
            requests = self._submit(parsed, client, milestones)
        except EngineFault:
            await client.hang_up()
            return
        except InvalidRequest as error:
            await write(self._error_event(error))
        else:
            try:
                while not client.left and not all(request.delivered for request in requests):
                    client.wake.clear()
                    for request in requests:
                        # A slow reader blocks this loop; meanwhile the request continues, and its next event grows.
                        while event := request.next_event(self._scheduler.weight_version):
                            await write(event)
                    if not all(request.delivered for request in requests):
                        await client.wake.wait()
            finally:
                self._abandon([request for request in requests if not request.delivered])
            if client.left:
                return
        await write(DONE)
        await write(b"", more=False)

    async def _generate(self, parsed: T, client: _ClientWatch, milestones: Sequence[Milestone]) -> Response | None:
        """Return the unstreamed response; None if the client disconnected."""
        if not await client.wait_for(self._scheduler.opened()):
            return None
        try:
            requests = self._submit(parsed, client, milestones)
        except EngineFault:
            return PlainTextResponse("Internal Server Error", status_code=500)
        except InvalidRequest as error:
            return self._error_response(error)
        try:
            while not client.left and not all(request.done for request in requests):
                client.wake.clear()
                await client.wake.wait()
        finally:
            self._abandon([request for request in requests if not request.done])
        if client.left:
            return None
        for request in requests:
            failure = self._failure_response(request)
            if failure is not None:
                return failure
        return OrjsonResponse(self._body(requests))

    def _submit(self, parsed: T, client: _ClientWatch, milestones: Sequence[Milestone]) -> list[EngineRequest]:
        requests = self._make_requests(parsed, client.wake.set)
        for request in requests:
            request.connection = client.connection
        self._scheduler.submit(requests, milestones)
        return requests

    def _abandon(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self._scheduler.client_left(request)

    @property
    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        if self._config.rust:
            return [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        return [(b"content-type", b"text/event-stream; charset=utf-8")]


class _ClientWatch:
    """Detects a client's disconnect. ``wake`` is set by it, and by requests with new events."""

    def __init__(self, receive: Receive, scope: Scope) -> None:
        self.connection = connection_of(scope)
        self._transport: asyncio.Transport | None = scope.get("state", {}).get("transport")
        self.wake = asyncio.Event()
        self._gone = asyncio.create_task(self._listen(receive))
        self._gone.add_done_callback(lambda _task: self.wake.set())

    @staticmethod
    async def _listen(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    @property
    def left(self) -> bool:
        return self._gone.done()

    async def wait_for(self, event: Coroutine[Any, Any, object]) -> bool:
        """Wait for something, or for the disconnect; return whether the client is still connected."""
        waiting = asyncio.create_task(event)
        try:
            await asyncio.wait({waiting, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return not self.left

    async def hang_up(self) -> None:
        """Close the connection in the middle of the response."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait({self._gone})

    async def close(self) -> None:
        self._gone.cancel()
        await asyncio.wait({self._gone})
