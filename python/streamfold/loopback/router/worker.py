"""The router's HTTP client: a worker's address and counters, and one request to a worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Headers", "Worker", "WorkerDisconnected", "WorkerRequest", "WorkerUnreachable"]

Headers = list[tuple[bytes, bytes]]

READ_BYTES = 1 << 16


class WorkerUnreachable(Exception):  # internal: the balancer handles it
    """The worker refuses connections."""


class WorkerDisconnected(Exception):  # internal, too
    """The connection was closed before the end of the response, or the response is not valid HTTP."""


@dataclass
class Worker:
    """An engine behind the router, at ``http://host[:port][/path]``.

    Attributes:
        url: its URL, without a slash at the end.
        requests: requests that it was sent since the start.
        running: requests in progress.
        down_until: time of the event loop until which it gets no requests.

    Raises:
        ValueError: the URL has another form.
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


class WorkerRequest:
    """One request to a worker and its response, on a separate connection. The caller must close it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.status: int = 0
        self.headers: Headers = []
        self._http = h11.Connection(h11.CLIENT)
        self._writer: asyncio.StreamWriter | None = None
        self._closed = False
        worker.running += 1

    async def start(self, method: str, path: str, headers: Headers, body: bytes | None = None) -> None:
        """Send the request and read ``status`` and ``headers``; header names are in lower case.

        It is closed if this raises.

        Raises:
            WorkerUnreachable: nothing was sent.
            WorkerDisconnected: the worker may have received the request.
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
        """Return the next part of the body, at most one chunk; None at its end.

        Raises:
            WorkerDisconnected: the body is incomplete.
        """
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                return bytes(event.data)
        return None

    async def read_all(self) -> bytes:
        """Return the whole body. Raises :class:`WorkerDisconnected` as :meth:`read` does."""
        pieces = []
        while (piece := await self.read()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Close the connection, even in the middle of the response."""
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
            raise WorkerUnreachable(str(error)) from error

    async def _send(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes | None) -> None:
        worker, writer = self.worker, self._writer
        assert writer is not None  # noqa: S101  # for the type checker: start() has connected
        worker.requests += 1
        fields = [(b"host", worker.authority.encode()), (b"connection", b"close"), *headers]
        if body is not None:
            fields.append((b"content-length", b"%d" % len(body)))
        events = [h11.Request(method=method, target=worker.path + path, headers=fields)]
        data = b"".join(filter(None, map(self._http.send, [*events, h11.Data(body or b""), h11.EndOfMessage()])))
        writer.write(data)
        try:
            await writer.drain()
        except OSError as error:
            raise WorkerDisconnected(str(error) or type(error).__name__) from error

    async def _event(self) -> h11.Event:
        try:
            while True:
                event = self._http.next_event()
                if isinstance(event, h11.Event):
                    return event
                self._http.receive_data(await self._reader.read(READ_BYTES))
        except (OSError, h11.RemoteProtocolError) as error:
            raise WorkerDisconnected(str(error) or type(error).__name__) from error
