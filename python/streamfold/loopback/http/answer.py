"""One HTTP answer on its way to the client, as the faults see it: what they act on, and what they act with."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from streamfold.loopback.core.engine import Engine
    from streamfold.loopback.core.request import Milestone

__all__ = ["Answer", "Ending", "hang_up"]

Ending = Literal["rst", "fin"]


class Answer:
    """The last one that an answer goes through: it writes to the client.

    ``milestones`` are what is to befall the request inside the engine, ``pace`` the bytes of one write and the seconds
    after it, ``over`` whether nothing more may be written, ``gone`` is set when the connection is closed.
    """

    def __init__(self, engine: Engine, scope: Scope, send: Send, body: bytes) -> None:
        self.engine = engine
        self.milestones: list[Milestone] = []
        self.pace: tuple[int, float] | None = None
        self.over = False
        self.gone = asyncio.Event()
        self._transport: asyncio.Transport | None = scope.get("state", {}).get("transport")  # see serving.Server
        self._http = scope["http_version"]
        self._chunked = False
        self._send = send
        self._body: bytes | None = body

    async def receive(self) -> Message:
        """Give the request to the application, and later the client's leaving: its ``receive``."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def watch(self, receive: Receive) -> None:
        """Wait until the connection is closed."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def pause(self, seconds: float | None) -> None:
        """Wait, for ever if None, but no longer than the client does."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.gone.wait(), seconds)

    async def head(self, message: Message) -> None:
        """Write the status and the headers."""
        names = {name.lower() for name, _ in message.get("headers", ())}
        self._chunked = self._http == "1.1" and b"content-length" not in names
        await self._send(message)

    async def event(self, data: bytes) -> None:
        """Write a part of the body: an event of a stream, as a chunk of its own."""
        if self.over:  # a fault has ended it, and another one before that has more to say
            return
        if self._is_closing:
            return
        if self.pace is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        elif self._chunked:
            await self._write(b"%x\r\n%b\r\n" % (len(data), data))
        else:  # through the HTTP layer, which counts what a content length has told of
            size, pause = self.pace
            for start in range(0, len(data), size):
                part = data[start : start + size]
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
                await self.pause(pause)

    async def partial(self, data: bytes, size: int) -> None:
        """Write the first bytes of an event that was to have ``size`` bytes; nothing may come after it."""
        if self.over:
            return
        await self._write(b"%x\r\n%b" % (size, data) if self._chunked else data)

    async def end(self) -> None:
        """Write the last chunk."""
        if self.over:
            return
        self.over = True
        if self._is_closing:  # what was not written is missing, and no end can be put behind it
            await self.gone.wait()
        else:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _is_closing(self) -> bool:
        """Whether the connection is being closed, of which :attr:`gone` tells only in the loop's next round."""
        return self._transport is not None and self._transport.is_closing()

    async def hang_up(self, how: Ending) -> None:
        """Close the connection where it is; what was written before is delivered."""
        self.over = True
        transport = self.transport
        while transport.get_write_buffer_size() and not self.gone.is_set():
            await self.pause(0.002)
        hang_up(transport, how)
        await self.gone.wait()

    @property
    def transport(self) -> asyncio.Transport:
        """The connection below HTTP. Raises RuntimeError where the server is another one than ours."""
        if self._transport is None:
            msg = "this fault needs the connection itself: run the engine with Loopback or serve()"
            raise RuntimeError(msg)
        return self._transport

    async def _write(self, data: bytes) -> None:
        """Write past the HTTP layer, at the pace that is set."""
        connection = cast("H11Protocol | None", self.transport.get_protocol())
        if connection is None:  # closed, and not told of yet
            return
        size = self.pace[0] if self.pace else len(data)
        for start in range(0, len(data), size):
            await connection.flow.drain()
            if connection.transport.is_closing():
                return
            connection.transport.write(data[start : start + size])
            if self.pace:
                await self.pause(self.pace[1])


def hang_up(transport: asyncio.Transport, how: Ending) -> None:
    """Close a connection: with a reset, or in an orderly way."""
    if transport.is_closing():
        return
    if how == "fin":
        transport.close()
        return
    sock: Any = transport.get_extra_info("socket")
    # To linger for no time at all makes the system send a reset.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
