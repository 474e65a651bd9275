"""DirectExchange: one request of a DirectDriver, from the connection it gets to the end of the reply."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

from streamfold.client.drivers.base import Failure, Head

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from streamfold._core import Durations, Exchange, Generation
    from streamfold.client.drivers.base import HttpRequest, Kind, Listener
    from streamfold.client.drivers.connector import Opened
    from streamfold.client.urls import Origin

__all__ = ["DirectExchange", "Owner"]


class Owner(Protocol):
    """What an exchange asks of its driver."""

    def open(self, exchange: DirectExchange) -> None: ...  # noqa: D102
    def cancel_opening(self, exchange: DirectExchange) -> None: ...  # noqa: D102
    def take_kept(self, exchange: DirectExchange) -> Opened | None: ...  # noqa: D102
    def keep(self, origin: Origin, opened: Opened) -> None: ...  # noqa: D102
    def discard(self, exchange: DirectExchange) -> None: ...  # noqa: D102
    def closed(self, opened: Opened) -> None: ...  # noqa: D102


class _State(enum.Enum):
    OPENING = "no connection yet"
    READY = "connected; the request has not left"
    RUNNING = "the request has left"
    ENDED = "nothing more is reported"


class DirectExchange:
    """One request and its reply.

    Attributes:
        origin: the server.
        is_control: whether the reply is no stream.
        is_fresh: whether it must not use a kept connection.
        connect_timeout: seconds to open a connection.
    """

    __slots__ = (
        "_aborted",
        "_core",
        "_listener",
        "_opened",
        "_owner",
        "_reuses",
        "_state",
        "connect_timeout",
        "is_control",
        "is_fresh",
        "origin",
    )

    def __init__(self, owner: Owner, core: Exchange, request: HttpRequest, listener: Listener) -> None:
        # Not the request itself: its body is freed when it has been sent.
        self.origin: Origin = request.origin
        self.is_control: bool = request.stream is None
        self.is_fresh: bool = request.fresh
        self.connect_timeout: float | None = request.connect_timeout
        self._owner = owner
        self._core = core
        self._listener = listener
        self._state = _State.OPENING
        self._opened: Opened | None = None
        self._reuses = False
        self._aborted = False

    # The handle.

    @property
    def token_count(self) -> int:
        """Tokens received so far. May be read in any thread."""
        return self._core.token_count

    @property
    def first_token_at(self) -> float:
        """When the first token was received, by ``time.monotonic()``; infinite before."""
        return self._core.first_token_at

    @property
    def last_token_at(self) -> float:
        """When the last token was received, by ``time.monotonic()``; infinite before the first."""
        return self._core.last_token_at

    def gaps(self) -> tuple[Durations, int]:
        """The times between the tokens so far, and how many reads brought them."""
        return self._core.gaps()

    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens received so far, int32 ``[n]``. Not after :meth:`take`."""
        return self._core.token_ids()

    def snapshot(self) -> Generation:
        """A copy of what the stream has brought so far. Not after :meth:`take`."""
        return self._core.snapshot()

    def notify_at(self, count: int) -> bool:
        """Report ``tokens`` once, when so many have come. Returns whether they have come already."""
        return self._core.notify_at(count)

    @property
    def passed(self) -> int:
        """Replies that were counted and not reported."""
        return self._core.passed

    def send(self) -> None:
        """After ``connected``: let the request leave."""
        if self._state is not _State.READY:
            return
        while self._opened is not None:
            if self._opened.connection.start(self._core, self._on_event):
                self._state = _State.RUNNING
                return
            self._owner.closed(self._opened)  # by the server, or because it sent what nobody asked for
            self._opened = None
            if not self._reuses:
                self.fail(Failure("the server closed the connection before the request was sent"))
                return
            self._opened = self._owner.take_kept(self)
        self._state = _State.OPENING
        self._reuses = False
        self._owner.open(self)

    def abort(self) -> None:
        """Keep what still arrives, report no truncation, and do not use the connection again."""
        self._aborted = True
        if self._state is _State.RUNNING:
            if self._opened is not None:
                self._opened.connection.abort()
        else:
            self.end()

    def end(self) -> None:
        """Close the connection now, unless it is kept. Idempotent. ``ended`` follows, if it was not reported yet."""
        if self._state is _State.OPENING:
            self._owner.cancel_opening(self)
        opened, self._opened = self._opened, None
        self._owner.discard(self)
        if opened is not None:
            opened.connection.end()
            self._owner.closed(opened)
        self._report_end()

    def urgent(self) -> None:
        """Read now what has arrived."""
        if self._state is _State.RUNNING and self._opened is not None:
            self._opened.connection.urgent()

    def take(self) -> Generation:
        """Return what the stream has brought. Nothing more is parsed afterwards. Once."""
        return self._core.take()

    def take_body(self) -> bytes:
        """Return what was kept of the body of a reply that is no stream. Once."""
        return self._core.take_body()

    # What the driver reports.

    def use_kept(self, opened: Opened) -> None:
        """Use a connection that carried an earlier request."""
        self._opened = opened
        self._reuses = True

    def use_new(self, opened: Opened) -> None:
        """Use a connection that carried nothing yet."""
        self._opened = opened
        self._reuses = False

    def on_ready(self) -> None:
        """There is a connection."""
        if self._state is not _State.OPENING:
            return
        self._state = _State.READY
        self._listener("connected", None)

    def fail(self, failure: Failure) -> None:
        """There is no connection."""
        self._listener("failed", failure)
        self.end()

    # What the socket layer reports.

    def _on_event(self, kind: str, detail: Any) -> None:  # noqa: ANN401  # each kind has its own
        if kind == "ended":
            self._on_ended(is_reusable=detail)
        elif kind == "head":
            status, is_stream, fields = detail
            self._listener("head", Head(status, is_stream, _headers(fields or ())))
        elif kind == "failed":
            number, message, is_unanswered = detail
            cause = ConnectionError(message) if number is None else OSError(number, message)
            self._listener("failed", Failure(message, is_stale=self._reuses and is_unanswered, cause=cause))
        else:
            self._listener(kind, detail)  # type: ignore[arg-type]  # the kinds that are the same on both sides

    def _on_ended(self, *, is_reusable: bool) -> None:
        if is_reusable and not self._aborted and self._opened is not None:
            opened, self._opened = self._opened, None
            self._owner.keep(self.origin, opened)
            self._owner.discard(self)
        # else: it stays open until the caller ends it
        self._report_end()

    def _report_end(self) -> None:
        if self._state is not _State.ENDED:
            self._state = _State.ENDED
            listener, self._listener = self._listener, _ignore  # no circle of references is left
            listener("ended", None)


def _ignore(_kind: Kind, _detail: object) -> None:
    """After the end, nothing is reported."""


def _headers(fields: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The fields by name; repeated ones are one list (RFC 9110, section 5.3)."""
    headers: dict[str, str] = {}
    for name, value in fields:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
