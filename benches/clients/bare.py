"""The least that asyncio can do: a ``BufferedProtocol`` that drops the bytes. A floor, not a client."""

from __future__ import annotations

import asyncio
from typing import Final, cast
from urllib.parse import urlsplit

import orjson

from benches.clients.base import PATHS, Reading, StreamClient, Target

_BUFFER: Final = memoryview(bytearray(256 * 1024))  # of all streams: what it holds is never looked at


class Bare(StreamClient):
    """Sends a request and counts bytes until the server closes."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        if target.keep_alive:
            raise ValueError("the bare client does not know where a response ends: keep_alive must be False")
        address = urlsplit(target.url)
        assert address.hostname is not None
        assert address.port is not None
        self._host, self._port = address.hostname, address.port
        self._context = target.tls()

    async def read(self, rid: str, tokens: int) -> Reading:
        """Ask, and drop the response."""
        loop = asyncio.get_running_loop()
        body = orjson.dumps(self.target.payload(rid, tokens))
        head = (
            f"POST {PATHS[self.target.engine]} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body
        _, protocol = await loop.create_connection(
            lambda: _Drop(request, loop.create_future()), self._host, self._port, ssl=self._context
        )
        return Reading(None, None, await protocol.ended)


class _Drop(asyncio.BufferedProtocol):
    def __init__(self, request: bytes, ended: asyncio.Future[int]) -> None:
        self.ended = ended
        self._request = request
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._size += nbytes

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.ended.set_result(self._size)
        else:
            self.ended.set_exception(exc)
