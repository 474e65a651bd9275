"""Connection: one request over httpx, and how to close it without cancelling its task.

Cancelling a task while httpx connects or waits for headers leaks a slot of httpx's pool, sometimes a socket. Closing
the network stream under the task does not: the task gets ``httpx.ReadError`` and httpx cleans up.
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import httpx

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

__all__ = ["Connection", "Stopped", "new_transport", "tls_context"]

# Steps of httpcore's trace that return a stream, under any module prefix ("connection.", "proxy.", ...).
_CONNECT_STEPS = ("connect_tcp", "connect_unix_socket", "start_tls")
_SEND_STEP = "send_request_headers"


def new_transport(
    *, socket_path: str | None = None, ssl_context: ssl.SSLContext | None = None
) -> httpx.AsyncHTTPTransport:
    """A transport for one stream, or for a few small requests, that keeps no connections.

    Creating one costs 15 us. Before the headers httpx shows only new connections, so none is used twice.

    Args:
        socket_path: of a Unix socket to connect to.
        ssl_context: None: the certificates that httpx trusts.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncHTTPTransport(verify=ssl_context or tls_context(), limits=limits, uds=socket_path)


@cache  # loading the certificates takes longer than everything else
def tls_context() -> ssl.SSLContext:
    """The certificates that httpx trusts, whatever the environment says."""
    return httpx.create_ssl_context(trust_env=False)


class Stopped(Exception):  # no error: it carries our own stop out of httpx
    """The request was stopped before its response headers were received."""


class Connection:
    """One request's connection. One task calls :meth:`send` and :meth:`read`; any task may call :meth:`close`.

    httpx's own transport shows its network stream. Other transports may not: then a request can only be ended by
    cancelling the task that sends or reads.

    Args:
        transport: carries the request.
        on_ready: called right before the request is sent. It may raise :class:`Stopped`.

    Attributes:
        connected: whether the network stream was shown, or the request has left.
        sent: whether the request has left.
        stopped: whether :meth:`close` was called.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        *,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self.connected: bool = False
        self.sent: bool = False
        self.stopped: bool = False
        self._transport = transport
        self._on_ready = on_ready
        self._shows_stream = type(transport) is httpx.AsyncHTTPTransport
        self._stream: Any = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._released = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def connecting(self) -> bool:
        """Whether the connection is being opened and has no stream yet: only the connect timeout can end it."""
        return self._shows_stream and self._task is not None and not self.connected

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` and return the response as soon as its headers were received.

        Raises:
            Stopped: :meth:`close` was called before.
            httpx.TransportError: from httpx.
        """
        self._task = asyncio.current_task()
        request.extensions["trace"] = self._trace
        try:
            if self.stopped:
                raise Stopped
            if not self._shows_stream:
                self._mark_sent()
            response = await self._transport.handle_async_request(request)
        except asyncio.CancelledError:
            if not self._is_own_cancel():
                raise
            raise Stopped from None
        except Exception as error:
            self._task = None
            if (substitute := self._substitute(error)) is not None:
                raise substitute from error
            raise
        if response.extensions.get("http_version") != b"HTTP/2":  # there, other requests share the stream
            self._stream = response.extensions.get("network_stream", self._stream)
        return response

    def _substitute(self, error: Exception) -> Exception | None:
        """The error to raise in place of what httpx raised; None: the same."""
        if self.stopped:  # closing the stream under httpx raises errors of httpcore and anyio as well as its own
            return Stopped()
        if isinstance(error, AttributeError) and self._stream is not None and not self.sent:
            # On uvloop httpx reads the socket's addresses, and a connection that was reset at once has no socket.
            return httpx.ConnectError("the connection was reset as it opened")
        return None

    async def read(self, response: httpx.Response, take: Callable[[bytes], object]) -> None:
        """Pass the raw body to ``take`` until it ends or :meth:`close` is called, then close the response.

        Never breaks out of httpx's nested generators: their cleanup would run later, in other tasks.

        Raises:
            httpx.TransportError: the body was interrupted, and not by :meth:`close`.
        """
        self._task = asyncio.current_task()
        # Not aiter_raw(), which refuses the responses that some transports build from complete content.
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
        """Close the response. From here on the connection may serve another request, and must not be closed."""
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
        """Stop the request in any state: nothing is sent or received afterwards."""
        self.stopped = True
        if self._stream is not None:
            await self._stream.aclose()
        elif self._task is not None and not (self.connecting or (self._released and self._shows_stream)):
            self._cancelled = self._task.cancel()
        # else: it is connecting, and _trace stops it at the next step

    def close_soon(self) -> None:
        """Call :meth:`close` from synchronous code."""
        self.stopped = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.close())
            self._closing.add_done_callback(self._after_closing)

    def _after_closing(self, closing: asyncio.Task[None]) -> None:
        if closing.cancelled():  # as the event loop is torn down; it may not have made its first step
            self._closing = None
            self.close_soon()

    async def wait_closed(self) -> None:
        """Wait until what :meth:`close_soon` started is done."""
        while self._closing is not None and not self._closing.done():
            await asyncio.wait({self._closing})

    async def _trace(self, name: str, info: dict[str, Any]) -> None:
        module, step, state = name.rsplit(".", 2)
        if state == "failed" or step not in (*_CONNECT_STEPS, _SEND_STEP):
            return
        if step in _CONNECT_STEPS and state == "complete":
            self._stream = info["return_value"]
            self.connected = True
        if self.stopped and not self.sent:
            if self._stream is not None:
                await self._stream.aclose()
            raise Stopped
        if step == _SEND_STEP and state == "started":
            if module == "http2":
                self._stream = None
            self._mark_sent()

    def _mark_sent(self) -> None:
        if not self.sent:
            self.connected = self.sent = True
            if self._on_ready is not None:
                self._on_ready()

    def _is_own_cancel(self) -> bool:
        """Whether :meth:`close` caused the CancelledError that was just caught, so that it may be swallowed."""
        own, self._cancelled = self._cancelled, False
        uncancel = getattr(self._task, "uncancel", None)  # 3.11
        if own and uncancel is not None:
            uncancel()
        self._task = None
        return own
