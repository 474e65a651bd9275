"""Answers with generations, streamed or whole; what is said, and when it is refused, is left to each engine's own."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from streamfold.loopback.core.reply import DONE
from streamfold.loopback.core.request_params import InvalidRequest, MalformedBody

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from starlette.types import Receive, Scope, Send

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.request import Milestone, Request
    from streamfold.loopback.core.scheduler import Scheduler

__all__ = ["MILESTONES", "Endpoint", "Json", "worker_list"]

# What is to happen to the request on its way: a key of the scope's "extensions".
MILESTONES = "streamfold.milestones"

T = TypeVar("T")


class Json(Response):
    """An answer in JSON, spelled as the engines spell."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401  # any JSON
        """Write the body."""
        return orjson.dumps(content)


class Endpoint(ABC, Generic[T]):
    """The ASGI application behind a path that generates. ``T`` is what a body asks for, once it is checked."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config

    @abstractmethod
    def _check(self, http: HttpRequest, body: bytes) -> T:
        """Read what is asked. Raises MalformedBody for what the HTTP layer refuses, before anything is sent."""

    @abstractmethod
    def _streams(self, asked: T) -> bool:
        """Say whether a stream is asked for."""

    @abstractmethod
    def _requests(self, asked: T, notify: Callable[[], None]) -> list[Request]:
        """Make the requests. Raises InvalidRequest for what the engine refuses, when a response may have begun."""

    @abstractmethod
    def _error_event(self, error: InvalidRequest) -> bytes:
        """Write the event that tells of a refusal."""

    @abstractmethod
    def _refused(self, error: InvalidRequest) -> Response:
        """Give the answer that tells of the same where nothing is streamed."""

    @abstractmethod
    def _http_refusal(self, request: Request) -> Response | None:
        """Give the answer with a status that the end of a request becomes where nothing is streamed, if it does."""

    @abstractmethod
    def _body(self, requests: list[Request]) -> object:
        """Give the body of an answer in one piece."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then answer in the way that it asks for."""
        http = HttpRequest(scope, receive)
        try:
            asked = self._check(http, await http.body())
        except ClientDisconnect:
            return
        except MalformedBody as error:
            await Json(error.answer, status_code=error.status)(scope, receive, send)
            return
        client = _Client(receive)
        milestones = scope.get("extensions", {}).get(MILESTONES, ())
        try:
            if self._streams(asked):
                await self._stream(asked, client, send, milestones)
            else:
                answer = await self._whole(asked, client, milestones)
                if answer is not None:
                    await answer(scope, receive, send)
        finally:
            await client.close()

    async def _stream(self, asked: T, client: _Client, send: Send, milestones: Sequence[Milestone]) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        # Before anything is known of the request: headers never wait.
        await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers})
        if not await client.until(self._scheduler.opened()):
            return
        try:
            requests = self._submit(asked, client, milestones)
        except InvalidRequest as error:
            await write(self._error_event(error))
        else:
            try:
                while not client.left and not all(request.told for request in requests):
                    client.wake.clear()
                    for request in requests:
                        # While a slow reader holds this up the request goes on, and its next event says more.
                        while event := request.next_event(self._scheduler.weight_version):
                            await write(event)
                    if not all(request.told for request in requests):
                        await client.wake.wait()
            finally:
                self._let_go([request for request in requests if not request.told])
            if client.left:
                return
        await write(DONE)
        await write(b"", more=False)

    async def _whole(self, asked: T, client: _Client, milestones: Sequence[Milestone]) -> Response | None:
        """Give the answer in one piece; None if nobody is there to take it."""
        if not await client.until(self._scheduler.opened()):
            return None
        try:
            requests = self._submit(asked, client, milestones)
        except InvalidRequest as error:
            return self._refused(error)
        try:
            while not client.left and not all(request.done for request in requests):
                client.wake.clear()
                await client.wake.wait()
        finally:
            self._let_go([request for request in requests if not request.done])
        if client.left:
            return None
        for request in requests:
            refusal = self._http_refusal(request)
            if refusal is not None:
                return refusal
        return Json(self._body(requests))

    def _submit(self, asked: T, client: _Client, milestones: Sequence[Milestone]) -> list[Request]:
        requests = self._requests(asked, client.wake.set)
        self._scheduler.submit(requests, milestones)
        return requests

    def _let_go(self, requests: list[Request]) -> None:
        for request in requests:
            self._scheduler.leave(request)

    @property
    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        if self._config.dialect.rust:
            return [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        return [(b"content-type", b"text/event-stream; charset=utf-8")]


def worker_list(request: HttpRequest, config: Config, scheduler: Scheduler) -> dict[str, Any]:
    """Give what a router before this engine alone, or before the engines that were configured, tells of them."""
    itself = str(request.base_url).rstrip("/") + config.base_path
    urls = (itself,) if config.workers is None else config.workers
    workers = [
        {
            "id": f"worker-{i}",
            "url": url,
            "model_id": config.model_name,
            "worker_type": "regular",
            "is_healthy": True,
            "load": scheduler.running + scheduler.waiting if url == itself else 0,
            "connection_mode": "http",
        }
        for i, url in enumerate(urls)
    ]
    return {"workers": workers, "total": len(workers), "stats": {"regular_count": len(workers)}}


class _Client:
    """Watches whether the client is still there. ``wake`` is set when it leaves, and by whoever has news for it."""

    def __init__(self, receive: Receive) -> None:
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

    async def until(self, event: Coroutine[Any, Any, object]) -> bool:
        """Wait for something, but no longer than the client does; whether it is still there."""
        waiting = asyncio.create_task(event)
        try:
            await asyncio.wait({waiting, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return not self.left

    async def close(self) -> None:
        self._gone.cancel()
        await asyncio.wait({self._gone})
