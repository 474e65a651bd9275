"""Attempt: one try of a call, from opening its connection to the last byte of the response that is read."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from typing import TYPE_CHECKING, Literal

import httpx

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
        self._loop = loop = asyncio.get_running_loop()

        self._connection = Connection(transport, on_sent=self._on_sent)
        self._check_abort: Callable[[], bool] = _never
        self._sent = False
        self._engine_busy = False  # whether the engine may be working on it
        self._engine_done: asyncio.Future[None] = loop.create_future()
        self._responded: asyncio.Future[None] = loop.create_future()  # headers were received, or never will be
        self._ended: asyncio.Future[None] = loop.create_future()  # nothing more is read
        self._trailing_bytes = 0
        self._parser_failed = False  # the connection is being closed

        self._aborting = False
        self._abort_task: asyncio.Task[None] | None = None
        self._hurry: asyncio.Future[None] = loop.create_future()

        self._phase: _Phase = "first_token"
        self._deadline = Deadline(self._expired)

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        return self._parser.token_count if self._generation is None else len(self._generation.token_ids)

    @property
    def connecting(self) -> bool:
        """Whether the connection is being opened, which only the connect timeout can end."""
        return self._connection.connecting and not self._ended.done()

    async def run(self, request: httpx.Request, check_abort: Callable[[], bool]) -> None:
        """Send ``request`` and read the response to its end.

        Args:
            request: must hold :attr:`rid`.
            check_abort: whether the call is being aborted. Called right before the request is sent, which does not
                leave if this is true, and again right after. It calls :meth:`abort` itself.
        """
        self._check_abort = check_abort
        try:
            await self._exchange(request)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001  # raised to those who await the call
            self.fail(error)
        except BaseException as error:  # the event loop is torn down, or Rust panicked
            self.fail(StreamfoldError(f"the call was interrupted: {error!r}"))
            raise
        finally:
            self._check_abort = _never
            self._set_responded()
            self._ended.set_result(None)
            self._deadline.set(None)

    async def finish(self) -> Generation:
        """After :meth:`run`: wait until an abort request has been sent, if one has to be; return what was received."""
        if self._abort_task is not None:
            await asyncio.wait({self._abort_task})
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
        if self._aborting or self._ended.done():
            return
        self._aborting = True
        if self._sent:
            self._abort_task = self._loop.create_task(self._abort_and_close(drain))
            self._abort_task.add_done_callback(self._after_abort)
        else:
            self._connection.close_soon()

    def end_drain(self) -> None:
        """End an abort's drain, and shorten its wait for the engine's answer."""
        if not self._hurry.done():
            self._hurry.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End with ``error``, unless it failed before or is being aborted."""
        if self._aborting:
            return
        self.error = self.error or error
        if self._engine_busy:
            self.abort(0.0)

    async def _abort_and_close(self, drain: float) -> None:
        sending = self._control.send_abort(
            self.rid, done=self._engine_done, responded=self._responded, has_tokens=self.token_count > 0
        )
        try:
            await self._wait_for_any(_ABORT_REPLY_SECONDS, sending, self._hurry)
            if self._hurry.done():
                await self._wait_for_any(_HURRIED_REPLY_SECONDS, sending)
            await self._wait_for_any(drain, self._ended, self._hurry)
        finally:
            await self._connection.close()

    def _after_abort(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() and not self._ended.done():
            self._connection.close_soon()  # it may have been cancelled before its first step

    @staticmethod
    async def _wait_for_any(seconds: float, *futures: asyncio.Future[None]) -> None:
        if seconds > 0 and not any(future.done() for future in futures):
            await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _end_trailing(self) -> None:
        """Stop reading a body that does not end."""
        if self.error is not None:
            self.fail(self.error)
        else:
            self._connection.close_soon()

    # The exchange.

    async def _exchange(self, request: httpx.Request) -> None:
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
        self._set_responded()
        self._check_abort()
        if not is_stream(response):
            raise await self._read_error(response)
        read_error: Exception | None = None
        try:
            await self._connection.read(response, self._feed)
        except Exception as error:  # noqa: BLE001  # raised below, unless the terminal event was received
            read_error = error
        else:
            if self.error is not None and not self._aborting:
                self._engine_busy = False  # it sent an error event and ended the body
        try:
            self._parser.close(aborted=self._aborting)
        except StreamTruncated as error:
            if read_error is None or isinstance(read_error, _NETWORK_ERRORS):
                raise error from read_error
            raise EngineError(f"reading from {url} failed: {_describe(read_error)}", retryable=False) from read_error

    def _set_responded(self) -> None:
        if not self._responded.done():
            self._responded.set_result(None)

    def _feed(self, chunk: bytes) -> None:
        """Parse the next bytes of the body."""
        if self._phase == "trailing":
            self._trailing_bytes += len(chunk)
            if self._trailing_bytes > _TRAILING_BYTES:
                self._end_trailing()
        if self._parser_failed:
            return
        try:
            new_tokens = self._parser.feed(chunk)
        except StreamfoldError as error:
            self._parser_failed = True
            if self._aborting:  # the last good state is the result
                self._connection.close_soon()
            elif isinstance(error, EngineError):  # an error event, after which the body should end
                self.error = error
                self._set_phase("trailing", _TRAILING_SECONDS)
            else:
                self.fail(error)
            return
        if new_tokens:
            self.last_token_at = self._loop.time()
            self.first_token_at = min(self.first_token_at, self.last_token_at)
        if self._parser.finished and not self._engine_done.done():
            self._engine_busy = False
            self._engine_done.set_result(None)
            self._set_phase("trailing", _TRAILING_SECONDS)
        elif new_tokens:
            self._set_phase("next_token", self._timeouts.next_token)

    async def _read_error(self, response: httpx.Response) -> EngineError:
        """Read a response that is no event stream, and return the error that it means."""
        self._engine_busy = response.status_code == 200
        body = bytearray()

        def take(chunk: bytes) -> None:
            body.extend(chunk)
            if len(body) > _TRAILING_BYTES:
                self._end_trailing()

        self._set_phase("trailing", _TRAILING_SECONDS)
        with contextlib.suppress(Exception):  # an incomplete body is enough for the message
            await self._connection.read(response, take)
        return error_from_response(response, bytes(body), self._control.engine.hint(response.status_code))

    # Phases.

    def _on_sent(self) -> None:
        """Called right before the request is sent: nothing is awaited from here to its first byte.

        Raises:
            Stopped: the call is being aborted, and the request does not leave.
        """
        if self._check_abort():
            raise Stopped
        self._sent = self._engine_busy = True
        self.sent_at = self._loop.time()
        self._set_phase("first_token", self._timeouts.first_token)
        self._loop.call_soon(self._check_abort)  # the host's flag may have been set meanwhile

    def _set_phase(self, phase: _Phase, seconds: float | None) -> None:
        self._phase = phase
        self._deadline.set(seconds)

    def _expired(self) -> None:
        if self._phase == "trailing":
            self._end_trailing()
        else:
            limit = getattr(self._timeouts, self._phase)
            awaited = self._phase.replace("_", " ")
            self.fail(EngineTimeout(f"no {awaited} within {limit:g} s (Timeouts.{self._phase})", phase=self._phase))


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
