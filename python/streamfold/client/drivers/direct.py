"""DirectDriver: carries requests over sockets, on connections that are kept or opened."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamfold._core import Exchange, RequestHead
from streamfold.client.drivers.base import Failure
from streamfold.client.drivers.connector import Connector
from streamfold.client.drivers.direct_exchange import DirectExchange
from streamfold.client.drivers.idle import KEPT_SECONDS, IdlePool
from streamfold.client.drivers.pacing import RATE

if TYPE_CHECKING:
    from streamfold.client.drivers.base import HttpRequest, Listener
    from streamfold.client.drivers.connector import Opened, Opening
    from streamfold.client.drivers.descriptors import Reserve
    from streamfold.client.drivers.sockets import Sockets
    from streamfold.client.urls import Origin

__all__ = ["DirectDriver"]


class DirectDriver:
    """Carries each request on a connection that was kept after an earlier one, or on a new one.

    Args:
        sockets: opens connections. Closed with the driver.
        rate: new connections to an address, in one second.
        kept_seconds: how long a connection is kept for the next request.
        reserve: descriptors that only control requests (those whose reply is no stream) may use.
    """

    def __init__(
        self,
        sockets: Sockets,
        *,
        rate: float = RATE,
        kept_seconds: float = KEPT_SECONDS,
        reserve: Reserve | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._idle = IdlePool(self._loop, self.closed, seconds=kept_seconds)
        self._connector = Connector(self._loop, sockets, self._make_room, rate=rate, reserve=reserve)
        self._exchanges: set[DirectExchange] = set()  # those that may hold a connection
        # In the order in which they came; a connection that gets free may serve them.
        self._opening_control: dict[Origin, dict[DirectExchange, Opening]] = {}
        self._opening_calls: dict[Origin, dict[DirectExchange, Opening]] = {}
        self._head: tuple[object, RequestHead] | None = None  # the last one: most requests have the same
        self._is_closed = False

    @property
    def pipelines(self) -> bool:
        """It can send several requests in one go."""
        return True

    def start(self, request: HttpRequest, listener: Listener) -> DirectExchange:
        """Start a request. ``listener`` is not called before this returns.

        Raises:
            ValueError: a header, the path or a keyword of the parser is not valid.
            RuntimeError: the driver is closed.
        """
        if self._is_closed:
            raise RuntimeError("the driver is closed")
        head = self._head_of(request)
        if request.more:
            core = Exchange.replies(head, (request.body, *request.more), max_bytes=request.max_body_bytes)
        elif request.stream is None:
            core = Exchange.reply(head, request.body, max_bytes=request.max_body_bytes)
        else:
            core = Exchange.stream(head, request.body, **request.stream)
        exchange = DirectExchange(self, core, request, listener)
        self._exchanges.add(exchange)
        kept = None if request.fresh else self.take_kept(exchange)
        if kept is None:
            self.open(exchange)
        else:
            exchange.use_kept(kept)
            self._loop.call_soon(exchange.on_ready)
        return exchange

    def _head_of(self, request: HttpRequest) -> RequestHead:
        key = (request.method, request.target, request.origin, request.fields)
        if self._head is None or self._head[0] != key:
            head = RequestHead(request.method, request.target, request.origin.authority, request.fields)
            self._head = key, head
        return self._head[1]

    async def aclose(self) -> None:
        """End all exchanges, close all connections and the reserve, and wait until nothing is left. Idempotent."""
        self._is_closed = True
        for exchange in list(self._exchanges):
            exchange.end()
        self._idle.close()
        self._connector.close()
        self._sockets.close()
        await asyncio.sleep(0)  # a cancelled look-up ends
        await self._sockets.wait_closed()

    def abandon(self) -> None:
        """Close all connections and the reserve after the event loop was closed. Idempotent."""
        self._is_closed = True
        self._sockets.close()
        self._connector.close()

    # What exchanges ask for.

    def take_kept(self, exchange: DirectExchange) -> Opened | None:
        """A kept connection for ``exchange``, if there is one."""
        return self._idle.take(exchange.origin, is_control=exchange.is_control)

    def open(self, exchange: DirectExchange) -> None:
        """Open a connection for ``exchange``, or hand it one that gets free meanwhile."""
        openings = self._openings(exchange)

        def on_opened(result: Opened | Failure) -> None:
            self._forget(exchange)
            if isinstance(result, Failure):
                exchange.fail(result)
            else:
                exchange.use_new(result)
                exchange.on_ready()

        openings[exchange] = self._connector.open(
            exchange.origin, exchange.connect_timeout, on_opened, is_control=exchange.is_control
        )

    def cancel_opening(self, exchange: DirectExchange) -> None:
        """Stop opening a connection for ``exchange``, if one is being opened."""
        opening = self._forget(exchange)
        if opening is not None:
            opening.cancel()

    def keep(self, origin: Origin, opened: Opened) -> None:
        """A connection has become free: hand it to a request that waits for one, or keep it."""
        if self._is_closed:
            opened.connection.end()
            return
        waiting = self._waiting_for(origin, is_reserved=opened.is_reserved)
        if waiting is not None:
            self.cancel_opening(waiting)
            waiting.use_kept(opened)
            self._loop.call_soon(waiting.on_ready)
            return
        self._idle.put(origin, opened)
        if self._connector.shared.descriptors.is_waited_for:
            self._make_room()

    def discard(self, exchange: DirectExchange) -> None:
        """An exchange holds no connection any more."""
        self._exchanges.discard(exchange)

    def closed(self, opened: Opened) -> None:
        """A connection was closed. Its descriptor is free after the callbacks that are due."""
        self._connector.closed(opened)
        if not (self._is_closed or self._loop.is_closed()):
            self._loop.call_soon(self._on_freed)

    # Openings.

    def _on_freed(self) -> None:
        if not self._is_closed:
            self._connector.freed()

    def _make_room(self) -> None:
        self._idle.close_oldest()

    def _waiting_for(self, origin: Origin, *, is_reserved: bool) -> DirectExchange | None:
        """Who can use a connection to ``origin`` that gets free, control requests first."""
        if not (self._opening_control or self._opening_calls):
            return None
        groups = [self._opening_control.get(origin, {})]
        if not is_reserved:
            groups.append(self._opening_calls.get(origin, {}))
        openings = (item for group in groups for item in group.items())
        return next((exchange for exchange, opening in openings if opening.is_waiting and not exchange.is_fresh), None)

    def _openings(self, exchange: DirectExchange) -> dict[DirectExchange, Opening]:
        openings = self._opening_control if exchange.is_control else self._opening_calls
        return openings.setdefault(exchange.origin, {})

    def _forget(self, exchange: DirectExchange) -> Opening | None:
        all_openings = self._opening_control if exchange.is_control else self._opening_calls
        openings = all_openings.get(exchange.origin, {})
        opening = openings.pop(exchange, None)
        if not openings:
            all_openings.pop(exchange.origin, None)
        return opening
