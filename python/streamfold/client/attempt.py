"""Attempt: one try of a call, from opening its connection to the last byte of the response that is read.

The httpx driver of the table in :mod:`streamfold.client.attempt_state`, which holds the rules: here callbacks of the
connection, results of the parser, timers and aborts become events, and the table's actions are executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from typing import TYPE_CHECKING, ClassVar, Literal

import httpx

from streamfold.client.attempt_state import ABORTING, TABLE, Action, Event, State, head_event
from streamfold.client.limits import Deadline
from streamfold.client.responses import error_from_response, is_stream
from streamfold.client.transport import Connection, Stopped
from streamfold.errors import EngineError, EngineTimeout, StreamfoldError, StreamTruncated

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold._core import Generation, Parser
    from streamfold.client.control import EngineControl
    from streamfold.client.limits import Timeouts

__all__ = ["Attempt"]

# After the terminal event the body is read to its end: closing the socket would look like a client that disconnected.
_TRAILING_SECONDS = 1.0
_TRAILING_BYTES = 1 << 16
_ABORT_REPLY_SECONDS = 1.0  # how long an abort waits for the engine's reply before it closes the socket ...
_HURRIED_REPLY_SECONDS = 0.1  # ... and without a drain: engines that see the socket close first may not abort

_NETWORK_ERRORS = (httpx.TransportError, OSError)  # httpx lets some TLS errors through, as may other transports

_Phase = Literal["first_token", "next_token", "trailing"]

_AT_REST = (State.IDLE, State.DONE, State.ABORTED)
_STREAMING = State.STREAMING  # compared at each event of a stream


class Attempt:
    """One request under one request id, with its own parser and connection.

    :meth:`run` is awaited by the call's pump, which alone touches the response and the parser and is never cancelled.
    :meth:`abort` ends it early, by closing the connection under it.

    Attributes:
        rid: the request id.
        error: what it failed with; :meth:`run` does not raise it.
        sent_at, first_token_at, last_token_at: by the loop's clock; infinite until then.
    """

    def __init__(
        self,
        rid: str,
        parser: Parser,
        *,
        transport: httpx.AsyncBaseTransport,
        control: EngineControl,
        timeouts: Timeouts,
    ) -> None:
        self.rid = rid
        self.error: BaseException | None = None
        self.sent_at: float = math.inf
        self.first_token_at: float = math.inf
        self.last_token_at: float = math.inf
        self._parser = parser
        self._control = control
        self._timeouts = timeouts
        self._generation: Generation | None = None
        self._loop = asyncio.get_running_loop()

        self._state = State.IDLE
        self._settled = _Once()
        self._connection = Connection(transport, on_connected=self._on_connected, on_sent=self._on_sent)
        self._check_abort: Callable[[], bool] = _never
        # For the abort request, which may have to be repeated:
        self._responded = _Once()  # headers were received, or never will be
        self._finished = _Once()  # the terminal event was received
        self._trailing_bytes = 0
        self._parser_failed = False

        self._phase: _Phase | None = None
        self._deadline = Deadline(self._expired)  # of the phase
        self._drain = 0.0
        self._abort_timer: asyncio.Handle | None = None  # of the reply to the abort request, then of the drain
        self._abort_timer_at = math.inf

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        return self._parser.token_count if self._generation is None else len(self._generation.token_ids)

    @property
    def connecting(self) -> bool:
        """Whether the connection is being opened, which only the connect timeout can end."""
        return self._state is State.CONNECTING

    async def run(self, request: httpx.Request, check_abort: Callable[[], bool]) -> None:
        """Send ``request`` and read the response to its end. Once, and not after :meth:`abort`.

        Args:
            request: must hold :attr:`rid`.
            check_abort: whether the call is being aborted. Called right before the request is sent, which does not
                leave if this is true, and again right after. It calls :meth:`abort` itself.
        """
        self._check_abort = check_abort
        self._on(Event.START)
        try:
            await self._exchange(request)
        except Stopped:
            self._end()
        except Exception as error:  # noqa: BLE001  # raised to those who await the call
            self._end(error)
        except BaseException as error:  # the event loop is torn down, or Rust panicked
            self._end(StreamfoldError(f"the call was interrupted: {error!r}"))
            raise
        else:
            self._end()

    def _end(self, error: BaseException | None = None) -> None:
        """Nothing more is read."""
        self._check_abort = _never
        self._responded.set()
        self._set_phase(None, None)
        if error is None:
            self._on(Event.ENDED)
        else:
            self._fail(Event.FAILED, error)

    async def finish(self) -> Generation:
        """After :meth:`run`: wait until an abort request has been sent, if one has to be; return what was received."""
        if self._state not in _AT_REST:
            await asyncio.wait({self._settled.future()})
        if self._connection.stopped:
            await self._connection.wait_closed()
        return self.take()

    def take(self) -> Generation:
        """Return what was received. Nothing more is parsed afterwards."""
        if self._generation is None:
            self._generation = generation = self._parser.take()
            if isinstance(self.error, EngineTimeout) and generation.finish_reason in ("stop", "length"):
                self.error = None  # the terminal event arrived during the abort
        return self._generation

    # Ending early.

    def abort(self, drain: float) -> None:
        """Abort the request at the engine, read on for ``drain`` seconds, close. Idempotent.

        The abort request is sent first. The socket is closed when the engine has answered, or after 1 s.
        """
        if self._state not in ABORTING:
            self._drain = drain
        self._on(Event.ABORT)

    def end_drain(self) -> None:
        """End an abort's drain, and shorten its wait for the engine's answer."""
        self._on(Event.HASTEN)

    def fail(self, error: BaseException) -> None:
        """Before or after :meth:`run`: end with ``error``, unless it failed before or is being aborted."""
        self._fail(Event.FAILED, error)

    def _fail(self, event: Event, error: BaseException) -> None:
        if self._state not in ABORTING:
            self.error = self.error or error
        self._on(event)

    # The table.

    def _on(self, event: Event) -> None:
        """Make the transition that the table names."""
        self._state, actions = TABLE[self._state][event]
        for action in actions:
            self._actions[action](self)

    def _leave_to_httpx(self) -> None:
        """Nothing: httpx connects and sends in one await, see :meth:`_exchange` and :meth:`_on_sent`."""

    def _send_abort(self) -> None:
        sending = self._control.send_abort(
            self.rid,
            done=self._finished.future(),
            responded=self._responded.future(),
            has_tokens=self.token_count > 0,
        )
        sending.add_done_callback(self._on_abort_answered)

    def _on_abort_answered(self, _sending: asyncio.Task[None]) -> None:
        self._on(Event.ABORT_ANSWERED)

    def _settle(self) -> None:
        self._stop_abort_timer()
        self._settled.set()

    # The exchange.

    async def _exchange(self, request: httpx.Request) -> None:
        """Send ``request`` and read the response.

        Raises:
            Stopped: the connection was closed before the response's head.
            Exception: the response is not complete, or no event stream.
        """
        url = request.url
        try:
            response = await self._connection.send(request)
        except Stopped:
            raise
        except httpx.ConnectTimeout as error:
            raise EngineTimeout(
                f"no connection to {url} within {self._timeouts.connect} s (Timeouts.connect)", phase="connect"
            ) from error
        except Exception as error:
            raise EngineError(f"no reply from {url}: {_describe(error)}", retryable=_is_transient(error)) from error
        self._responded.set()
        self._check_abort()
        streams = is_stream(response)
        self._on(head_event(response.status_code, is_stream=streams))
        if not streams:
            raise await self._read_error(response)
        read_error: Exception | None = None
        try:
            await self._connection.read(response, self._feed)
        except Exception as error:  # noqa: BLE001  # raised below, unless the terminal event was received
            read_error = error
        else:
            if self._state is State.ERROR_EVENT:
                return
        try:
            self._parser.close(aborted=self._state in ABORTING)
        except StreamTruncated as error:
            if read_error is None or isinstance(read_error, _NETWORK_ERRORS):
                raise error from read_error
            raise EngineError(f"reading from {url} failed: {_describe(read_error)}", retryable=False) from read_error

    def _on_connected(self) -> None:
        self._on(Event.CONNECTED)

    def _on_sent(self) -> None:
        """Called right before the request is sent: nothing is awaited from here to its first byte.

        Raises:
            Stopped: the call is being aborted, and the request does not leave.
        """
        if self._check_abort():
            raise Stopped
        self._on(Event.SENT)
        self.sent_at = self._loop.time()
        self._loop.call_soon(self._check_abort)  # the host's flag may have been set meanwhile

    def _feed(self, chunk: bytes) -> None:
        """Parse the next bytes of the body."""
        if self._phase == "trailing":
            self._trailing_bytes += len(chunk)
            if self._trailing_bytes > _TRAILING_BYTES:
                self._on(Event.REST_EXPIRED)
        if self._parser_failed:
            return
        try:
            new_tokens = self._parser.feed(chunk)
        except StreamfoldError as error:
            self._parser_failed = True
            self._fail(Event.ERROR_EVENT if isinstance(error, EngineError) else Event.DECODE_ERROR, error)
            return
        if new_tokens:
            self.last_token_at = self._loop.time()
            self.first_token_at = min(self.first_token_at, self.last_token_at)
        if self._parser.finished:
            if not self._finished.is_set:
                self._finished.set()
                self._on(Event.FINISHED)
        elif new_tokens:
            if self._state is _STREAMING:
                self._deadline.set(self._timeouts.next_token)
            else:
                self._on(Event.FIRST_TOKEN)

    async def _read_error(self, response: httpx.Response) -> EngineError:
        """Read a response that is no event stream, and return the error that it means."""
        body = bytearray()

        def take(chunk: bytes) -> None:
            body.extend(chunk)
            if len(body) > _TRAILING_BYTES:
                self._on(Event.REST_EXPIRED)

        with contextlib.suppress(Exception):  # an incomplete body is enough for the message
            await self._connection.read(response, take)
        return error_from_response(response, bytes(body), self._control.engine.hint(response.status_code))

    # Timers.

    def _set_phase(self, phase: _Phase | None, seconds: float | None) -> None:
        self._phase = phase
        self._deadline.set(seconds)

    def _expired(self) -> None:
        if self._phase == "trailing":
            self._on(Event.REST_EXPIRED)
        elif self._phase is not None:
            limit = getattr(self._timeouts, self._phase)
            awaited = self._phase.replace("_", " ")
            error = EngineTimeout(f"no {awaited} within {limit:g} s (Timeouts.{self._phase})", phase=self._phase)
            self._fail(Event.TOKEN_EXPIRED, error)

    def _set_abort_timer(self, event: Event, seconds: float) -> None:
        self._stop_abort_timer()
        self._abort_timer_at = self._loop.time() + seconds
        self._abort_timer = self._loop.call_later(seconds, self._on, event)

    def _stop_abort_timer(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None

    def _hurry_reply(self) -> None:
        if self._loop.time() + _HURRIED_REPLY_SECONDS < self._abort_timer_at:
            self._set_abort_timer(Event.REPLY_EXPIRED, _HURRIED_REPLY_SECONDS)

    def _arm_drain(self) -> None:
        if self._drain > 0:
            self._set_abort_timer(Event.DRAIN_EXPIRED, self._drain)
        else:
            self._stop_abort_timer()
            self._on(Event.DRAIN_EXPIRED)

    _actions: ClassVar[dict[Action, Callable[[Attempt], None]]] = {
        Action.CONNECT: _leave_to_httpx,
        Action.SEND: _leave_to_httpx,
        Action.SEND_ABORT: _send_abort,
        Action.CLOSE: lambda self: self._connection.close_soon(),
        Action.SETTLE: _settle,
        Action.ARM_FIRST_TOKEN: lambda self: self._set_phase("first_token", self._timeouts.first_token),
        Action.ARM_NEXT_TOKEN: lambda self: self._set_phase("next_token", self._timeouts.next_token),
        Action.ARM_REST: lambda self: self._set_phase("trailing", _TRAILING_SECONDS),
        Action.DISARM: lambda self: self._set_phase(None, None),
        Action.ARM_REPLY: lambda self: self._set_abort_timer(Event.REPLY_EXPIRED, _ABORT_REPLY_SECONDS),
        Action.HURRY_REPLY: _hurry_reply,
        Action.ARM_DRAIN: _arm_drain,
    }


class _Once:
    """Something that happens once, with a future that is created only if it is awaited."""

    __slots__ = ("_future", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._future: asyncio.Future[None] | None = None

    def set(self) -> None:
        self.is_set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def future(self) -> asyncio.Future[None]:
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
            if self.is_set:
                self._future.set_result(None)
        return self._future


def _never() -> bool:
    return False


def _describe(error: Exception) -> str:
    return (str(error) or type(error).__name__) if isinstance(error, _NETWORK_ERRORS) else repr(error)


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
