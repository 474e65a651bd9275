"""The engine on a real socket: in the background for tests and demos, in the foreground for the command line."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamfold.loopback.core.config import Config
from streamfold.loopback.core.engine import Engine, SeenRequest
from streamfold.loopback.core.undisturbed import undisturbed
from streamfold.loopback.faults.injector import Injector
from streamfold.loopback.http.answer import hang_up
from streamfold.loopback.http.app import create_app
from streamfold.loopback.http.serving import Background, Server, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from streamfold.loopback.core.reply import Reply
    from streamfold.loopback.faults.script import Faults
    from streamfold.loopback.http.answer import Ending

__all__ = ["Loopback", "Stats", "serve"]


@dataclass(frozen=True)
class Stats:
    """What an engine has seen up to now. ``aborts`` and ``leavers`` are ids, the last ``keep_requests`` of them.

    ``aborts`` are those that clients asked for, ``"*"`` for all; ``leavers`` those whose client left before the end,
    as the engine tells them (vLLM's Python frontend: ``generate-tokens-`` and what the client has sent).
    """

    running: int
    waiting: int
    requests: int
    tokens: int
    aborts: tuple[str, ...]
    leavers: tuple[str, ...]
    connections: int
    open_connections: int


class _Server(Server):
    """The server of one engine: it can stop to listen for a time, and die."""

    def __init__(self, engine: Engine, host: str, port: int) -> None:
        config = engine.config
        self.engine = engine
        self._listening = True
        self._return: asyncio.Task[None] | None = None
        super().__init__(
            create_app(engine),
            listen(host, port, send_buffer=config.send_buffer),
            lifespan=engine.scheduler.lifespan,
            server_header=not config.dialect.rust,
        )
        engine.listener = self

    def stop_listening(self, seconds: float | None) -> None:
        """Refuse connects for so many seconds, or for good; whoever asks last decides."""
        if self._listening:
            self._listening = False
            # A connection that is being taken in needs its server for one more turn of the loop.
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
        # While an address is bound and nobody listens, connects are refused, and nobody else can take it.
        self._sock = socket.socket(self._sock.family)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.engine.config.send_buffer is not None:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.engine.config.send_buffer)
        self._sock.bind(address)

    async def _listen_again(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.startup([self._sock])
        self._listening = True

    def die(self, seconds: float | None, how: Ending) -> None:
        """Have the worker die: no listening for so many seconds, no connection left, no request left."""
        self.stop_listening(seconds)
        self.engine.scheduler.die()
        for connection in list(self.server_state.connections):
            hang_up(connection.transport, how)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End it, whether it listens or not."""
        if self._return is not None:
            self._return.cancel()
            await asyncio.wait({self._return})
        await super().shutdown(sockets)
        self._sock.close()


class Loopback:
    """An engine in a box, running in a thread of its own while the ``with`` block does.

    ::

        with Loopback(token_rate=50, incremental=True) as engine:
            httpx.post(f"{engine.url}/generate", json={"text": " a story", "stream": False})

    With ``engine="vllm"`` it is vLLM's ``/inference/v1/generate``. Takes a :class:`Config`, or its fields by name;
    ``host`` is 127.0.0.1 or ::1, ``port`` 0 any free one.
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
        self._background: Background | None = None

    def __enter__(self) -> Self:
        """Start it; requests are taken when this returns."""
        self._server = _Server(Engine(self.config), self._host, self._port)
        self._background = Background(self._server)
        self._background.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """End it: streams are cut, sockets closed, the thread joined. Raises what the engine died of, if it did."""
        background, server = self._running
        background.stop()
        failure = background.failure or server.engine.scheduler.failure
        if failure is not None:
            raise failure

    @property
    def url(self) -> str:
        """Where it is, base path included."""
        _, server = self._running
        return server.url + self.config.base_path

    def stats(self) -> Stats:
        """Count, in one moment of the engine's loop; after the end: what it came to."""
        background, server = self._running
        return background.ask(lambda: _stats(server))

    @property
    def faults(self) -> Injector:
        """The faults at work: ``done`` counts them by kind. Set it to a script, or to None for no more of them."""
        _, server = self._running
        return server.engine.faults

    @faults.setter
    def faults(self, faults: Faults | None) -> None:
        if faults is not None:
            faults.check(self.config.engine, incremental=self.config.incremental)
        background, server = self._running
        injector = Injector(faults, self.config.engine)
        background.ask(lambda: setattr(server.engine, "faults", injector))

    def seen(self) -> list[SeenRequest]:
        """Give the last HTTP requests, oldest first, at most ``keep_requests``."""
        background, server = self._running
        return background.ask(lambda: list(server.engine.seen))

    def undisturbed(
        self, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
    ) -> Reply:
        """Give what one undisturbed generation is; any cut and resumed one has to equal it.

        Parameters and the ``body``'s further keys are named as on the engine's wire.
        """
        return undisturbed(self.config, input_ids, sampling_params, **body)

    @property
    def _running(self) -> tuple[Background, _Server]:
        if self._background is None or self._server is None:
            msg = "the engine runs only inside the with block"
            raise RuntimeError(msg)
        return self._background, self._server


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
    server = _Server(Engine(config), host, port)
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
