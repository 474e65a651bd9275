"""The loopback engine on a real socket: ``Loopback`` in a background thread, ``serve`` in the foreground."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamfold.loopback.app import create_app
from streamfold.loopback.core.config import Config
from streamfold.loopback.core.tokenizer import MockTokenizer
from streamfold.loopback.engine import Engine, SeenRequest, undisturbed
from streamfold.loopback.faults.injector import Injector
from streamfold.loopback.http.response_writer import close_connection
from streamfold.loopback.http.serving import HttpServer, ServerThread, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from streamfold.loopback.core.reply import Reply
    from streamfold.loopback.faults.script import Faults
    from streamfold.loopback.http.response_writer import ConnectionEnd

__all__ = ["Loopback", "Stats", "serve"]


@dataclass(frozen=True)
class Stats:
    """Counters of one engine.

    Attributes:
        running: requests in the batch.
        waiting: requests in the queue.
        requests: requests accepted since the start.
        tokens: tokens generated since the start.
        aborts: ids that clients aborted, ``"*"`` for all; the last ``keep_requests`` of them.
        leavers: ids of requests whose client disconnected early, as the engine reports them (vLLM's Python frontend:
            ``generate-tokens-`` and the client's id); the last ``keep_requests`` of them.
        connections: connections accepted since the start.
        open_connections: connections that are open now.
    """

    running: int
    waiting: int
    requests: int
    tokens: int
    aborts: tuple[str, ...]
    leavers: tuple[str, ...]
    connections: int
    open_connections: int


class _EngineServer(HttpServer):
    """The server of one engine; faults make it refuse connections or die."""

    def __init__(self, engine: Engine, host: str, port: int) -> None:
        config = engine.config
        self.engine = engine
        self._listening = True
        self._return: asyncio.Task[None] | None = None
        super().__init__(
            create_app(engine),
            listen(host, port, send_buffer=config.send_buffer),
            lifespan=engine.scheduler.lifespan,
            server_header=not config.rust,
        )
        engine.listener = self

    def stop_listening(self, seconds: float | None) -> None:
        """Refuse new connections for ``seconds`` (None: until the server stops); the last call counts."""
        if self._listening:
            self._listening = False
            # A connection that is being accepted needs its listener for one more iteration of the loop.
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock)
            loop.call_soon(self._close_listeners)
        if self._return is not None:
            self._return.cancel()
        self._return = None if seconds is None else asyncio.create_task(self._listen_again(seconds))

    def _close_listeners(self) -> None:
        address = self._sock.getsockname()
        for server in self.servers:
            server.close()
        self._sock.close()
        # An address that is bound without listening refuses connections, and stays reserved.
        self._sock = socket.socket(self._sock.family)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.engine.config.send_buffer is not None:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.engine.config.send_buffer)
        self._sock.bind(address)

    async def _listen_again(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.startup([self._sock])
        self._listening = True

    def die(self, seconds: float | None, how: ConnectionEnd) -> None:
        """Refuse new connections, close all connections and lose all requests."""
        self.stop_listening(seconds)
        self.engine.scheduler.lose_all()
        for connection in list(self.server_state.connections):
            close_connection(connection.transport, how)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, whether it listens or not."""
        if self._return is not None:
            self._return.cancel()
            await asyncio.wait({self._return})
        await super().shutdown(sockets)
        self._sock.close()


class Loopback:
    """A loopback engine that runs in a background thread during the ``with`` block.

    ::

        with Loopback(token_rate=50, incremental=True) as engine:
            httpx.post(f"{engine.url}/generate", json={"text": " a story", "stream": False})

    With ``engine="vllm"`` it emulates vLLM: ``/inference/v1/generate``.

    Args:
        config: all settings; or give the fields of :class:`Config` by name.
        host: 127.0.0.1 or ::1.
        port: 0 is any free port.
        **options: fields of :class:`Config`.

    Raises:
        TypeError: both a Config and fields were given.
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        **options: Any,  # noqa: ANN401  # the fields of Config
    ) -> None:
        if config is not None and options:
            msg = "give a Config or its fields by name, not both"
            raise TypeError(msg)
        self.config: Config = Config(**options) if config is None else config
        self._host, self._port = host, port
        self._server: _EngineServer | None = None
        self._thread: ServerThread | None = None

    def __enter__(self) -> Self:
        """Start the engine; requests are accepted when this returns. Raises OSError if the port is in use."""
        self._server = _EngineServer(Engine(self.config), self._host, self._port)
        self._thread = ServerThread(self._server)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop the engine: interrupt streams, close sockets, join the thread. Raises an earlier error."""
        thread, server = self._running
        thread.stop()
        failure = thread.failure or server.engine.scheduler.failure
        if failure is not None:
            raise failure

    @property
    def tokenizer(self) -> MockTokenizer:
        """The mock model's tokenizer.

        Raises:
            TypeError: the engine runs a model of a directory, whose own tokenizer is ``config.tokenizer``.
        """
        if not isinstance(self.config.tokenizer, MockTokenizer):
            msg = "this engine runs a model of a directory: its tokenizer is config.tokenizer"
            raise TypeError(msg)
        return self.config.tokenizer

    @property
    def url(self) -> str:
        """Its URL, base path included."""
        _, server = self._running
        return server.url + self.config.base_path

    def stats(self) -> Stats:
        """Return the counters, all from one moment; after the ``with`` block the final ones."""
        thread, server = self._running
        return thread.call(lambda: _stats(server))

    @property
    def faults(self) -> Injector:
        """The active faults: ``done`` counts them by kind. Set it to a ``Faults``, or to None to disable them."""
        _, server = self._running
        return server.engine.faults

    @faults.setter
    def faults(self, faults: Faults | None) -> None:
        if faults is not None:
            faults.check(self.config.engine, incremental=self.config.incremental)
        thread, server = self._running
        injector = Injector(faults, self.config.engine)
        thread.call(lambda: setattr(server.engine, "faults", injector))

    def seen(self) -> list[SeenRequest]:
        """Return the last HTTP requests, oldest first, at most ``keep_requests``."""
        thread, server = self._running
        return thread.call(lambda: list(server.engine.seen))

    def undisturbed(
        self, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
    ) -> Reply:
        """Generate without HTTP, clock or faults; see :func:`streamfold.loopback.undisturbed`."""
        return undisturbed(self.config, input_ids, sampling_params, **body)

    @property
    def _running(self) -> tuple[ServerThread, _EngineServer]:
        if self._thread is None or self._server is None:
            msg = "the engine runs only inside the with block"
            raise RuntimeError(msg)
        return self._thread, self._server


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    on_ready: Callable[[str], None] = lambda _url: None,
    **options: Any,  # noqa: ANN401  # the fields of Config
) -> None:
    """Run an engine in the main thread until Ctrl-C or SIGTERM: ``streamfold serve``.

    Args:
        host: address to listen on.
        port: port to listen on; 0 is any free port.
        on_ready: called with the URL when requests are accepted.
        **options: fields of :class:`Config`.

    Raises:
        OSError: the port is in use.
        ValueError: a setting is out of range.
    """
    config = Config(**options)
    server = _EngineServer(Engine(config), host, port)
    url = server.url + config.base_path
    asyncio.run(server.run_until_stopped(lambda: on_ready(url)))


def _stats(server: _EngineServer) -> Stats:
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
