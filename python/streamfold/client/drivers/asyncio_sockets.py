"""AsyncioSockets: connections over transports of the event loop. For TLS, and for loops that watch no descriptors."""

from __future__ import annotations

import asyncio
import socket
import weakref
from typing import TYPE_CHECKING

from streamfold._core import ConnectionProtocol, ReadRest
from streamfold.client.drivers.socket_options import set_options
from streamfold.client.drivers.tls import server_name, verifying

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from streamfold._core import Exchange
    from streamfold.client.drivers.sockets import Address, OnEvent, Opened
    from streamfold.client.urls import Origin

__all__ = ["AsyncioSockets"]

_BUFFER_BYTES = 256 << 10

# The connect timeout ends a handshake; asyncio's own limit, 60 s, must not.
_HANDSHAKE_SECONDS = 86_400.0

_SHORTEST_REST = 0.005
_LONGEST_REST = 0.05


class AsyncioSockets:
    """Opens connections with the means of the running event loop.

    Args:
        tls: for ``https``. None: the certificates of certifi, whatever the environment says.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.tls = tls
        self.reading: _Reading = _Reading.of(self.loop)
        self.connections: set[_Connection] = set()
        self.openings: set[_Opening] = set()
        self._left: asyncio.Future[None] | None = None

    def open(self, address: Address, origin: Origin, done: Opened) -> Callable[[], None]:
        """Open a connection. Returns what cancels."""
        return _Opening(self, address, origin, done).cancel

    def close(self) -> None:
        """Close all connections. Idempotent. Works on a closed loop."""
        for connection in list(self.connections):
            connection.end()
        for opening in list(self.openings):
            opening.cancel()

    async def wait_closed(self) -> None:
        """After :meth:`close`: wait until no descriptor is left."""
        if self.loop is not asyncio.get_running_loop():
            return
        while self.openings or self.connections:
            self._left = self._left or self.loop.create_future()
            await asyncio.shield(self._left)
        await asyncio.sleep(0)  # uvloop closes the descriptor after it has told the protocol

    def check_left(self) -> None:
        """Something is closed."""
        if self._left is not None and not (self.openings or self.connections):
            self._left.set_result(None)
            self._left = None


class _Opening:
    """A connection that is being opened, in a task of its own."""

    def __init__(self, owner: AsyncioSockets, address: Address, origin: Origin, done: Opened) -> None:
        self._owner = owner
        self._loop = owner.loop
        self._address = address
        self._origin = origin
        self._done = done
        self._reader: asyncio.Transport | None = None  # during the TLS handshake
        self._is_cancelled = False
        self._task = self._loop.create_task(self._open())
        self._task.add_done_callback(self._on_done)
        owner.openings.add(self)

    def cancel(self) -> None:
        """Call nobody. Idempotent."""
        self._is_cancelled = True
        if self._loop.is_closed():
            self._owner.openings.discard(self)
        elif self._reader is not None:
            self._reader.abort()  # ends the handshake; a cancelled one leaves a transport that nobody closes (3.10)
        elif not self._task.done():
            self._task.cancel()

    def _on_done(self, task: asyncio.Task[_Connection]) -> None:
        self._owner.openings.discard(self)
        # Cancelled not by us: by whoever tears the loop down.
        error = OSError("the opening of the connection was cancelled") if task.cancelled() else task.exception()
        if error is None:
            connection = task.result()
            if self._is_cancelled:
                connection.end()
            else:
                self._done(connection)
        elif not self._is_cancelled:
            self._done(error if isinstance(error, OSError) else OSError(f"the event loop failed: {error!r}"))
        self._owner.check_left()

    async def _open(self) -> _Connection:
        sock = socket.socket(self._address.family, socket.SOCK_STREAM)
        transport: asyncio.Transport | None = None
        try:
            sock.settimeout(0)
            set_options(sock)
            await self._connect(sock)
            connection = _Connection(self._owner.reading.buffer, self._owner.reading.rest, sock)
            connection.owner = self._owner
            if self._origin.scheme != "https":
                await self._loop.create_connection(lambda: connection, sock=sock)
            else:
                # In two steps, as only the transport below TLS stops reading from the socket when it is told to pause.
                self._reader, _ = await self._loop.create_connection(asyncio.Protocol, sock=sock)
                transport = await self._loop.start_tls(
                    self._reader,
                    connection,
                    verifying() if self._owner.tls is None else self._owner.tls,
                    server_hostname=server_name(self._origin),
                    ssl_handshake_timeout=_HANDSHAKE_SECONDS,
                )
                if transport is None or self._reader.is_closing():
                    raise ConnectionResetError("the server closed the connection in the TLS handshake")
                connection.attach(transport, self._reader)
        except BaseException:
            for opened in (transport, self._reader):
                if opened is not None:
                    opened.abort()
            if self._reader is None:
                sock.close()
            raise
        finally:
            self._reader = None
        self._owner.connections.add(connection)
        return connection

    async def _connect(self, sock: socket.socket) -> None:
        family, host, port, scope_id = self._address
        if family == socket.AF_UNIX:
            sock.connect(host)  # at once, or never: a full backlog is an error
        elif family == socket.AF_INET6:
            await self._loop.sock_connect(sock, (host, port, 0, scope_id))
        else:
            await self._loop.sock_connect(sock, (host, port))


class _Connection(ConnectionProtocol, asyncio.BufferedProtocol):
    """One connection. What is called for each read is not Python."""

    owner: AsyncioSockets

    def start(self, exchange: Exchange, on_event: OnEvent) -> bool:
        """Carry an exchange. Returns False if the connection had been kept, and cannot be used any more."""
        events = self.begin(exchange, on_event)
        for event in events or ():
            asyncio.get_running_loop().call_soon(on_event, *event)
        return events is not None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the transport, once."""
        try:
            super().connection_lost(exc)
        finally:
            self.owner.connections.discard(self)
            self.owner.check_left()


class _Reading:
    """What all connections of an event loop read with. It lives as long as one that uses it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.buffer: memoryview = memoryview(bytearray(_BUFFER_BYTES))  # a view, as asyncio's TLS slices it
        self.rest: ReadRest = ReadRest(self._schedule, _SHORTEST_REST, _LONGEST_REST)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Reading:
        """The one of ``loop``."""
        known = _READING.get(loop)
        reading = None if known is None else known()
        if reading is None:
            reading = cls(loop)
            _READING[loop] = weakref.ref(reading)
        return reading

    def _schedule(self) -> None:
        # After the other connections that this turn of the loop found readable.
        self._loop.call_soon(self._begin_rest)

    def _begin_rest(self) -> None:
        self._loop.call_later(self.rest.seconds, self.rest.resume)


# By weak references on both sides: what reads refers to its loop.
_READING: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[_Reading]] = weakref.WeakKeyDictionary()
