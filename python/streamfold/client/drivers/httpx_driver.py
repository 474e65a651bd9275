"""HttpxDriver: carries requests over httpx, for proxies and for transports of users."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from typing import TYPE_CHECKING

import httpx

from streamfold._core import Durations, Parser
from streamfold.client.drivers.base import Failure, Head
from streamfold.client.drivers.httpx_connection import Connection, Stopped, new_transport
from streamfold.errors import EngineError, StreamfoldError, StreamTruncated

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from streamfold._core import Generation
    from streamfold.client.drivers.base import HttpRequest, Kind, Listener

__all__ = ["HttpxDriver", "check_pool"]

# After the terminal event the body is read to its end: closing the socket would look like a client that disconnected.
_REST_BYTES = 1 << 16

_NETWORK_ERRORS = (httpx.TransportError, OSError)  # httpx lets some TLS errors through, as may other transports


class HttpxDriver:
    """Carries each request in a task of its own.

    Args:
        transport: carries all requests, and is closed with the driver. None: a new one for each stream, as httpx scans
            its whole pool at each step of a request, and one for all other requests.
        ssl_context: for new transports. None: the certificates that httpx trusts.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._given = transport
        self._ssl_context = ssl_context
        self._shared = transport
        self._exchanges: set[HttpxExchange] = set()

    @property
    def pipelines(self) -> bool:
        """No: httpx sends one request after the other."""
        return False

    def start(self, request: HttpRequest, listener: Listener) -> HttpxExchange:
        """Start a request."""
        exchange = HttpxExchange(self._transport_for(request), request, listener)
        self._exchanges.add(exchange)
        exchange.task.add_done_callback(lambda _: self._exchanges.discard(exchange))
        return exchange

    def _transport_for(self, request: HttpRequest) -> httpx.AsyncBaseTransport:
        if self._given is not None:
            return self._given
        socket_path = request.origin.host if request.origin.scheme == "http+unix" else None
        if request.stream is not None or socket_path is not None:
            return new_transport(socket_path=socket_path, ssl_context=self._ssl_context)
        if self._shared is None:
            self._shared = new_transport(ssl_context=self._ssl_context)
        return self._shared

    async def aclose(self) -> None:
        """Close all connections, and wait until nothing is left."""
        for exchange in list(self._exchanges):
            exchange.end()
        while self._exchanges:
            await asyncio.wait({exchange.task for exchange in self._exchanges})
        shared, self._shared = self._shared, self._given
        if shared is not None:
            await shared.aclose()

    def abandon(self) -> None:
        """Nothing can be closed without the event loop: its sockets go when they are collected."""


def check_pool(transport: httpx.AsyncBaseTransport, calls: int) -> None:
    """Check that a user's transport has room for all calls, so that they and their aborts do not wait for each other.

    Raises:
        ValueError: its pool has no more connections than ``calls``.
    """
    pool = getattr(transport, "_pool", None) if isinstance(transport, httpx.AsyncHTTPTransport) else None
    size = getattr(pool, "_max_connections", None)
    if size is not None and size <= calls:
        raise ValueError(
            f"the transport's pool has {size} connections for {calls} calls and their aborts: create it with "
            "limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)"
        )


