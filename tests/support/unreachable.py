"""Addresses at which nobody answers: a port that refuses, and a server that takes no more connections."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def closed_port() -> Iterator[tuple[socket.socket, str]]:
    """A port that refuses connections until somebody listens on its socket."""
    with socket.socket() as front:
        front.bind(("127.0.0.1", 0))
        yield front, f"http://127.0.0.1:{front.getsockname()[1]}"


@contextlib.contextmanager
def full_house() -> Iterator[tuple[socket.socket, str]]:
    """A server that takes no more connections: its queue is full, so a connect hangs until somebody accepts."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = server.getsockname()
        for _ in range(16):
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                guest.connect(address)
        yield server, f"http://127.0.0.1:{address[1]}"


def first_bytes(server: socket.socket) -> list[bytes]:
    """What each of the queued connections sends once it is accepted."""
    server.settimeout(0.5)
    received = []
    with contextlib.suppress(TimeoutError):
        while True:
            guest, _ = server.accept()
            with guest:
                guest.settimeout(0.2)
                try:
                    received.append(guest.recv(1000))
                except (TimeoutError, ConnectionError):
                    received.append(b"")
    return received
