"""This package: one ``Client``, and a real ``Call`` for each stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from benches.clients.base import Reading, StreamClient, Target
from streamfold import Client, Limits, Timeouts

if TYPE_CHECKING:
    from types import TracebackType

    from streamfold import Call


class Product(StreamClient):
    """With default settings, but for a limit on calls and a timeout that the largest loads need."""

    def __init__(self, target: Target, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(target)
        context = target.tls()
        if context is not None:  # a private authority needs a transport of its own
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(verify=context, limits=limits)
        self.client = Client(
            target.url,
            engine=target.engine,
            limits=Limits(calls=8192),
            timeouts=Timeouts(connect=60.0),
            transport="httpx" if transport is None else transport,
        )

    def start(self, rid: str, tokens: int) -> Call:
        """Start a call."""
        return self.client.start(self.target.prompt, self.target.params(tokens), rid=rid)

    async def read(self, rid: str, tokens: int) -> Reading:
        """Start a call, and await it."""
        generation = await self.start(rid, tokens)
        assert generation.finish_reason == "length"
        return Reading(generation.token_ids, generation.logprobs)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.client.aclose()
