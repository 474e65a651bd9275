"""Ways to reach a server in tests of the contract: each driver, over plain sockets and over TLS."""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.carriers import ASYNCIO, HTTPX, REACTOR
from support.paths import DATA
from support.replay import DONE, END, FIN, Replay, Step, events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from streamfold.client.drivers.base import Driver
    from support.carriers import Carrier

# The kinds of reports, in their order.
REFUSED = ["connected", "head", "ended"]
BEGUN = ["connected", "head", "first_token"]
ALL = [*BEGUN, "finished", "ended"]

BODY_OF_THREE = b"".join([*events(3), DONE])
STREAM_FIELDS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@dataclass(frozen=True)
class Way:
    """A driver, and whether it is asked to speak TLS."""

    carrier: Carrier
    is_tls: bool

    def replay(self, *steps: Any, **options: Any) -> Replay:
        context = None
        if self.is_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(DATA / "tls" / "cert.pem", DATA / "tls" / "key.pem")
        return Replay(*steps, tls=context, **options)

    @contextlib.asynccontextmanager
    async def driving(self) -> AsyncIterator[Driver]:
        driver = self.carrier.make(ssl.create_default_context(cafile=DATA / "tls" / "cert.pem"))
        try:
            yield driver
        finally:
            await driver.aclose()

    def __repr__(self) -> str:
        return f"{self.carrier}{'-tls' if self.is_tls else ''}"


PLAIN = tuple(Way(carrier, False) for carrier in (REACTOR, ASYNCIO, HTTPX))
WAYS = (*PLAIN, *(Way(way.carrier, True) for way in PLAIN))


def sized(body: bytes) -> list[Step]:
    return [STREAM_FIELDS + b"content-length: %d\r\n\r\n" % len(body) + body, END]


def until_close(body: bytes) -> list[Step]:
    return [STREAM_FIELDS + b"connection: close\r\n\r\n" + body, FIN]
