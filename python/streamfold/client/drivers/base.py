"""Driver: carries requests to servers, and their replies to the parser. The contract of all transports.

A driver reports what changes, to one listener for each request, and nothing for an event of a stream, unless it was
asked for by :meth:`Exchange.notify_at`. In this order:

| kind | what happened | detail |
| --- | --- | --- |
| ``connected`` | the request can leave: call :meth:`Exchange.send` | None |
| ``head`` | the status and headers were received | :class:`Head` |
| ``first_token`` | the stream brought its first token | None |
| ``tokens`` | as many tokens have come as :meth:`Exchange.notify_at` asked for, once | None |
| ``finished`` | the terminal event was received; the rest of the body follows | None |
| ``overrun`` | the stream went on far past ``max_new_tokens``, and is read no further | None |
| ``error`` | the stream is damaged or truncated, or the engine reported an error in it | a ``StreamfoldError`` |
| ``failed`` | there is no usable reply | :class:`Failure` |
| ``ended`` | nothing more is sent or read; always the last, exactly once | None |

``connected`` is repeated if the server had closed a kept connection before the request left, and another one is open:
the caller looks once more whether it may leave.

After ``ended`` the connection is kept for the next request, or stays open until :meth:`Exchange.end`: an abort request
has to reach the engine before it sees the connection close.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from streamfold._core import Durations, Generation
    from streamfold.client.urls import Origin

__all__ = ["Driver", "Exchange", "Failure", "Fields", "Head", "HttpRequest", "Kind", "Listener"]

Kind = Literal["connected", "head", "first_token", "tokens", "finished", "overrun", "error", "failed", "ended"]
Listener = Callable[[Kind, Any], None]
Fields = tuple[tuple[str, str], ...]  # names and values of headers


class HttpRequest(NamedTuple):
    """One request.

    Attributes:
        origin: the server.
        method: a GET has no body.
        target: the path, with its query.
        fields: the headers, but for those that HTTP itself needs (``Host``, ``Content-Length``, ...).
        body: the content.
        more: the contents of further requests that are sent right behind it, alike but for that (HTTP/1.1 pipelining);
            only where :attr:`Driver.pipelines` says so. Replies with a status below 300 are counted and not reported,
            up to the last, the first other one, or one after which the connection ends.
        stream: the keyword arguments of the :class:`~streamfold.Parser` of the reply. None: the reply is no stream,
            and its body is kept.
        max_body_bytes: how much is kept of the body of a reply that is no stream; a longer one ends early.
        connect_timeout: seconds to find the address, open the connection and agree on TLS; None for no limit.
        fresh: whether to use a new connection only.
    """

    origin: Origin
    method: Literal["GET", "POST"]
    target: str
    fields: Fields
    body: bytes = b""
    more: tuple[bytes, ...] = ()
    stream: Mapping[str, Any] | None = None
    max_body_bytes: int = 1 << 16
    connect_timeout: float | None = None
    fresh: bool = False

    @property
    def url(self) -> str:
        """The address, for messages."""
        return f"{self.origin}{self.target}"


class Head(NamedTuple):
    """Status and headers of a reply.

    Attributes:
        status: 200 or more.
        is_stream: whether the body goes to the parser: status 200, plain ``text/event-stream``.
        headers: names in lower case. Empty if ``is_stream``.
    """

    status: int
    is_stream: bool
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Failure:
    """Why there is no usable reply.

    Attributes:
        message: in words.
        retryable: whether another try may help.
        timed_out: whether the connection could not be opened in time.
        is_unconnected: whether no connection could be opened, in time or at all.
        is_stale: whether a kept connection failed before the first byte of a reply: the server may have closed it
            before the request reached it.
        cause: the exception behind it.
    """

    message: str
    retryable: bool = True
    timed_out: bool = False
    is_unconnected: bool = False
    is_stale: bool = False
    cause: BaseException | None = None


class Exchange(Protocol):
    """One request and its reply, on their way."""

    @property
    def token_count(self) -> int:
        """Tokens received so far. May be read in any thread."""

    @property
    def first_token_at(self) -> float:
        """When the first token was received, by ``time.monotonic()``; infinite before."""

    @property
    def last_token_at(self) -> float:
        """When the last token was received, by ``time.monotonic()``; infinite before the first."""

    def gaps(self) -> tuple[Durations, int]:
        """The times between the tokens so far, and how many reads brought them. Also after :meth:`take`.

        The tokens of one read share the time since the read before evenly; those of the first read have none.
        """

    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens received so far, int32 ``[n]``. Not after :meth:`take`."""

    def snapshot(self) -> Generation:
        """A copy of what :meth:`take` would return now. The stream is read on as before. Not after :meth:`take`."""

    def notify_at(self, count: int) -> bool:
        """Report ``tokens`` once, when so many have come; this replaces an earlier ``count``.

        Returns whether they have come already: then nothing is reported.
        """

    @property
    def passed(self) -> int:
        """Replies that were counted and not reported: see :attr:`HttpRequest.more`."""

    def send(self) -> None:
        """After ``connected``: let the request leave."""

    def abort(self) -> None:
        """Keep what still arrives, report no truncation, and do not use the connection again."""

    def end(self) -> None:
        """Close the connection now, unless it is kept. Idempotent. ``ended`` follows, if it was not reported yet."""

    def urgent(self) -> None:
        """Read now what has arrived."""

    def take(self) -> Generation:
        """Return what the stream has brought. Nothing more is parsed afterwards. Once."""

    def take_body(self) -> bytes:
        """Return what was kept of the body of a reply that is no stream. Once."""


class Driver(Protocol):
    """Carries requests. Bound to the running event loop.

    Attributes:
        pipelines: whether it can send several requests in one go.
    """

    @property
    def pipelines(self) -> bool: ...  # noqa: D102

    def start(self, request: HttpRequest, listener: Listener) -> Exchange:
        """Start a request. ``listener`` is not called before this returns."""

    async def aclose(self) -> None:
        """Close all connections, and wait until nothing is left. Idempotent."""

    def abandon(self) -> None:
        """Close all connections after the event loop was closed. Nothing is reported."""
