"""The drivers that carry a client's requests, so that one test is a test of each.

A module that says ``EACH_DRIVER = True`` has its asynchronous tests run with each. ``Client(transport="direct")``, the
default, then uses that driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamfold.client.drivers.asyncio_sockets import AsyncioSockets
from streamfold.client.drivers.by_loop import SocketsByLoop
from streamfold.client.drivers.direct import DirectDriver
from streamfold.client.drivers.httpx_driver import HttpxDriver

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from streamfold.client.drivers.base import Driver


@dataclass(frozen=True)
class Carrier:
    """A kind of driver.

    Attributes:
        make: makes one on the running event loop.
        keeps: whether it keeps connections for the next request.
    """

    name: str
    make: Callable[[ssl.SSLContext | None], Driver]
    keeps: bool

    def __repr__(self) -> str:
        return self.name


REACTOR = Carrier("reactor", lambda context: DirectDriver(SocketsByLoop(context)), keeps=True)
ASYNCIO = Carrier("streams", lambda context: DirectDriver(AsyncioSockets(context)), keeps=True)
HTTPX = Carrier("httpx", lambda context: HttpxDriver(ssl_context=context), keeps=False)
CARRIERS = (REACTOR, ASYNCIO, HTTPX)
