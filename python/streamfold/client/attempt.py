"""One try of a call: a request from its leaving to the last byte that is read of its reply, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from typing import TYPE_CHECKING, Literal

import httpx

from streamfold.client.limits import Deadline
from streamfold.client.responses import is_stream, refusal
from streamfold.client.transport import Connection, Stopped
from streamfold.errors import EngineError, EngineTimeout, StreamfoldError, StreamTruncated

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold._core import Generation, Parser
    from streamfold.client.control import EngineControl
    from streamfold.client.limits import Timeouts

__all__ = ["Attempt"]

# After the terminal event the body is read to its end, so that a clean end never looks like a client that left.
_REST_SECONDS = 1.0
_REST_BYTES = 1 << 16
_TELL_SECONDS = 1.0  # how long a cut waits for the engine's word before it closes the socket ...
_HASTE_SECONDS = 0.1  # ... and in haste: engines that see the socket close first may let the request run on

_BROKEN = (httpx.TransportError, OSError)  # httpx lets some errors of TLS through, and transports may be anybody's

_Phase = Literal["first_token", "next_token", "rest"]


class Attempt:
    """One request under one request id, with a parser and a connection of its own.

    :meth:`run` belongs to the call's pump, which alone touches the response and the parser and is never cancelled:
    whatever ends it early says so with :meth:`cut`, which closes the connection under it.

    Attributes:
        rid: the request id.
        error: what it failed with. It never comes out of :meth:`run`.
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
        self.sent_at = self.first_token_at = self.last_token_at = math.inf
        self._parser = parser
        self._control = control
        self._timeouts = timeouts
        self._generation: Generation | None = None
        self._loop = loop = asyncio.get_running_loop()

        self._connection = Connection(transport, on_sent=self._on_sent)
        self._is_aborted: Callable[[], bool] = _never
        self._sent = False
        self._engine_busy = False  # whether the engine may be working on it, for all that we know
        self._engine_done: asyncio.Future[None] = loop.create_future()
        self._answered: asyncio.Future[None] = loop.create_future()  # the headers have come, or never will
        self._over: asyncio.Future[None] = loop.create_future()  # nothing more will be read
        self._rest_bytes = 0
        self._deaf = False  # the parser has failed; the connection is being closed

        self._cut = False
        self._cutter: asyncio.Task[None] | None = None
        self._haste: asyncio.Future[None] = loop.create_future()

        self._phase: _Phase = "first_token"
        self._deadline = Deadline(self._expired)

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        return self._parser.token_count if self._generation is None else len(self._generation.token_ids)

    @property
    def opening(self) -> bool:
        """Whether it is connecting, which only the connect time-out can end."""
        return self._connection.opening and not self._over.done()

    async def run(self, request: httpx.Request, is_aborted: Callable[[], bool]) -> None:
        """Send ``request`` and take the reply in, to its end.

        Args:
            request: must hold :attr:`rid`.
            is_aborted: asked when the connection stands and the next step is to send, and again once it is sent. The
                request does not leave if it is True; if it becomes true later, it must see to the cut itself.
        """
        self._is_aborted = is_aborted
        try:
            await self._exchange(request)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001  # it belongs to those who await the call
            self.fail(error)
        except BaseException as error:  # somebody tears the loop down, or a panic
            self.fail(StreamfoldError(f"the call broke off: {error!r}"))
            raise
        finally:
            self._is_aborted = _never
            self._has_answered()
            self._over.set_result(None)
            self._deadline.set(None)

    async def finish(self) -> Generation:
        """Wait, after :meth:`run`, until the engine has been told to end it, if it has to be told; what has arrived."""
        if self._cutter is not None:
            await asyncio.wait({self._cutter})
        return self.take()

    def take(self) -> Generation:
        """Give what has arrived; nothing more is taken in afterwards."""
        if self._generation is None:
            self._generation = generation = self._parser.take()
            if isinstance(self.error, EngineTimeout) and generation.finish_reason in ("stop", "length"):
                self.error = None  # it was slow, and has come to its end while we gave up
        return self._generation

    # Ending early.

    def cut(self, drain: float) -> None:
        """End it, and go on reading for so many seconds. One that is being ended already, or is over, stays as it is.

        The engine is told first; the socket is closed when it has answered, or after a second.
        """
        if self._cut or self._over.done():
            return
        self._cut = True
        if self._sent:
            self._cutter = self._loop.create_task(self._cut_off(drain))
            self._cutter.add_done_callback(self._after_cutter)
        else:
            self._connection.close_soon()

    def hasten(self) -> None:
        """End the drain of a cut that is under way, and hardly wait for the engine's answer."""
        if not self._haste.done():
            self._haste.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Let it end with ``error``; a cut that is under way, or an earlier error, comes first."""
        if self._cut:
            return
        self.error = self.error or error
        if self._engine_busy:
            self.cut(0.0)

    async def _cut_off(self, drain: float) -> None:
        """Tell the engine, let the rest come in while it may, close."""
        begun = self.token_count > 0
        tell = self._control.tell(self.rid, ended=self._engine_done, answered=self._answered, begun=begun)
        try:
            await self._patiently(_TELL_SECONDS, tell, self._haste)
            if self._haste.done():
                await self._patiently(_HASTE_SECONDS, tell)
            await self._patiently(drain, self._over, self._haste)
        finally:
            await self._connection.close()

    def _after_cutter(self, cutter: asyncio.Task[None]) -> None:
        if cutter.cancelled() and not self._over.done():
            self._connection.close_soon()  # it may not have got to its first step

    @staticmethod
    async def _patiently(seconds: float, *events: asyncio.Future[None]) -> None:
        if seconds > 0 and not any(event.done() for event in events):
            await asyncio.wait(events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _end_rest(self) -> None:
        """Enough of a body that does not end."""
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
                f"{url} took no connection within {self._timeouts.connect} s (Timeouts.connect)", phase="connect"
            ) from error
        except Exception as error:
            raise EngineError(f"no reply from {url}: {_words(error)}", retryable=_may_pass(error)) from error
        self._has_answered()
        self._is_aborted()
        if not is_stream(response):
            raise await self._refusal(response)
        broken: Exception | None = None
        try:
            await self._connection.read(response, self._take_in)
        except Exception as error:  # noqa: BLE001  # raised below, unless the answer is whole
            broken = error
        else:
            if self.error is not None and not self._cut:
                self._engine_busy = False  # it said no, and ended the body properly
        try:
            self._parser.close(aborted=self._cut)
        except StreamTruncated as error:
            if broken is None or isinstance(broken, _BROKEN):
                raise error from broken
            raise EngineError(f"reading from {url} failed: {_words(broken)}", retryable=False) from broken

    def _has_answered(self) -> None:
        if not self._answered.done():
            self._answered.set_result(None)

    def _take_in(self, chunk: bytes) -> None:
        """Fold the next bytes of the body in."""
        if self._phase == "rest":
            self._rest_bytes += len(chunk)
            if self._rest_bytes > _REST_BYTES:
                self._end_rest()
        if self._deaf:
            return
        try:
            arrived = self._parser.feed(chunk)
        except StreamfoldError as error:
            self._deaf = True
            if self._cut:  # an abort keeps what was good, and has no use for the rest
                self._connection.close_soon()
            elif isinstance(error, EngineError):  # its last word, after which the body should end
                self.error = error
                self._wait_for("rest", _REST_SECONDS)
            else:
                self.fail(error)
            return
        if arrived:
            self.last_token_at = self._loop.time()
            self.first_token_at = min(self.first_token_at, self.last_token_at)
        if self._parser.finished and not self._engine_done.done():
            self._engine_busy = False
            self._engine_done.set_result(None)
            self._wait_for("rest", _REST_SECONDS)
        elif arrived:
            self._wait_for("next_token", self._timeouts.next_token)

    async def _refusal(self, response: httpx.Response) -> EngineError:
        """Read the reply that is no stream; the error that it amounts to."""
        self._engine_busy = response.status_code == 200
        body = bytearray()

        def take(chunk: bytes) -> None:
            body.extend(chunk)
            if len(body) > _REST_BYTES:
                self._end_rest()

        self._wait_for("rest", _REST_SECONDS)
        with contextlib.suppress(Exception):  # what has come of it tells enough
            await self._connection.read(response, take)
        return refusal(response, bytes(body), self._control.engine.hint(response.status_code))

    # Phases.

    def _on_sent(self) -> None:
        """Note that the request leaves: nothing is awaited from here to its first byte.

        Raises:
            Stopped: it has been aborted, and does not leave.
        """
        if self._is_aborted():
            raise Stopped
        self._sent = self._engine_busy = True
        self.sent_at = self._loop.time()
        self._wait_for("first_token", self._timeouts.first_token)
        self._loop.call_soon(self._is_aborted)  # a flag that was raised in the meantime

    def _wait_for(self, phase: _Phase, seconds: float | None) -> None:
        self._phase = phase
        self._deadline.set(seconds)

    def _expired(self) -> None:
        if self._phase == "rest":
            self._end_rest()
        else:
            limit = getattr(self._timeouts, self._phase)
            what = self._phase.replace("_", " ")
            self.fail(EngineTimeout(f"no {what} within {limit:g} s (Timeouts.{self._phase})", phase=self._phase))


def _never() -> bool:
    return False


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__) if isinstance(error, _BROKEN) else repr(error)


def _may_pass(error: Exception) -> bool:
    """Whether a request that met such an error before its headers may fare better later."""
    if not isinstance(error, _BROKEN) or isinstance(error, (httpx.UnsupportedProtocol, httpx.LocalProtocolError)):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return False
        cause = cause.__cause__ or cause.__context__
    return True
