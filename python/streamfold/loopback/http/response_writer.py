"""Writes one HTTP response chunk by chunk: pauses, partial chunks, and a reset or closed connection in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from streamfold.loopback.core.request import Milestone

__all__ = ["ConnectionEnd", "ResponseWriter", "close_connection"]

ConnectionEnd = Literal["rst", "fin"]


class ResponseWriter:
    """Writes a response to the client, behind all faults.

    Attributes:
        milestones: what is done to the request inside the engine, at certain token counts.
        pace: bytes of one write, and seconds of the pause after it; None: no limit.
        over: whether nothing more may be written.
        gone: set when the connection is closed.
    """

    def __init__(self, scope: Scope, send: Send, body: bytes) -> None:
        self.milestones: list[Milestone] = []
        self.pace: tuple[int, float] | None = None
        self.over: bool = False
        self.gone: asyncio.Event = asyncio.Event()
        self._transport: asyncio.Transport | None = scope.get("state", {}).get("transport")  # see serving.HttpServer
        self._http = scope["http_version"]
        self._chunked = False
        self._send = send
        self._request_body: bytes | None = body

    async def receive(self) -> Message:
        """Return the request to the application, and later the client's disconnect: its ASGI ``receive``."""
        if self._request_body is not None:
            body, self._request_body = self._request_body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def watch(self, receive: Receive) -> None:
        """Wait until the connection is closed."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def pause(self, seconds: float | None) -> None:
        """Wait for ``seconds`` (None: no limit), at most until the client disconnects."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.gone.wait(), seconds)

    async def head(self, message: Message) -> None:
        """Write the status and the headers."""
        names = {name.lower() for name, _ in message.get("headers", ())}
        self._chunked = self._http == "1.1" and b"content-length" not in names
        await self._send(message)

    async def event(self, data: bytes) -> None:
        """Write a part of the body: an event of a stream, as one chunk."""
        if self.over:  # ended by one fault, while an earlier one still writes
            return
        if self._is_closing:
            return
        if self.pace is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        elif self._chunked:
            await self._write(b"%x\r\n%b\r\n" % (len(data), data))
        else:  # through uvicorn, which checks the content length
            size, pause = self.pace
            for start in range(0, len(data), size):
                part = data[start : start + size]
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
                await self.pause(pause)

    async def partial(self, data: bytes, size: int) -> None:
        """Write the first bytes of an event of ``size`` bytes; nothing can be written after it."""
        if self.over:
            return
        await self._write(b"%x\r\n%b" % (size, data) if self._chunked else data)

    async def end(self) -> None:
        """Write the last chunk."""
        if self.over:
            return
        self.over = True
        if self._is_closing:  # data is missing, so the body must not be terminated
            await self.gone.wait()
        else:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _is_closing(self) -> bool:
        """Whether the connection is being closed; :attr:`gone` is set one iteration of the event loop later."""
        return self._transport is not None and self._transport.is_closing()

    async def disconnect(self, how: ConnectionEnd) -> None:
        """Close the connection in the middle of the response; what was written before is delivered."""
        self.over = True
        transport = self.transport
        while transport.get_write_buffer_size() and not self.gone.is_set():
            await self.pause(0.002)
        close_connection(transport, how)
        await self.gone.wait()

    @property
    def transport(self) -> asyncio.Transport:
        """The connection below HTTP.

        Raises:
            RuntimeError: the application runs in another server than Loopback's.
        """
        if self._transport is None:
            msg = "this fault needs the connection itself: run the engine with Loopback or serve()"
            raise RuntimeError(msg)
        return self._transport

    async def _write(self, data: bytes) -> None:
        """Write below uvicorn, at the configured pace."""
        connection = cast("H11Protocol | None", self.transport.get_protocol())
        if connection is None:  # closed, but not reported yet
            return
        size = self.pace[0] if self.pace else len(data)
        for start in range(0, len(data), size):
            await connection.flow.drain()
            if connection.transport.is_closing():
                return
            connection.transport.write(data[start : start + size])
            if self.pace:
                await self.pause(self.pace[1])


def close_connection(transport: asyncio.Transport, how: ConnectionEnd) -> None:
    """Close a connection with a reset ("rst") or an orderly close ("fin")."""
    if transport.is_closing():
        return
    if how == "fin":
        transport.close()
        return
    sock: Any = transport.get_extra_info("socket")
    # With a linger time of 0 the kernel sends a reset.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
