"""Serve an ASGI application on a real socket with uvicorn: in a background thread, or in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from types import FrameType

    from starlette.types import ASGIApp

__all__ = ["HttpServer", "ServerThread", "listen"]

T = TypeVar("T")

# Timeout at shutdown for data that was written but not sent.
CLOSING_SECONDS = 0.2
_logger = logging.getLogger("streamfold.loopback")


class HttpServer(uvicorn.Server):
    """uvicorn with a prompt shutdown and a count of connections.

    The application finds the client's connection, an ``asyncio.Transport``, in ``scope["state"]["transport"]``: ASGI
    has no other way to interrupt a response.

    Args:
        app: the application.
        sock: listening socket; closed at the end.
        lifespan: context that is open while requests are served.
        server_header: whether responses have the header ``server: uvicorn``.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        lifespan: Callable[[], AbstractAsyncContextManager[object]] = contextlib.nullcontext,
        server_header: bool = True,
    ) -> None:
        self.connections = 0
        self.url: str = _url(sock)
        self._sock = sock
        self._lifespan = lifespan
        self._exit = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Callable[[], None] = lambda: None
        config = uvicorn.Config(
            app,
            http=self._protocol_class(),
            ws="none",
            lifespan="off",  # run_until_stopped enters it, where a failure is raised
            log_config=None,
            access_log=True,  # False disables it for the whole process; the protocol below does so for this server
            server_header=server_header,
            timeout_keep_alive=5,
        )
        super().__init__(config)

    def _protocol_class(self) -> type[H11Protocol]:
        server = self

        class Protocol(H11Protocol):
            def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # passed through to uvicorn
                super().__init__(*args, **kwargs)
                self.logger = _logger
                self.access_log = False

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
                server.connections += 1
                self.app_state = {**self.app_state, "transport": transport}
                super().connection_made(transport)

        return Protocol

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return len(self.server_state.connections)

    async def run_until_stopped(self, ready: Callable[[], None]) -> None:
        """Serve until :meth:`stop`; call ``ready`` when requests are accepted."""
        self._loop = asyncio.get_running_loop()
        self._ready = ready
        with self._sock:
            async with self._lifespan():
                await self.serve(sockets=[self._sock])

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve as uvicorn does, without its log messages."""
        self.config.load()
        self.lifespan: Any = self.config.lifespan_class(self.config)  # uvicorn's, untyped
        with self.capture_signals():
            await self.startup(sockets)
            await self.main_loop()
            await self.shutdown(sockets)

    def stop(self) -> None:
        """Stop serving; may be called from any thread or signal handler."""
        self.should_exit = True
        self.call_soon(self._exit.set)

    def call_soon(self, call: Callable[[], object]) -> bool:
        """Run ``call`` in the server's event loop; return False if the loop is closed."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # it is closed
            return False
        return True

    async def main_loop(self) -> None:
        """Wait for :meth:`stop`."""
        ended = await self.on_tick(0)
        self._ready()
        while not ended:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._exit.wait(), timeout=1)
            ended = await self.on_tick(0)  # which also renews the date header

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and close all connections."""
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        state = self.server_state
        # Streams are interrupted without a last chunk; clients that do not read in time are reset.
        for connection in list(state.connections):
            connection.transport.close()
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=CLOSING_SECONDS)
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # let the connections notice that they are closed
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=CLOSING_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # the signature is uvicorn's
        """Stop at a signal. Unlike uvicorn, do not raise the signal again: it is the normal way to stop."""
        self.stop()


class ServerThread:
    """Runs a server in a background thread."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streamfold-loopback", daemon=True)

    def start(self) -> None:
        """Start the thread; requests are accepted when this returns. Raises the error if the server cannot start."""
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Stop the server: interrupt streams, close sockets, join the thread."""
        self.server.stop()
        self._thread.join()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the server's event loop, whose data no other thread may touch; return its result."""
        result: Future[T] = Future()
        if not self.server.call_soon(lambda: result.set_result(function())):
            return function()
        return result.result(timeout=30)

    def _run(self) -> None:
        try:
            asyncio.run(self.server.run_until_stopped(self._ready.set))
        except BaseException as failure:  # noqa: BLE001  # raised again by start() and by the owner
            self.failure = failure
        finally:
            self._ready.set()


def listen(host: str, port: int, *, send_buffer: int | None = None) -> socket.socket:
    """Open a listening socket on an IPv4 or IPv6 address of this machine; port 0 is any free port.

    ``send_buffer`` is the kernel's send buffer of each connection, in bytes.

    Raises:
        OSError: the port is in use.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=2048)
    # Inherited by each connection. asyncio sets it only for sockets that were made with the protocol's number.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if send_buffer is not None:
        # Accepted connections inherit it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
