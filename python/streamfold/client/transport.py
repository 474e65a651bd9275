"""The httpx side of a request: which transport carries it, and how to close a connection without cancelling its task.

Cancelling a task while httpx connects or waits for headers loses a place in its pool, and sometimes a socket, for
good. Closing the network stream under the task does not: the task gets ``httpx.ReadError`` and httpx cleans up.
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import httpx

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

__all__ = ["Connection", "Stopped", "chosen", "fresh"]

# httpcore's steps that give a stream, whichever of its modules reports them ("connection.", "proxy.", ...).
_OPENING = ("connect_tcp", "connect_unix_socket", "start_tls")
_SENDING = "send_request_headers"


def chosen(transport: object, calls: int) -> Callable[[], httpx.AsyncBaseTransport]:
    """What gives the transport of each try: the one that was given, or with ``"httpx"`` a new one.

    Args:
        transport: a client's argument of that name.
        calls: how many calls may run at once.

    Raises:
        ValueError: it is no transport, or one in whose pool calls would wait for each other.
    """
    if transport == "httpx":
        return fresh
    if not isinstance(transport, httpx.AsyncBaseTransport):
        raise ValueError(f'transport must be "httpx" or an httpx.AsyncBaseTransport, not {transport!r}')
    _check_pool(transport, calls)
    given = transport
    return lambda: given


def fresh() -> httpx.AsyncHTTPTransport:
    """A transport of its own for a stream, or for a few small requests: it keeps no connection.

    At each step of a request httpx goes through all that its pool holds, so among thousands each has its own (which
    takes 15 us). And before the headers come httpx shows only fresh connections, so none is used twice.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncHTTPTransport(verify=_tls(), limits=limits)


@cache  # loading the certificates takes longer than all the rest
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def _check_pool(transport: httpx.AsyncBaseTransport, calls: int) -> None:
    """Refuse a pool in which calls, and the aborts that are to end them, would wait for each other."""
    pool = getattr(transport, "_pool", None) if isinstance(transport, httpx.AsyncHTTPTransport) else None
    most = getattr(pool, "_max_connections", None)
    if most is not None and most <= calls:
        raise ValueError(
            f"the transport's pool has {most} connections for {calls} calls and their aborts: make it with "
            "limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)"
        )


class Stopped(Exception):  # no error: it carries our own stop out of httpx
    """The request was stopped before its response began."""


class Connection:
    """One request's connection. :meth:`send` and :meth:`read` belong to one task, :meth:`close` to anybody.

    httpx's own transport shows the network stream. Any other is taken for blind until it shows one; a blind
    request can only be ended by cancelling the task that sends or reads.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, *, on_sent: Callable[[], None] | None = None) -> None:
        self.sent = False
        self.stopped = False
        self._transport = transport
        self._on_sent = on_sent
        self._shows = type(transport) is httpx.AsyncHTTPTransport
        self._stream: Any = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._released = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def opening(self) -> bool:
        """Whether it is connecting and there is no stream yet, so that only the connect time-out can end it."""
        return self._shows and self._task is not None and self._stream is None and not self.sent

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``; the response comes as soon as its headers are there.

        Raises:
            Stopped: :meth:`close` came first.
            httpx.TransportError: as httpx has it.
        """
        self._task = asyncio.current_task()
        request.extensions["trace"] = self._trace
        try:
            if self.stopped:
                raise Stopped
            if not self._shows:
                self._mark_sent()
            response = await self._transport.handle_async_request(request)
        except asyncio.CancelledError:
            if not self._is_own_cancel():
                raise
            raise Stopped from None
        except Exception as error:
            self._task = None
            if self.stopped:  # closing under httpx gives errors of httpcore and anyio as well as its own
                raise Stopped from error
            if isinstance(error, AttributeError) and self._stream is not None and not self.sent:
                # On uvloop: httpx asks for the socket's addresses, and one that was reset at once has no socket.
                raise httpx.ConnectError("the connection was reset as it opened") from error
            raise
        response.request = request
        if response.extensions.get("http_version") != b"HTTP/2":  # there, other requests share the stream
            self._stream = response.extensions.get("network_stream", self._stream)
        return response

    async def read(self, response: httpx.Response, take: Callable[[bytes], object]) -> None:
        """Hand the raw body to ``take`` until it ends or :meth:`close` is called; then end the response.

        Never breaks out of httpx's nested generators: their clean-up would run later, in tasks of its own.

        Raises:
            httpx.TransportError: the body broke off, and nobody had called :meth:`close`.
        """
        self._task = asyncio.current_task()
        # Not aiter_raw(), which refuses the responses that some transports make of ready content.
        body = cast("httpx.AsyncByteStream", response.stream)
        try:
            async for chunk in body:
                take(chunk)
        except asyncio.CancelledError:
            if not self._is_own_cancel():
                raise
        except Exception:
            if not self.stopped:
                raise
        finally:
            await self._release(response)

    async def _release(self, response: httpx.Response) -> None:
        """End the response. From here on the connection may be another request's, and is no longer ours to close."""
        self._released = True
        self._stream = None
        try:
            await response.aclose()
        except asyncio.CancelledError:
            if not self._is_own_cancel():
                raise
        finally:
            self._task = None

    async def close(self) -> None:
        """Stop the request, whatever it is doing: nothing is sent or received afterwards."""
        self.stopped = True
        if self._stream is not None:
            await self._stream.aclose()
        elif self._task is not None and not (self.opening or (self._released and self._shows)):
            self._cancelled = self._task.cancel()
        # else: it is connecting, and the next step that httpx shows finds the stop

    def close_soon(self) -> None:
        """Call :meth:`close` from where nothing can be awaited."""
        self.stopped = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.close())

    async def _trace(self, name: str, info: dict[str, Any]) -> None:
        module, step, state = name.rsplit(".", 2)
        if state == "failed" or step not in (*_OPENING, _SENDING):
            return
        if step in _OPENING and state == "complete":
            self._stream = info["return_value"]
        if self.stopped and not self.sent:
            if self._stream is not None:
                await self._stream.aclose()
            raise Stopped
        if step == _SENDING and state == "started":
            if module == "http2":
                self._stream = None
            self._mark_sent()

    def _mark_sent(self) -> None:
        if not self.sent:
            self.sent = True
            if self._on_sent is not None:
                self._on_sent()

    def _is_own_cancel(self) -> bool:
        """Whether the CancelledError that has just come was :meth:`close`'s doing, and may be swallowed."""
        own, self._cancelled = self._cancelled, False
        uncancel = getattr(self._task, "uncancel", None)  # 3.11
        if own and uncancel is not None:
            uncancel()
        self._task = None
        return own
