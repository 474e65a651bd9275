"""Sockets: what opens connections and moves their bytes. The contract of the layers below DirectDriver."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from streamfold._core import Exchange
    from streamfold.client.urls import Origin

__all__ = ["Address", "Connection", "OnEvent", "Opened", "Sockets"]


class Address(NamedTuple):
    """Where a socket connects to.

    Attributes:
        family: ``AF_INET``, ``AF_INET6`` or ``AF_UNIX``.
        host: a literal address without brackets and zone, or the path of a Unix socket.
        port: 0 for a Unix socket.
        scope_id: the zone of an IPv6 address, as the index of its interface; 0 for none.
    """

    family: int
    host: str
    port: int
    scope_id: int = 0


OnEvent = Callable[[str, Any], None]
"""Gets the events of an exchange, as ``_core`` reports them: the kind and its detail."""


class Connection(Protocol):
    """An open connection. It carries one exchange at a time."""

    def start(self, exchange: Exchange, on_event: OnEvent) -> bool:
        """Carry an exchange: its request leaves at once.

        ``on_event`` is not called before this returns.

        Returns:
            False if the connection had been kept, and shows a byte or its end: then it is closed, and nothing was sent.
        """

    def abort(self) -> None:
        """The rest of the reply is of no use: read it without a rest, report nothing that goes wrong with it."""

    def urgent(self) -> None:
        """Read now what has arrived."""

    def end(self) -> None:
        """Close the connection now. No event follows. Idempotent."""


Opened = Callable[[Connection | OSError], None]
"""Gets the connection, or why there is none: ``ssl.SSLCertVerificationError`` is an ``OSError`` as well."""


class Sockets(Protocol):
    """Opens connections. Bound to one event loop."""

    def open(self, address: Address, origin: Origin, done: Opened) -> Callable[[], None]:
        """Open a connection and, for ``https``, agree on TLS. ``done`` is not called before this returns.

        Returns:
            What cancels: ``done`` is not called afterwards. Idempotent.
        """

    def close(self) -> None:
        """Close all connections. Idempotent. Works on a closed loop."""

    async def wait_closed(self) -> None:
        """After :meth:`close`: wait until no descriptor is left."""
