"""One request, from its start to its Generation, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Literal

import httpx

from streamfold.connection import Connection, Stopped
from streamfold.engines import is_stream, refusal
from streamfold.errors import EngineError, EngineTimeout, StreamfoldError, StreamTruncated
from streamfold.limits import Deadline, check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from streamfold._core import Generation, Parser
    from streamfold.abort import Control
    from streamfold.limits import Slots, Timeouts

__all__ = ["Call"]

# After the terminal event the body is read to its end, so that a clean end never looks like a client that left.
_REST_SECONDS = 1.0
_REST_BYTES = 1 << 16
_TELL_SECONDS = 1.0  # how long an abort waits for the engine's word before it closes the socket ...
_HASTE_SECONDS = 0.1  # ... and in haste: engines that see the socket close first may let the request run on

_BROKEN = (httpx.TransportError, OSError)  # httpx lets some errors of TLS through, and transports may be anybody's

_Phase = Literal["first_token", "next_token", "rest"]


class Call:
    """One request that runs. Await it for its :class:`Generation`, as often and from as many tasks as you like.

    Cancelling a task that awaits it aborts the call, as :meth:`abort` does; the task goes on with the
    ``CancelledError`` when the call has ended. Cancelling that task again ends the drain.

    Made by :meth:`Client.start`.
    """

    # One task, the pump, alone touches the response and the parser. It is never cancelled: whatever ends the call
    # early says so in `_cut` and closes the connection under it.

    def __init__(
        self,
        rid: str,
        parser: Parser,
        *,
        transport: httpx.AsyncBaseTransport,
        control: Control,
        slots: Slots,
        timeouts: Timeouts,
        drains: bool,
        on_end: Callable[[Call], object],
    ) -> None:
        self._rid = rid
        self._parser = parser
        self._control = control
        self._slots = slots
        self._timeouts = timeouts
        self._drains = drains
        self._on_end = on_end
        self._loop = loop = asyncio.get_running_loop()

        self.ended: asyncio.Future[Generation] = loop.create_future()  # what was kept, after a failure too
        self._error: BaseException | None = None
        self._started = loop.time()
        self._sent_at = math.inf
        self._ended_at = math.inf

        self._connection = Connection(transport, on_sent=self._on_sent)
        self._engine_busy = False  # whether the engine may be working on it, for all that we know
        self._engine_done: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()  # nothing more will be read
        self._rest_bytes = 0
        self._deaf = False  # the parser has failed; the connection is being closed

        self._cut = False
        self._cutter: asyncio.Task[None] | None = None
        self._haste: asyncio.Future[None] = loop.create_future()

        self._phase: _Phase = "first_token"
        self._deadline = Deadline(self._expired)

    def run(self, request: httpx.Request) -> asyncio.Task[None]:
        """Queue up for a slot and begin; the pump, which ends when everything is tidied up."""
        self._place = self._slots.request()
        pump = self._loop.create_task(self._pump(request), name=f"streamfold {self._rid}")
        pump.add_done_callback(self._after_pump)
        return pump

    def answer(self, generation: Generation) -> None:
        """End at once with ``generation``: there is nothing to ask the engine for."""
        self._ended_at = self._started
        self.ended.set_result(generation)

    @property
    def rid(self) -> str:
        """The request id that the engine knows it by."""
        return self._rid

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        return len(self.ended.result().token_ids) if self.ended.done() else self._parser.token_count

    @property
    def age(self) -> float:
        """Seconds since the start, the wait for a slot included; stands still once the call has ended."""
        return min(self._loop.time(), self._ended_at) - self._started

    @property
    def rate(self) -> float:
        """Tokens per second since the request was sent; 0.0 before the first token."""
        seconds = min(self._loop.time(), self._ended_at) - self._sent_at
        return self.token_count / seconds if seconds > 0 else 0.0

    def __repr__(self) -> str:
        state = (self._error or self.ended.result().finish_reason or "cut") if self.ended.done() else "running"
        return f"<Call {self._rid}: {self.token_count} tokens, {state}>"

    def __await__(self) -> Generator[object, None, Generation]:
        return self._result().__await__()

    async def abort(self, drain: float | None = None) -> Generation:
        """End the call and give what has arrived. After its end: give what there was. Safe to call from anywhere.

        The engine is told first; the socket is closed when it has answered, or after a second. A second abort ends
        the drain.

        Args:
            drain: seconds to go on reading for the terminal event, which alone carries side data (routed experts,
                top-p). None: the client's ``timeouts.drain`` if side data was asked for, otherwise 0.

        Returns:
            The tokens so far, with finish reason None, or what the engine said while it was being told. If the call
            has failed, what it had received by then; the error itself is for those who await the call.
        """
        self.abort_soon(drain)
        await self.wait([self])
        return self.ended.result()

    def abort_soon(self, drain: float | None = None) -> None:
        """Begin what :meth:`abort` does, and do not wait for it."""
        if drain is not None:
            check_seconds("drain", drain, optional=False)
        if self._cut:
            if not self._haste.done():
                self._haste.set_result(None)
        elif drain is not None:
            self._end_early(None, drain)
        else:
            self._end_early(None, self._timeouts.drain if self._drains else 0.0)

    @property
    def aborting(self) -> bool:
        """Whether something is ending the call early, or has."""
        return self._cut

    @staticmethod
    async def wait(calls: Collection[Call]) -> None:
        """Wait until all have ended. A cancelled wait aborts them, and still waits: their ends are bounded."""
        cancelled = None
        while pending := {call.ended for call in calls if not call.ended.done()}:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError as error:  # noqa: PERF203  # a second one ends the drain
                cancelled = error
                for call in calls:
                    call.abort_soon()
        if cancelled is not None:
            raise cancelled

    async def _result(self) -> Generation:
        await self.wait([self])
        if self._error is not None:
            raise self._error.with_traceback(None)  # the same error each time; its traceback must not pile up
        return self.ended.result()

    # The pump.

    async def _pump(self, request: httpx.Request) -> None:
        try:
            if await self._slots.wait(self._place):
                try:
                    await self._exchange(request)
                finally:
                    self._slots.release()
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001  # ours or a transport's: it belongs to those who await the call
            self._fail(error)
        except BaseException as error:  # somebody tears the loop down, or a panic
            self._fail(StreamfoldError(f"the call broke off: {error!r}"))
            raise
        finally:
            self._over.set_result(None)
            self._deadline.set(None)
            try:
                if self._cutter is not None:
                    await asyncio.wait({self._cutter})
            finally:
                self._settle()

    def _after_pump(self, _pump: asyncio.Task[None]) -> None:
        """End a call whose pump was cancelled before its first step: a loop that is torn down does that."""
        if self._over.done():
            return
        self._cut = True
        self._over.set_result(None)
        if self._place.done() and self._place.result():
            self._slots.release()
        elif not self._place.done():
            self._place.set_result(False)
        self._settle()

    async def _exchange(self, request: httpx.Request) -> None:
        url = request.url
        try:
            response = await self._connection.send(request)
        except httpx.ConnectTimeout as error:
            raise EngineTimeout(
                f"{url} took no connection within {self._timeouts.connect} s (Timeouts.connect)", phase="connect"
            ) from error
        except _BROKEN as error:
            raise EngineError(
                f"no reply from {url}: {str(error) or type(error).__name__}",
                retryable=not isinstance(error, (httpx.UnsupportedProtocol, httpx.LocalProtocolError)),
            ) from error
        if not is_stream(response):
            raise await self._refusal(response)
        broken: Exception | None = None
        try:
            await self._connection.read(response, self._take_in)
        except _BROKEN as error:
            broken = error
        else:
            if self._error is not None and not self._cut:
                self._engine_busy = False  # it said no, and ended the body properly
        try:
            self._parser.close(aborted=self._cut)
        except StreamTruncated as error:
            raise error from broken

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
                self._error = error
                self._wait_for("rest", _REST_SECONDS)
            else:
                self._fail(error)
            return
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
        with contextlib.suppress(*_BROKEN):  # what has come of it tells enough
            await self._connection.read(response, take)
        return refusal(response, bytes(body))

    def _settle(self) -> None:
        """The one place where a call ends."""
        if self.ended.done():
            return
        generation = self._parser.take()
        if isinstance(self._error, EngineTimeout) and generation.finish_reason in ("stop", "length"):
            self._error = None  # it was slow, and has come to its end while we gave up
        if isinstance(self._error, StreamfoldError):
            self._error.partial = generation
        self._ended_at = self._loop.time()
        self.ended.set_result(generation)
        self._on_end(self)

    # Ending early.

    def _fail(self, error: BaseException) -> None:
        """Let the call end with ``error``; an abort that is under way comes first."""
        if self._cut:
            return
        self._error = self._error or error
        if self._engine_busy:
            self._end_early(error, 0.0)

    def _end_rest(self) -> None:
        """Enough of a body that does not end."""
        if self._error is not None:
            self._fail(self._error)
        else:
            self._connection.close_soon()

    def _end_early(self, error: BaseException | None, drain: float) -> None:
        if self._cut or self.ended.done():
            return
        self._cut = True
        self._error = self._error or error
        if self._connection.sent:
            self._cutter = self._loop.create_task(self._cut_off(drain))
            self._cutter.add_done_callback(self._after_cutter)
            return
        self._connection.close_soon()
        if not self._place.done():
            self._place.set_result(False)
        if self._connection.opening:
            self._settle()  # the pump has to wait for the connection to open or fail; nobody else has to

    async def _cut_off(self, drain: float) -> None:
        """Tell the engine, let the rest come in while it may, close."""
        tell = self._control.tell(self._rid, ended=self._engine_done, begun=self.token_count > 0)
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

    # Time-outs.

    def _on_sent(self) -> None:
        self._sent_at = self._loop.time()
        self._engine_busy = True
        self._wait_for("first_token", self._timeouts.first_token)

    def _wait_for(self, phase: _Phase, seconds: float | None) -> None:
        self._phase = phase
        self._deadline.set(seconds)

    def _expired(self) -> None:
        if self._phase == "rest":
            self._end_rest()
        else:
            limit = getattr(self._timeouts, self._phase)
            what = self._phase.replace("_", " ")
            self._fail(EngineTimeout(f"no {what} within {limit:g} s (Timeouts.{self._phase})", phase=self._phase))