class HttpxExchange:
    """One request and its reply.

    Attributes:
        first_token_at, last_token_at: by ``time.monotonic()``; infinite before.
        is_stream: whether a stream is expected.
        task: sends and reads. It is never cancelled, except by :class:`Connection`.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, request: HttpRequest, listener: Listener) -> None:
        self.first_token_at: float = math.inf
        self.last_token_at: float = math.inf
        self._listener: Listener = listener
        self.is_stream: bool = request.stream is not None
        self._connection = Connection(transport, on_ready=self._on_ready)
        self._may_send = False
        self._parser = Parser(**(request.stream or {"dialect": "sglang"}))  # unused if the reply is no stream
        self._gaps = Durations()
        self._reads = 0  # that brought tokens
        self._noticed = 0  # tokens
        self._notify_at = math.inf  # tokens
        self._taken = False
        self._is_rest = False  # what follows is no part of the generation
        self._rest_bytes = 0
        self._parser_failed = False
        self._aborted = False
        self._finished = False
        self._body = bytearray()
        self._max_body_bytes = request.max_body_bytes
        self._unwanted = False  # nothing but the end is reported any more
        self._ended = False
        self.task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._run(request))
        self.task.add_done_callback(self._after_task)

    # The handle.

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        return self._parser.token_count

    def gaps(self) -> tuple[Durations, int]:
        """The times between the tokens so far, and how many reads brought them."""
        return self._gaps, self._reads

    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens received so far, int32 ``[n]``. Not after :meth:`take`."""
        return self._parser.token_ids()

    def snapshot(self) -> Generation:
        """A copy of what the stream has brought so far. Not after :meth:`take`."""
        return self._parser.snapshot()

    def notify_at(self, count: int) -> bool:
        """Report ``tokens`` once, when so many have come. Returns whether they have come already."""
        is_there = self._parser.token_count >= count
        self._notify_at = math.inf if is_there else count
        return is_there

    @property
    def passed(self) -> int:
        """None: it sends single requests."""
        return 0

    def send(self) -> None:
        """Let the request leave."""
        self._may_send = True

    def abort(self) -> None:
        """Keep what still arrives, and report no truncation."""
        self._aborted = True

    def end(self) -> None:
        """Close the connection."""
        self._unwanted = True
        if not self._ended:
            self._connection.close_soon()

    def urgent(self) -> None:
        """Nothing: the event loop reads as soon as it can."""

    def take(self) -> Generation:
        """Return what the stream has brought."""
        self._taken = True
        return self._parser.take()

    def take_body(self) -> bytes:
        """Return the body of a reply that is no stream."""
        return bytes(self._body[: self._max_body_bytes])

    # The task.

    async def _run(self, request: HttpRequest) -> None:
        try:
            await self._exchange(request)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001  # of any type: the transport may be the user's
            self._report("failed", _failure(error))
        if self._connection.stopped:
            await self._connection.wait_closed()

    def _after_task(self, task: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:  # the event loop is torn down
            self._report("failed", Failure(f"the request was interrupted: {error!r}", retryable=False, cause=error))
        self._report("ended", None)

    def _report(self, kind: Kind, detail: object) -> None:
        if self._ended or (self._unwanted and kind != "ended"):
            return
        listener = self._listener
        if kind == "ended":
            self._ended, self._listener = True, _ignore  # no circle of references is left
        listener(kind, detail)

    async def _exchange(self, request: HttpRequest) -> None:
        sent = httpx.Request(
            request.method,
            _url(request),
            headers=httpx.Headers([(name.encode(), value.encode("latin-1")) for name, value in request.fields]),
            content=request.body if request.method == "POST" else None,
            extensions={"timeout": {"connect": request.connect_timeout}},
        )
        del request  # its body is not held while the reply is read
        response = await self._connection.send(sent)
        del sent
        streams = self.is_stream and _is_stream(response)
        headers = {} if streams else {name.lower(): value for name, value in response.headers.multi_items()}
        self._report("head", Head(response.status_code, streams, headers))
        if streams:
            await self._read_stream(response)
        elif self.is_stream:
            with contextlib.suppress(Exception):  # an incomplete body is enough for a message
                await self._connection.read(response, self._keep)
        else:
            await self._connection.read(response, self._keep)
            if len(self._body) > self._max_body_bytes:
                raise EngineError(f"the body is larger than {self._max_body_bytes} bytes")

    def _on_ready(self) -> None:
        """Called right before the request is sent: nothing is awaited from here to its first byte.

        Raises:
            Stopped: :meth:`send` was not called.
        """
        self._report("connected", None)
        if not self._may_send or self._connection.stopped:
            raise Stopped

    def _keep(self, chunk: bytes) -> None:
        self._body += chunk
        if len(self._body) > self._max_body_bytes:
            self._connection.close_soon()

    async def _read_stream(self, response: httpx.Response) -> None:
        read_error: Exception | None = None
        try:
            await self._connection.read(response, self._feed)
        except Exception as error:  # noqa: BLE001  # reported below, unless the terminal event was received
            read_error = error
        if self._is_rest and not self._finished and (read_error is not None or self._rest_bytes > _REST_BYTES):
            # The engine may be working on: after an error of its own, only the end of the body says that it is not.
            self._report("failed", _failure(read_error or EngineError("the body goes on behind the last event")))
        if self._parser_failed or self._taken:
            return
        try:
            self._parser.close(aborted=self._aborted or self._connection.stopped)
        except StreamTruncated as error:
            if read_error is not None and not isinstance(read_error, _NETWORK_ERRORS):
                raise read_error from None
            error.__cause__ = read_error
            self._report("error", error)
        except StreamfoldError as error:
            self._report("error", error)
        else:
            self._notice()

    def _feed(self, chunk: bytes) -> None:
        """Parse the next bytes of the body."""
        if self._is_rest:
            self._rest_bytes += len(chunk)
            if self._rest_bytes > _REST_BYTES:
                self._connection.close_soon()
        if self._parser_failed or self._taken:
            return
        try:
            new_tokens = self._parser.feed(chunk)
        except StreamfoldError as error:
            self._parser_failed = True
            self._notice()
            self._is_rest |= isinstance(error, EngineError)  # its last word
            self._report("error", error)
            return
        if new_tokens or (self._parser.finished and not self._finished):
            self._notice()

    def _notice(self) -> None:
        """Report what the parser has found since it was last looked at."""
        if new := self._parser.token_count - self._noticed:
            now = time.monotonic()
            if self._reads:
                self._gaps.add((now - self.last_token_at) / new, new)
            self._noticed += new
            self._reads += 1
            self.last_token_at = now
            if self.first_token_at == math.inf:
                self.first_token_at = self.last_token_at
                self._report("first_token", None)
        if self._parser.token_count >= self._notify_at:
            self._notify_at = math.inf
            self._report("tokens", None)
        if self._parser.finished and not self._finished:
            self._finished = True
            self._is_rest = not self._parser.overrun
            self._report("overrun" if self._parser.overrun else "finished", None)


def _ignore(kind: Kind, detail: object) -> None:
    del kind, detail


def _url(request: HttpRequest) -> str:
    if request.origin.scheme == "http+unix":
        return f"http://{request.origin.authority}{request.target}"
    return request.url


def _is_stream(response: httpx.Response) -> bool:
    """Whether the body may go to the parser: status 200, plain ``text/event-stream``."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = response.headers.get("content-encoding", "").strip().lower()
    return response.status_code == 200 and kind == "text/event-stream" and encoding in ("", "identity")


def _failure(error: Exception) -> Failure:
    is_known = isinstance(error, (*_NETWORK_ERRORS, StreamfoldError))
    return Failure(
        (str(error) or type(error).__name__) if is_known else repr(error),
        retryable=_is_transient(error),
        timed_out=isinstance(error, httpx.ConnectTimeout),
        is_unconnected=isinstance(error, (httpx.ConnectTimeout, httpx.ConnectError)),
        cause=error,
    )


def _is_transient(error: Exception) -> bool:
    """Whether a request that failed like this before its response headers is worth a retry."""
    if not isinstance(error, _NETWORK_ERRORS) or isinstance(
        error, (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
    ):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return False
        cause = cause.__cause__ or cause.__context__
    return True
