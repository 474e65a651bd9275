"""httpx's text lines and json: what most rollout code does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx

from benches.clients.base import Reading, StreamClient, Target
from benches.clients.lists import Lists

if TYPE_CHECKING:
    from types import TracebackType


class HttpxLines(StreamClient):
    """One ``httpx.AsyncClient`` for all streams."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None if target.keep_alive else 0)
        context = target.tls()
        verify = context if context is not None else False
        self._client = httpx.AsyncClient(timeout=None, trust_env=False, limits=limits, verify=verify)

    async def read(self, rid: str, tokens: int) -> Reading:
        """Ask, and read line by line."""
        lists = Lists(self.target)
        payload = self.target.payload(rid, tokens)
        async with self._client.stream("POST", self.target.endpoint, json=payload) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data:") and line != "data: [DONE]":
                    lists.add(json.loads(line[5:]))
        return lists.reading()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()
