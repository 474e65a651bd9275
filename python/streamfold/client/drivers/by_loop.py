"""SocketsByLoop: the reactor where there is one, elsewhere transports of the event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from streamfold.client.drivers.asyncio_sockets import AsyncioSockets
from streamfold.client.drivers.reactor import ReactorSockets

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from streamfold.client.drivers.sockets import Address, Opened, Sockets
    from streamfold.client.urls import Origin

__all__ = ["SocketsByLoop"]

_logger = logging.getLogger("streamfold")

_without_reactor: set[str] = set()  # kinds of event loops that were logged


class SocketsByLoop:
    """Opens connections in the way that suits the event loop. Bound to the running event loop.

    Args:
        ssl_context: for ``https``; None: the usual authorities.
    """

    def __init__(self, ssl_context: ssl.SSLContext | None) -> None:
        self._ssl_context = ssl_context
        self._loop = asyncio.get_running_loop()
        self._asyncio: AsyncioSockets | None = None
        self._reactor: ReactorSockets | None = None
        self._has_reactor = True

    def open(self, address: Address, origin: Origin, done: Opened) -> Callable[[], None]:
        """Open a connection. ``done`` is not called before this returns. Returns what cancels."""
        try:
            sockets = self._sockets()
        except OSError as error:  # no descriptor is left for the reactor itself
            return self._loop.call_soon(done, error).cancel
        return sockets.open(address, origin, done)

    def close(self) -> None:
        """Close all connections. Idempotent. Works on a closed loop."""
        for sockets in (self._reactor, self._asyncio):
            if sockets is not None:
                sockets.close()

    async def wait_closed(self) -> None:
        """After :meth:`close`: wait until no descriptor is left."""
        for sockets in (self._reactor, self._asyncio):
            if sockets is not None:
                await sockets.wait_closed()

    def _sockets(self) -> Sockets:
        if self._has_reactor:
            if self._reactor is not None:
                return self._reactor
            try:
                self._reactor = ReactorSockets(self._ssl_context)
            except NotImplementedError as error:
                self._has_reactor = False
                _log_once(self._loop, error)
            else:
                return self._reactor
        if self._asyncio is None:
            self._asyncio = AsyncioSockets(self._ssl_context)
        return self._asyncio


def _log_once(loop: asyncio.AbstractEventLoop, error: NotImplementedError) -> None:
    kind = type(loop).__name__
    if kind not in _without_reactor:
        _without_reactor.add(kind)
        _logger.info("connections use transports of %s, which costs more CPU: %s", kind, error)
