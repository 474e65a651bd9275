"""aiohttp, tuned by hand: bytes instead of lines, split where events end, nothing decoded but JSON."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from benches.clients.base import Reading, StreamClient
from benches.clients.lists import Lists

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from benches.clients.base import Target

_TLS_SECONDS: Final = 0.25  # aiohttp does not wait until its TLS connections are closed, and advises this pause


class AiohttpOrjson(StreamClient):
    """One ``aiohttp.ClientSession`` for all streams."""

    _session: aiohttp.ClientSession

    def __init__(self, target: Target, *, loads: Callable[[bytes], Any] = orjson.loads) -> None:
        super().__init__(target)
        self._loads = loads

    async def __aenter__(self) -> Self:
        context = self.target.tls()
        connector = aiohttp.TCPConnector(
            limit=0, force_close=not self.target.keep_alive, ssl=context if context is not None else False
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=1 << 20,
            headers={"Content-Type": "application/json"},
        )
        return self

    async def read(self, rid: str, tokens: int) -> Reading:
        """Ask, and read what is there."""
        lists, loads = Lists(self.target), self._loads
        body = orjson.dumps(self.target.payload(rid, tokens))
        async with self._session.post(self.target.endpoint, data=body) as response:
            response.raise_for_status()
            rest = b""
            async for read in response.content.iter_any():
                *events, rest = (rest + read).split(b"\n\n")
                for event in events:
                    if event != b"data: [DONE]":
                        lists.add(loads(event[6:]))
        return lists.reading()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()
        if self.target.tls() is not None:
            await asyncio.sleep(_TLS_SECONDS)


class AiohttpJson(AiohttpOrjson):
    """The same with the standard library's parser."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, loads=json.loads)
