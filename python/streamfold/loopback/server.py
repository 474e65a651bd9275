"""Runs the engine on a real socket: in the background for tests and demos, in the foreground for the command line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from streamfold.loopback.app import Engine, SeenRequest, create_app
from streamfold.loopback.config import Config
from streamfold.loopback.request import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from typing_extensions import Self

    from streamfold.loopback.wire import Reply

__all__ = ["Loopback", "Stats", "serve"]

T = TypeVar("T")

# How long a connection has at the end for what was written to it.
CLOSING_SECONDS = 0.2
_LOGGER = logging.getLogger("streamfold.loopback")


@dataclass(frozen=True)
class Stats:
    """What an engine has seen up to now. ``aborts`` and ``leavers`` are rids, the last ``keep_requests`` of them.

    ``aborts`` are those that clients asked for, ``"*"`` for all; ``leavers`` those whose client left before the end.
    """

    running: int
    waiting: int
    requests: int
    tokens: int
    aborts: tuple[str, ...]
    leavers: tuple[str, ...]
    connections: int
    open_connections: int


class _Server(uvicorn.Server):
    """uvicorn with an end that is prompt, and connections that are counted."""

    def __init__(self, engine: Engine, sock: socket.socket) -> None:
        self.connections = 0
        self.engine = engine
        self.url = _url(sock)
        self._sock = sock
        self._exit = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Callable[[], None] = lambda: None
        config = uvicorn.Config(
            create_app(engine),
            http=self._protocol_class(),
            ws="none",
            lifespan="off",  # it is begun and ended below, where a failure is seen
            log_config=None,
            access_log=True,  # False would silence uvicorn for the whole process; the protocol below writes none
            server_header=not engine.config.dialect.rust,
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
                super().connection_made(transport)

        return Protocol

    @property
    def open_connections(self) -> int:
        return len(self.server_state.connections)

    async def run_until_stopped(self, ready: Callable[[], None]) -> None:
        """Serve until :meth:`stop`; call ``ready`` when requests are taken."""
        self._loop = asyncio.get_running_loop()
        self._ready = ready
        with self._sock:
            async with self.engine.scheduler.lifespan():
                await self.serve(sockets=[self._sock])

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        # As uvicorn does, without a word to its log.
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
        ended = await self.on_tick(0)
        self._ready()
        while not ended:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._exit.wait(), timeout=1)
            ended = await self.on_tick(0)  # which also renews the date header

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
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
        # uvicorn would raise the signal once more at the end: here Ctrl-C is the way to end it, not an error.
        self.stop()


class Loopback:
    """An engine in a box, running in a thread of its own while the ``with`` block does.

    ::

        with Loopback(token_rate=50, incremental=True) as engine:
            httpx.post(f"{engine.url}/generate", json={"text": " a story", "stream": False})

    Takes a :class:`Config`, or its fields by name; ``host`` is 127.0.0.1 or ::1, ``port`` 0 any free one.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        **options: Any,  # noqa: ANN401  # those of Config, each with its own type
    ) -> None:
        if config is not None and options:
            msg = "give a Config or its fields by name, not both"
            raise TypeError(msg)
        self.config = Config(**options) if config is None else config
        self.tokenizer = self.config.tokenizer
        self._host, self._port = host, port
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        """Start it; requests are taken when this returns."""
        self._failure = None
        server = _Server(Engine(self.config), _listen(self._host, self._port, self.config))
        ready = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._run, args=(server, ready), name="streamfold-loopback", daemon=True)
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_exception: object) -> None:
        """End it: streams are cut, sockets closed, the thread joined. Raises what the engine died of, if it did."""
        server = self._running_server
        server.stop()
        if self._thread is not None:
            self._thread.join()
        failure = self._failure or server.engine.scheduler.failure
        if failure is not None:
            raise failure

    def _run(self, server: _Server, ready: threading.Event) -> None:
        try:
            asyncio.run(server.run_until_stopped(ready.set))
        except BaseException as failure:  # noqa: BLE001  # raised again where the caller is
            self._failure = failure
        finally:
            ready.set()

    @property
    def url(self) -> str:
        """Where it is, base path included."""
        return self._running_server.url + self.config.base_path

    def stats(self) -> Stats:
        """Count, in one moment of the engine's loop; after the end: what it came to."""
        server = self._running_server
        return self._ask(lambda: _stats(server))

    def seen(self) -> list[SeenRequest]:
        """Give the last HTTP requests, oldest first, at most ``keep_requests``."""
        server = self._running_server
        return self._ask(lambda: list(server.engine.seen))

    def undisturbed(
        self, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
    ) -> Reply:
        """Give what one undisturbed generation is; any cut and resumed one has to equal it."""
        return undisturbed(self.config, input_ids, sampling_params, **body)

    @property
    def _running_server(self) -> _Server:
        if self._server is None:
            msg = "the engine runs only inside the with block"
            raise RuntimeError(msg)
        return self._server

    def _ask(self, question: Callable[[], T]) -> T:
        """Put a question to the engine's loop, whose data belongs to no other thread."""
        answer: Future[T] = Future()
        if not self._running_server.call_soon(lambda: answer.set_result(question())):
            return question()
        return answer.result(timeout=30)


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    on_ready: Callable[[str], None] = lambda _url: None,
    **options: Any,  # noqa: ANN401  # those of Config, each with its own type
) -> None:
    """Run an engine until Ctrl-C or SIGTERM, in the main thread. ``options`` are the fields of :class:`Config`.

    ``on_ready`` gets the URL when requests are taken. Raises OSError if the port is taken.
    """
    config = Config(**options)
    server = _Server(Engine(config), _listen(host, port, config))
    url = server.url + config.base_path
    asyncio.run(server.run_until_stopped(lambda: on_ready(url)))


def _stats(server: _Server) -> Stats:
    scheduler = server.engine.scheduler
    return Stats(
        running=scheduler.running,
        waiting=scheduler.waiting,
        requests=scheduler.requests,
        tokens=scheduler.tokens,
        aborts=tuple(scheduler.aborts),
        leavers=tuple(scheduler.leavers),
        connections=server.connections,
        open_connections=server.open_connections,
    )


def _listen(host: str, port: int, config: Config) -> socket.socket:
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=2048)
    if config.send_buffer is not None:
        # Connections inherit it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer)
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
