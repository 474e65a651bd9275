"""Runs an ASGI application on a real socket: in a thread of its own, or in the foreground."""

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

__all__ = ["Background", "Server", "listen"]

T = TypeVar("T")

# How long a connection has at the end for what was written to it.
CLOSING_SECONDS = 0.2
_LOGGER = logging.getLogger("streamfold.loopback")


class Server(uvicorn.Server):
    """uvicorn with an end that is prompt, and connections that are counted.

    An application finds the connection of its client, an ``asyncio.Transport``, in ``scope["state"]["transport"]``:
    HTTP has no other way to break off a response.

    Args:
        app: the application.
        sock: where it listens; closed at the end.
        lifespan: entered before the first request, left after the last.
        server_header: whether replies have the header ``server: uvicorn``.
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
        self.url = _url(sock)
        self._sock = sock
        self._lifespan = lifespan
        self._exit = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Callable[[], None] = lambda: None
        config = uvicorn.Config(
            app,
            http=self._protocol_class(),
            ws="none",
            lifespan="off",  # it is begun and ended below, where a failure is seen
            log_config=None,
            access_log=True,  # False would silence uvicorn for the whole process; the protocol below writes none
            server_header=server_header,
            timeout_keep_alive=5,
        )
        super().__init__(config)

    def _protocol_class(self) -> type[H11Protocol]:
        server = self

        class Protocol(H11Protocol):
            def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # uvicorn's own affair
                super().__init__(*args, **kwargs)
                self.logger = _LOGGER
                self.access_log = False

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
                server.connections += 1
                self.app_state = {**self.app_state, "transport": transport}
                super().connection_made(transport)

        return Protocol

    @property
    def open_connections(self) -> int:
        """How many clients are connected."""
        return len(self.server_state.connections)

    async def run_until_stopped(self, ready: Callable[[], None]) -> None:
        """Serve until :meth:`stop`; call ``ready`` when requests are taken."""
        self._loop = asyncio.get_running_loop()
        self._ready = ready
        with self._sock:
            async with self._lifespan():
                await self.serve(sockets=[self._sock])

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve as uvicorn does, without a word to its log."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        with self.capture_signals():
            await self.startup(sockets)
            await self.main_loop()
            await self.shutdown(sockets)

    def stop(self) -> None:
        """End the service, from any thread or signal handler."""
        self.should_exit = True
        self.call_soon(self._exit.set)

    def call_soon(self, call: Callable[[], object]) -> bool:
        """Have something done by the server's loop; whether there still is one."""
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
        """Take no connections any more, and end those that there are."""
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        state = self.server_state
        # Streams are cut where they are, without a last chunk; who does not read in time is cut off.
        for connection in list(state.connections):
            connection.transport.close()
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=CLOSING_SECONDS)
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # connections learn of their end
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=CLOSING_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # the signature is uvicorn's
        """Stop at a signal. uvicorn would raise it once more at the end, but here it is the way to end, no error."""
        self.stop()


class Background:
    """A server in a thread of its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streamfold-loopback", daemon=True)

    def start(self) -> None:
        """Start it; requests are taken when this returns. Raises what it died of, if it did."""
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End it: streams are cut, sockets closed, the thread joined."""
        self.server.stop()
        self._thread.join()

    def ask(self, question: Callable[[], T]) -> T:
        """Put a question to the server's loop, whose data belongs to no other thread."""
        answer: Future[T] = Future()
        if not self.server.call_soon(lambda: answer.set_result(question())):
            return question()
        return answer.result(timeout=30)

    def _run(self) -> None:
        try:
            asyncio.run(self.server.run_until_stopped(self._ready.set))
        except BaseException as failure:  # noqa: BLE001  # raised again where the caller is
            self.failure = failure
        finally:
            self._ready.set()


def listen(host: str, port: int, *, send_buffer: int | None = None) -> socket.socket:
    """Open a listening socket on an IPv4 or IPv6 address of this machine; port 0 is any free one.

    ``send_buffer`` is the size in bytes of the kernel's buffer for what is sent on each connection. Raises OSError if
    the port is taken.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=2048)
    if send_buffer is not None:
        # Connections inherit it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
