"""ReactorSockets: TCP sockets, with and without TLS, and Unix sockets, read below the event loop. Linux only."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any

from streamfold.client.drivers.loop_reactor import LONGEST_REST, SHORTEST_REST, LoopReactor
from streamfold.client.drivers.tls import server_name, verifying

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold._core import Exchange
    from streamfold.client.drivers.sockets import Address, OnEvent, Opened
    from streamfold.client.urls import Origin

__all__ = ["ReactorSockets"]

_BACKLOG_SECONDS = 0.01


class ReactorSockets:
    """Opens connections in the reactor of the running event loop, which all users of the loop share.

    Args:
        tls: for ``https``. None: the certificates of certifi, whatever the environment says.
        shortest_rest: seconds between two sweeps of the streams, while there is something to read; at least 0.001.
        longest_rest: seconds; a sweep is followed by a rest 19 times as long, within these bounds.

    Raises:
        NotImplementedError: the system has no reactor, or the loop cannot watch descriptors.
        OSError: there are no descriptors left.
    """

    def __init__(
        self,
        tls: ssl.SSLContext | None = None,
        *,
        shortest_rest: float = SHORTEST_REST,
        longest_rest: float = LONGEST_REST,
    ) -> None:
        self._tls = tls
        self._reactor = LoopReactor.acquire(asyncio.get_running_loop(), rests=(shortest_rest, longest_rest))
        self._open: set[_Opening | _Connection] = set()
        self._is_closed = False

    def open(self, address: Address, origin: Origin, done: Opened) -> Callable[[], None]:
        """Open a connection and, for ``https``, agree on TLS. Returns what cancels."""
        if origin.scheme != "https":
            return _Opening(self._reactor, self._open, address, done).cancel
        tls = (self._tls or verifying(), server_name(origin))
        return _Opening(self._reactor, self._open, address, done, tls).cancel

    def close(self) -> None:
        """Close all connections, and give the reactor back. Idempotent. Works on a closed loop."""
        if self._is_closed:
            return
        self._is_closed = True
        for item in list(self._open):
            item.end()
        self._reactor.release()

    async def wait_closed(self) -> None:
        """After :meth:`close`: nothing is left."""


class _Opening:
    """A connection that is being opened."""

    __slots__ = ("_address", "_connection", "_done", "_handle", "_open", "_reactor", "_tls")

    def __init__(
        self,
        reactor: LoopReactor,
        opened: set[_Opening | _Connection],
        address: Address,
        done: Opened,
        tls: tuple[ssl.SSLContext, str] | None = None,
    ) -> None:
        self._reactor = reactor
        self._open = opened
        self._address = address
        self._done = done
        self._tls = tls
        self._connection: int | None = None
        self._handle: asyncio.Handle | None = None
        self._open.add(self)
        self._try()

    def _try(self) -> None:
        core, (family, host, port, scope_id) = self._reactor.core, self._address
        self._handle = None
        try:
            if family == socket.AF_UNIX:
                self._connection = core.connect_unix(host)
            else:
                self._connection = core.connect(host, port, scope_id)
        except BlockingIOError:
            # Nothing tells when the backlog of a Unix socket has room. The connect timeout ends this.
            self._handle = self._reactor.loop.call_later(_BACKLOG_SECONDS, self._try)
        except OSError as error:
            self._handle = self._reactor.loop.call_soon(self._fail, error)
        else:
            self._reactor.listen(self._connection, self._on_event)

    def cancel(self) -> None:
        """Call nobody. Idempotent."""
        if self not in self._open:
            return
        self._open.discard(self)
        if self._handle is not None:
            self._handle.cancel()
        if self._connection is not None:
            self._reactor.end(self._connection)

    end = cancel

    def _on_event(self, kind: str, detail: Any) -> None:  # noqa: ANN401  # as all handlers
        connection = self._connection
        if connection is None:
            return
        if kind == "opened" and detail:
            self._fail(OSError(detail, os.strerror(detail)))
            return
        if kind == "opened" and self._tls is not None:
            try:
                self._start_tls(connection, *self._tls)
            except Exception as error:  # noqa: BLE001  # whatever a context raises
                self._fail(_as_os_error(error))
            return
        if kind == "secured" and detail is not None:
            self._fail(_as_os_error(detail))
            return
        self._open.discard(self)
        self._done(_Connection(self._reactor, self._open, connection))

    def _start_tls(self, connection: int, context: ssl.SSLContext, name: str) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
        self._reactor.core.start_tls(connection, tls, incoming, outgoing)
        self._reactor.listen(connection, self._on_event)

    def _fail(self, error: OSError) -> None:
        self._open.discard(self)
        if self._connection is not None:
            self._reactor.end(self._connection)
        self._done(error)


class _Connection:
    """An open connection."""

    __slots__ = ("_id", "_open", "_reactor")

    def __init__(self, reactor: LoopReactor, opened: set[_Opening | _Connection], connection: int) -> None:
        self._reactor = reactor
        self._open = opened
        self._id = connection
        self._open.add(self)

    def start(self, exchange: Exchange, on_event: OnEvent) -> bool:
        """Carry an exchange. Returns False if the connection had been kept, and cannot be used any more."""
        if self._reactor.core.start(self._id, exchange):
            self._reactor.listen(self._id, on_event)
            return True
        self.end()
        return False

    def abort(self) -> None:
        """The rest of the reply is of no use: read it without a rest."""
        self._reactor.dispatch(self._reactor.core.abort(self._id))

    def urgent(self) -> None:
        """Read now what has arrived."""
        self._reactor.dispatch(self._reactor.core.read_now(self._id))

    def end(self) -> None:
        """Close the connection now. No event follows. Idempotent."""
        self._open.discard(self)
        self._reactor.end(self._id)


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(f"TLS failed: {error!r}")
