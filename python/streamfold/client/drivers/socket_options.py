"""Options of TCP sockets: a server that has vanished is noticed, and small requests leave at once."""

from __future__ import annotations

import socket

__all__ = ["set_options"]

# Ask an idle connection's peer after 30 s, then 3 times every 10 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPALIVE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))

# What was sent has to be acknowledged in this time.
_USER_TIMEOUT_MS = 30_000


def set_options(sock: socket.socket) -> None:
    """Set them, as far as the system knows them; none on a Unix socket."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _USER_TIMEOUT_MS)):
        option: int | None = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
