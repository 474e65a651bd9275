"""A router's side of its workers: where they are, how they fare, and one request to one of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Broken", "Exchange", "Refused", "Worker"]

Headers = list[tuple[bytes, bytes]]

READ_BYTES = 1 << 16


class Refused(Exception):  # no error of ours: the worker's state, on its way to whoever chooses another
    """The worker takes no connection."""


class Broken(Exception):  # as above
    """The connection ended before the response did, or what came is no HTTP."""


@dataclass
class Worker:
    """An engine behind the router, at ``http://host[:port][/path]``.

    ``requests`` counts those it was sent, ``running`` those that are under way. It is not asked before the loop's time
    has reached ``down_until``. Raises ValueError if the URL is another one.
    """

    url: str
    requests: int = 0
    running: int = 0
    down_until: float = 0.0
    host: str = field(init=False)
    port: int = field(init=False)
    authority: str = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname or parts.username is not None or parts.query or parts.fragment:
            raise ValueError(f"a worker's URL must be http://host:port, not {self.url!r}")
        self.host, self.port = parts.hostname, parts.port or 80
        self.authority, self.path = parts.netloc, parts.path


class Exchange:
    """One request to a worker on a connection of its own, and the response. Whoever began it has to close it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.status = 0
        self.headers: Headers = []
        self._http = h11.Connection(h11.CLIENT)
        self._writer: asyncio.StreamWriter | None = None
        self._closed = False
        worker.running += 1

    async def begin(self, method: str, path: str, headers: Headers, body: bytes | None = None) -> None:
        """Send the request; ``status`` and ``headers`` are there when this returns, names in lower case.

        If it does not return, the exchange is closed.

        Raises:
            Refused: nothing was sent.
            Broken: the request may have been taken.
        """
        try:
            await self._connect()
            await self._send(method, path, headers, body)
            while not isinstance(event := await self._event(), h11.Response):
                pass  # interim responses
        except BaseException:
            self.close()
            raise
        self.status = event.status_code
        self.headers = list(event.headers)

    async def read(self) -> bytes | None:
        """Give what has come of the body, at most one chunk; None at its end.

        Raises:
            Broken: the end has not come, and will not.
        """
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                return bytes(event.data)
        return None

    async def read_all(self) -> bytes:
        """Give the whole body. Raises :class:`Broken` as :meth:`read` does."""
        pieces = []
        while (piece := await self.read()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Drop the connection, wherever the response stands."""
        if self._closed:
            return
        self._closed = True
        self.worker.running -= 1
        if self._writer is not None:
            self._writer.transport.abort()

    async def _connect(self) -> None:
        try:
            self._reader, self._writer = await asyncio.open_connection(self.worker.host, self.worker.port)
        except OSError as error:
            raise Refused(str(error)) from error

    async def _send(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes | None) -> None:
        worker, writer = self.worker, self._writer
        assert writer is not None  # noqa: S101  # for the type checker: begin() has connected
        worker.requests += 1
        fields = [(b"host", worker.authority.encode()), (b"connection", b"close"), *headers]
        if body is not None:
            fields.append((b"content-length", b"%d" % len(body)))
        events = [h11.Request(method=method, target=worker.path + path, headers=fields)]
        sent = b"".join(filter(None, map(self._http.send, [*events, h11.Data(body or b""), h11.EndOfMessage()])))
        writer.write(sent)
        try:
            await writer.drain()
        except OSError as error:
            raise Broken(str(error) or type(error).__name__) from error

    async def _event(self) -> h11.Event:
        try:
            while True:
                event = self._http.next_event()
                if isinstance(event, h11.Event):
                    return event
                self._http.receive_data(await self._reader.read(READ_BYTES))
        except (OSError, h11.RemoteProtocolError) as error:
            raise Broken(str(error) or type(error).__name__) from error
