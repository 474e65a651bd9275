"""AsyncioSockets: connections over transports of the event loop. For TLS, and for loops that watch no descriptors."""

from __future__ import annotations

import asyncio
import socket
import ssl
import weakref
from functools import cache
from typing import TYPE_CHECKING

import certifi

from streamfold import _core
from streamfold.client.drivers.socket_options import set_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.client.drivers.sockets import Address, OnEvent, Opened
    from streamfold.client.urls import Origin

__all__ = ["AsyncioSockets", "rest_seconds"]

_BUFFER_BYTES = 256 << 10

# The connect timeout ends a handshake; asyncio's own limit, 60 s, must not.
_HANDSHAKE_SECONDS = 86_400.0

_REST_SHARE = 9
_SHORTEST_REST = 0.005
_LONGEST_REST = 0.05


def rest_seconds(work: float) -> float:
    """How long connections rest after reads that took ``work`` seconds: so long that reading takes a tenth of a core.

    The events of a stream add up meanwhile, and are read at once.
    """
    return min(max(_SHORTEST_REST, _REST_SHARE * work), _LONGEST_REST)


class AsyncioSockets:
    """Opens connections with the means of the running event loop.

    Args:
        tls: for ``https``. None: the certificates of certifi, whatever the environment says.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._reading = _Reading.of(self._loop)
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[_Connection]] = set()
        self._left: asyncio.Future[None] | None = None

    def open(self, address: Address, origin: Origin, done: Opened) -> Callable[[], None]:
        """Open a connection. Returns what cancels."""
        task = self._loop.create_task(self._open(address, origin))
        self._tasks.add(task)
        is_cancelled = False

        def on_done(task: asyncio.Task[_Connection]) -> None:
            self._tasks.discard(task)
            self._check_left()
            if task.cancelled():
                if not is_cancelled:  # by whoever tears the loop down
                    done(OSError("the opening of the connection was cancelled"))
                return
            error = task.exception()
            if is_cancelled:
                if error is None:
                    task.result().end()
            elif error is None:
                done(task.result())
            else:
                done(error if isinstance(error, OSError) else OSError(f"the event loop failed: {error!r}"))

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            if not (task.done() or self._loop.is_closed()):
                task.cancel()

        task.add_done_callback(on_done)
        return cancel

    def close(self) -> None:
        """Close all connections. Idempotent. Works on a closed loop."""
        for connection in list(self._connections):
            connection.end()
        if not self._loop.is_closed():
            for task in self._tasks:
                task.cancel()

    async def wait_closed(self) -> None:
        """After :meth:`close`: wait until no descriptor is left."""
        if self._loop is not asyncio.get_running_loop():
            return
        while self._tasks or self._connections:
            self._left = self._left or self._loop.create_future()
            await asyncio.shield(self._left)
        await asyncio.sleep(0)  # uvloop closes the descriptor after it has told the protocol

    def forget(self, connection: _Connection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        self._check_left()

    def _check_left(self) -> None:
        if self._left is not None and not (self._tasks or self._connections):
            self._left.set_result(None)
            self._left = None

    async def _open(self, address: Address, origin: Origin) -> _Connection:
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        reader: asyncio.Transport | None = None
        try:
            sock.settimeout(0)
            set_options(sock)
            await self._connect(sock, address)
            connection = _Connection(self._reading.buffer, self._reading.rest, sock)
            connection.owner = self
            if origin.scheme != "https":
                await self._loop.create_connection(lambda: connection, sock=sock)
            else:
                # In two steps, as only the transport below TLS stops reading from the socket when it is told to pause.
                reader, _ = await self._loop.create_connection(asyncio.Protocol, sock=sock)
                transport = await self._loop.start_tls(
                    reader,
                    connection,
                    _verifying() if self._tls is None else self._tls,
                    server_hostname=origin.host.partition("%")[0],
                    ssl_handshake_timeout=_HANDSHAKE_SECONDS,
                )
                if transport is None or reader.is_closing():
                    raise ConnectionResetError("the server closed the connection after the TLS handshake")
                connection.attach(transport, reader)
        except BaseException:
            if reader is not None:
                reader.abort()
            else:
                sock.close()
            raise
        self._connections.add(connection)
        return connection

    async def _connect(self, sock: socket.socket, address: Address) -> None:
        if address.family == socket.AF_UNIX:
            sock.connect(address.host)  # at once, or never: a full backlog is an error
        elif address.family == socket.AF_INET6:
            await self._loop.sock_connect(sock, (address.host, address.port, 0, address.scope_id))
        else:
            await self._loop.sock_connect(sock, (address.host, address.port))


class _Connection(_core.ConnectionProtocol, asyncio.BufferedProtocol):
    """One connection. What is called for each read is not Python."""

    owner: AsyncioSockets

    def start(self, exchange: _core.Exchange, on_event: OnEvent) -> bool:
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
            self.owner.forget(self)


class _Reading:
    """What all connections of an event loop read with. It lives as long as one that uses it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))  # a view, as asyncio's TLS slices it
        self.rest = _core.ReadRest(self._schedule)

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
        self._loop.call_later(rest_seconds(self.rest.work), self.rest.resume)


# By weak references on both sides: what reads refers to its loop.
_READING: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[_Reading]] = weakref.WeakKeyDictionary()


@cache  # loading the certificates takes longer than everything else
def _verifying() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not the default one, which reads environment variables
    context.load_verify_locations(cafile=certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context
