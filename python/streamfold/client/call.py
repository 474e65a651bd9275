"""A call, from its start to its Generation: one try after the other, until a token comes or there is no hope."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from typing import TYPE_CHECKING

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.limits import check_seconds
from streamfold.errors import EngineError, EngineTimeout, StreamfoldError, StreamTruncated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    import httpx

    from streamfold._core import Generation
    from streamfold.client.attempt import Attempt
    from streamfold.client.limits import Retries, Slots

__all__ = ["Call", "RetryLog"]

log = logging.getLogger("streamfold")

_WARN_SECONDS = 60.0


class Call:
    """One generation that is asked for. Await it for its result, as often and from as many tasks as you like.

    Cancelling a task that awaits it aborts the call, as :meth:`abort` does; the task goes on with the
    ``CancelledError`` when the call has ended. Cancelling that task again ends the drain.

    While no token has come, a failure that may pass leads to another try after a pause: see ``Retries``.

    Made by :meth:`Client.start`.
    """

    # One task, the pump, makes the tries. It is never cancelled: whatever ends the call early sets `_abort`, and
    # whatever the pump waits for ends then.

    def __init__(
        self,
        rid: str,
        attempt: Callable[[str], Attempt],
        *,
        retries: Retries,
        slots: Slots,
        calls: dict[str, Call],
        drain: float,
        host_abort: AbortSignal,
        retry_log: RetryLog,
    ) -> None:
        self._make_attempt = attempt
        self._attempt = attempt(rid)
        self._tries = 0
        self._retries = retries
        self._slots = slots
        self._calls = calls
        self._drain = drain
        self._host_abort = host_abort
        self._retry_log = retry_log
        self._loop = loop = asyncio.get_running_loop()

        self.ended: asyncio.Future[Generation] = loop.create_future()  # what was kept, after a failure too
        self._abort = AbortSignal()
        self.started = loop.time()
        self._error: BaseException | None = None
        self._ended_at = math.inf

    def run(self, request: Callable[[str], httpx.Request]) -> asyncio.Task[None]:
        """Queue up for a slot and begin; the pump, which ends when everything is tidied up.

        Args:
            request: makes the request with that id.
        """
        self._calls[self.rid] = self
        self._place = self._slots.request()
        pump = self._loop.create_task(self._pump(request), name=f"streamfold {self.rid}")
        pump.add_done_callback(self._after_pump)
        return pump

    def answer(self, generation: Generation) -> None:
        """End at once with ``generation``: there is nothing to ask the engine for."""
        self._ended_at = self.started
        self.ended.set_result(generation)

    # What it is doing.

    @property
    def rid(self) -> str:
        """The request id that the engine knows it by. Each try has another one."""
        return self._attempt.rid

    @property
    def tries(self) -> int:
        """How many tries have begun; 0 while it waits for its first slot."""
        return self._tries

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        return len(self.ended.result().token_ids) if self.ended.done() else self._attempt.token_count

    @property
    def age(self) -> float:
        """Seconds since the start, waits for a slot and pauses included; stands still once the call has ended."""
        return self._now - self.started

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second since the request of the current try was sent; 0.0 before the first token."""
        seconds = self._now - self._attempt.sent_at
        return self.token_count / seconds if seconds > 0 else 0.0

    @property
    def ttft(self) -> float | None:
        """Seconds from the sending of the request to the first token; None before it."""
        attempt = self._attempt
        return attempt.first_token_at - attempt.sent_at if attempt.first_token_at < math.inf else None

    @property
    def last_event(self) -> float | None:
        """Seconds since the last event that brought a token; None before it. Stands still once the call has ended."""
        last = self._attempt.last_token_at
        return max(0.0, self._now - last) if last < math.inf else None

    @property
    def _now(self) -> float:
        return min(self._loop.time(), self._ended_at)

    def __repr__(self) -> str:
        state: object
        if self.ended.done():
            state = self._error or self.ended.result().finish_reason or "cut"
        elif self._tries > 1:
            state = f"running, try {self._tries}"
        else:
            state = "running" if self._tries else "waiting for a slot"
        return f"<Call {self.rid}: {self.token_count} tokens, {state}>"

    # Its end, waited for or brought about.

    def __await__(self) -> Generator[object, None, Generation]:
        return self._result().__await__()

    async def abort(self, drain: float | None = None) -> Generation:
        """End the call and give what has arrived. After its end: give what there was. Safe to call from anywhere.

        The engine is told first; the socket is closed when it has answered, or after a second. A second abort ends
        the drain. No request leaves afterwards, and a pause between two tries ends at once.

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
        if self.ended.done():
            return
        if self._abort.is_set():
            self._attempt.hasten()
            return
        self._abort.set()
        self._slots.leave(self._place)
        self._attempt.cut(self._drain if drain is None else drain)
        if self._attempt.opening:
            self._settle()  # the pump has to wait for the connection to open or fail; nobody else has to

    @property
    def error(self) -> BaseException | None:
        """What it failed with; None as long as it runs, or if it has not."""
        return self._error

    @property
    def aborting(self) -> bool:
        """Whether it is being aborted, or has been."""
        return self._abort.is_set()

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

    async def _pump(self, request: Callable[[str], httpx.Request]) -> None:
        try:
            while await self._try(request):
                self._place = self._slots.request()
        except Exception as error:  # noqa: BLE001  # it belongs to those who await the call
            self._attempt.error = error  # in place of a failure that was to be retried
        except BaseException as error:  # somebody tears the loop down, or a panic
            self._attempt.fail(StreamfoldError(f"the call broke off: {error!r}"))
            raise
        finally:
            try:
                await self._attempt.finish()
            finally:
                self._settle()

    async def _try(self, request: Callable[[str], httpx.Request]) -> bool:
        """One try, from the queue for a slot to the end of the pause after it; whether another one follows."""
        if not await self._slots.wait(self._place):
            return False
        try:
            if self._is_aborted():
                return False
            if self._tries:
                self._renew()
            self._tries += 1
            await self._attempt.run(request(self.rid), self._is_aborted)
        finally:
            self._slots.release()
        await self._attempt.finish()
        error = self._attempt.error
        if not self._may_try_again(error) or self._is_aborted():
            return False
        pause = self._retries.pause(self._tries, getattr(error, "retry_after", None))
        self._retry_log.add(self, error, pause)
        if await (self._abort | self._host_abort).wait(pause) and not self._abort.is_set():
            self.abort_soon()
        return not self._is_aborted()

    def _may_try_again(self, error: BaseException | None) -> bool:
        if self._tries >= self._retries.tries or self._attempt.token_count:
            return False
        if isinstance(error, EngineError):
            return error.retryable
        return isinstance(error, (StreamTruncated, EngineTimeout))

    def _renew(self) -> None:
        """Take another request id: the engine may still be clearing the last one away."""
        del self._calls[self.rid]
        self._attempt = self._make_attempt(uuid.uuid4().hex)
        self._calls[self.rid] = self

    def _is_aborted(self) -> bool:
        """Whether no request may leave any more. A host that is aborting has aborted this call too."""
        if not self._abort.is_set() and not self.ended.done() and self._host_abort.is_set():
            self.abort_soon()
        return self._abort.is_set()

    def _after_pump(self, _pump: asyncio.Task[None]) -> None:
        """End a call whose pump was cancelled before its first step: a loop that is torn down does that."""
        if self.ended.done():
            return
        if not self._abort.is_set():
            self._abort.set()
        if self._place.done() and self._place.result():
            self._slots.release()
        self._slots.leave(self._place)
        self._settle()

    def _settle(self) -> None:
        """The one place where a call ends."""
        if self.ended.done():
            return
        generation = self._attempt.take()
        error = self._attempt.error
        if self._abort.is_set() and self._may_try_again(error):
            error = None  # it was no end of the call: the abort is
        if isinstance(error, StreamfoldError):
            error.partial = generation
            if self._tries > 1:
                error.args = (f"{error}, after {self._tries} tries", *error.args[1:])
        self._error = error
        self._ended_at = self._loop.time()
        del self._calls[self.rid]
        self.ended.set_result(generation)


class RetryLog:
    """Tells of tries that failed: each as a note, and a warning now and then, however many calls there are.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._warn_again = -math.inf
        self._since = 0

    def add(self, call: Call, error: BaseException | None, pause: float) -> None:
        """Tell that ``call`` has failed with ``error`` and tries again in so many seconds."""
        now = asyncio.get_running_loop().time()
        self.count += 1
        self._since += 1
        told = f"try {call.tries} of request {call.rid} failed, the next one follows in {pause:.1f} s: {error}"
        if now < self._warn_again:
            log.info("%s", told)
            return
        log.warning("%s (%s failed since the last warning; each is logged as info)", told, self._since)
        self._warn_again = now + _WARN_SECONDS
        self._since = 0
