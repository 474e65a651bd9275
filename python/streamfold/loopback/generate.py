"""``/generate``: the answer to one request, streamed or whole."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from streamfold.loopback.params import InvalidRequest, MalformedBody, bad_request, check_body
from streamfold.loopback.wire import DONE, error_event, error_frame

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive, Scope, Send

    from streamfold.loopback.request import Request
    from streamfold.loopback.scheduler import Scheduler

__all__ = ["Generate", "Json"]


class Json(Response):
    """An answer in JSON, spelled as the engine spells."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401  # any JSON
        """Write the body."""
        return orjson.dumps(content)


class Generate:
    """The ASGI application behind ``/generate``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then answer in the way that it asks for."""
        try:
            body = check_body(orjson.loads(await HttpRequest(scope, receive).body()), self._config)
        except ClientDisconnect:
            return
        except orjson.JSONDecodeError as error:
            refusal = bad_request(self._config, f"the body is not JSON: {error}")
            await Json(refusal, status_code=400)(scope, receive, send)
            return
        except MalformedBody as error:
            await Json(error.answer, status_code=400)(scope, receive, send)
            return
        client = _Client(receive)
        try:
            if body.get("stream"):
                await self._stream(body, client, send)
            else:
                answer = await self._whole(body, client)
                if answer is not None:
                    await answer(scope, receive, send)
        finally:
            await client.close()

    async def _stream(self, body: dict[str, Any], client: _Client, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        # Before anything is known of the request: headers never wait.
        await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers})
        if not await client.until(self._scheduler.opened()):
            return
        try:
            requests = self._scheduler.submit(body, client.wake.set)
        except InvalidRequest as error:
            await write(error_event(self._config.dialect, str(error)))
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

    async def _whole(self, body: dict[str, Any], client: _Client) -> Response | None:
        """Give the answer in one piece; None if nobody is there to take it."""
        if not await client.until(self._scheduler.opened()):
            return None
        try:
            requests = self._scheduler.submit(body, client.wake.set)
        except InvalidRequest as error:
            return Json(error_frame(self._config.dialect, str(error)), status_code=400)
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
        answers = [request.body(self._scheduler.weight_version) for request in requests]
        return Json(answers if requests[0].ask.index is not None else answers[0])

    def _http_refusal(self, request: Request) -> Response | None:
        """Give the HTTP status that an end with a status becomes where the answer has not begun."""
        if request.refusal is None:
            return None
        status, message = request.refusal
        if status not in {500, 503} and self._config.dialect.release < (0, 5, 23):
            return None
        if self._config.dialect.rust:
            return Json(error_frame(self._config.dialect, message, status), status_code=status)
        told = {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
        return Json(told, status_code=status)

    def _let_go(self, requests: list[Request]) -> None:
        for request in requests:
            self._scheduler.leave(request)

    @property
    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        if self._config.dialect.rust:
            return [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        return [(b"content-type", b"text/event-stream; charset=utf-8")]


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
