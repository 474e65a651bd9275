"""This package: one ``Client``, and a real ``Call`` for each stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benches.clients.base import Reading, StreamClient, Target
from streamfold import Client, Limits, Timeouts
from streamfold.client.drivers.asyncio_sockets import AsyncioSockets
from streamfold.client.drivers.direct import DirectDriver

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from streamfold import Call
    from streamfold.client.drivers.base import Driver


class Product(StreamClient):
    """With default settings, but for a limit on calls and a timeout that the largest loads need.

    Args:
        target: where requests go.
        new_driver: makes what carries them; None: what the package takes by default.
    """

    def __init__(self, target: Target, *, new_driver: Callable[[], Driver] | None = None) -> None:
        super().__init__(target)
        self.client = Client(
            target.url,
            engine=target.engine,
            limits=Limits(calls=8192),
            timeouts=Timeouts(connect=60.0),
            ssl_context=target.tls(),
        )
        if new_driver is not None:
            self.client._new_driver = new_driver  # noqa: SLF001  # no setting: only measurements choose

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


class ProductOnAsyncio(Product):
    """The same over transports of asyncio, as for TLS and where there is no reactor."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, new_driver=lambda: DirectDriver(AsyncioSockets(target.tls())))
