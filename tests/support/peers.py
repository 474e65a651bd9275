"""Peers for the tests of drivers: a certificate, a server in a thread of its own, and a driver over asyncio."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING

from streamfold.client.drivers.asyncio_sockets import AsyncioSockets
from streamfold.client.drivers.direct import DirectDriver
from support.paths import DATA

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(DATA / "tls" / "cert.pem", DATA / "tls" / "key.pem")
    return context


def trusting() -> ssl.SSLContext:
    """What trusts that certificate."""
    return ssl.create_default_context(cafile=DATA / "tls" / "cert.pem")


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None], *, tls: bool = False, times: int = 1) -> Iterator[str]:
    """A server of one connection after another, in a thread of its own: it goes on while the test's loop is blocked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for _ in range(times):
                with contextlib.suppress(OSError), listener.accept()[0] as accepted:
                    if tls:
                        with server_tls().wrap_socket(accepted, server_side=True) as wrapped:
                            serve(wrapped)
                    else:
                        serve(accepted)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    thread.join()


def read_head(peer: socket.socket) -> bytes:
    """Read up to the end of the head; returns what came of the body."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += peer.recv(65536)
    return received.partition(b"\r\n\r\n")[2]


@contextlib.asynccontextmanager
async def driving() -> AsyncIterator[DirectDriver]:
    """A driver over transports of asyncio, which trusts the tests' certificate."""
    driver = DirectDriver(AsyncioSockets(trusting()))
    try:
        yield driver
    finally:
        await driver.aclose()
