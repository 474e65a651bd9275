"""CallRunner: runs one call, from its wait for a slot through its tries and retries to its Generation.

:class:`~streamfold.Call` is what users see of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from typing import TYPE_CHECKING

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.limits import check_seconds
from streamfold.errors import EngineError, EngineTimeout, StreamfoldError, StreamTruncated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from streamfold._core import Generation
    from streamfold.client.attempt import Attempt
    from streamfold.client.limits import Retries, Slots
    from streamfold.client.request import CallRequest

__all__ = ["CallRunner", "RetryLog"]

_logger = logging.getLogger("streamfold")

_WARN_SECONDS = 60.0


class CallRunner:
    """One call. A task of its own, the pump, makes its tries.

    The pump is never cancelled. What ends the call early calls :meth:`abort_soon`, which ends everything that the
    pump waits for. Bound to the running event loop.

    Args:
        rid: the request id of the first try.
        make_attempt: makes the try with that request id.
        retries: how often, and after which pauses, a failed try is repeated.
        slots: limits how many tries run at once.
        registry: the client's calls that have not ended, by the request id of the current try.
        drain: seconds that an abort reads on, unless it says otherwise.
        host_abort: read right before and right after each send, and watched during retry pauses.
        retry_log: counts and logs failed tries.

    Attributes:
        started_at: by ``time.monotonic()``.
        ended: resolved with what was received when the call ends, also after a failure.
        tries: tries so far; 0 while the call waits for its first slot.
        error: what the call failed with.
    """

    def __init__(
        self,
        rid: str,
        make_attempt: Callable[[str], Attempt],
        *,
        retries: Retries,
        slots: Slots,
        registry: dict[str, CallRunner],
        drain: float,
        host_abort: AbortSignal,
        retry_log: RetryLog,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.started_at: float = time.monotonic()
        self.ended: asyncio.Future[Generation] = loop.create_future()
        self.tries: int = 0
        self.error: BaseException | None = None
        self._make_attempt = make_attempt
        self._attempt = make_attempt(rid)
        self._stale_attempt: Attempt | None = None
        self._retries = retries
        self._slots = slots
        self._registry = registry
        self._drain = drain
        self._abort = AbortSignal()
        self._host_abort = host_abort
        self._retry_log = retry_log
        self._ended_at = math.inf

    def start(self, request: CallRequest) -> asyncio.Task[None]:
        """Queue up for a slot.

        Returns:
            The pump, which ends when the call has ended and everything is cleaned up.
        """
        self._registry[self.rid] = self
        self._slot = self._slots.request()
        pump = self._loop.create_task(self._pump(request), name=f"streamfold {self.rid}")
        pump.add_done_callback(self._after_pump)
        return pump

    def end_with(self, generation: Generation) -> None:
        """End at once with ``generation``, in place of :meth:`start`: no request is needed."""
        self._ended_at = self.started_at
        self.ended.set_result(generation)

    # Its state.

    @property
    def rid(self) -> str:
        """The request id of the current try."""
        return self._attempt.rid

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        return len(self.ended.result().token_ids) if self.ended.done() else self._attempt.token_count

    @property
    def age(self) -> float:
        """Seconds from the start to now, or to the end."""
        return self._now - self.started_at

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second since the current try's request was sent; 0.0 before the first token."""
        seconds = self._now - self._attempt.sent_at
        return self.token_count / seconds if seconds > 0 else 0.0

    @property
    def ttft(self) -> float | None:
        """Seconds from sending the current try's request to its first token."""
        attempt = self._attempt
        return attempt.first_token_at - attempt.sent_at if attempt.first_token_at < math.inf else None

    @property
    def last_event(self) -> float | None:
        """Seconds from the last event with a token to now, or to the end."""
        last = self._attempt.last_token_at
        return max(0.0, self._now - last) if last < math.inf else None

    @property
    def aborting(self) -> bool:
        """Whether it is being aborted, or was."""
        return self._abort.is_set()

    @property
    def state(self) -> str:
        """One word or two for a repr."""
        if self.ended.done():
            return str(self.error or self.ended.result().finish_reason or "aborted")
        if self.tries > 1:
            return f"running, try {self.tries}"
        return "running" if self.tries else "waiting for a slot"

    @property
    def _now(self) -> float:
        return min(time.monotonic(), self._ended_at)

    # Ending it, and waiting for its end.

    def abort_soon(self, drain: float | None = None) -> None:
        """Start an abort without waiting for the end; during an abort, end its drain. See :meth:`Call.abort`."""
        if drain is not None:
            check_seconds("drain", drain, optional=False)
        if self.ended.done():
            return
        if self._abort.is_set():
            self._attempt.end_drain()
            return
        self._abort.set()
        self._slots.leave(self._slot)
        connecting = self._attempt.connecting
        self._attempt.abort(self._drain if drain is None else drain)
        if connecting:
            self._finish()  # the pump waits until the connection opens or fails; the callers need not

    @staticmethod
    async def wait(runners: Collection[CallRunner]) -> None:
        """Wait until all calls have ended. Cancelling this aborts them, and still waits: aborts take bounded time."""
        cancelled = None
        while pending := {runner.ended for runner in runners if not runner.ended.done()}:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError as error:  # noqa: PERF203  # a second one ends the drain
                cancelled = error
                for runner in runners:
                    runner.abort_soon()
        if cancelled is not None:
            raise cancelled

    async def result(self) -> Generation:
        """Wait for the end; return the generation or raise the error."""
        await self.wait([self])
        if self.error is not None:
            raise self.error.with_traceback(None)  # the same error each time; its traceback must not grow
        return self.ended.result()

    # The pump.

    async def _pump(self, request: CallRequest) -> None:
        try:
            while await self._try_once(request):
                self._slot = self._slots.request()
        except Exception as error:  # noqa: BLE001  # raised to those who await the call
            self._attempt.error = error  # in place of a failure that was to be retried
        except BaseException as error:  # the event loop is torn down, or Rust panicked
            self._attempt.fail(StreamfoldError(f"the call was interrupted: {error!r}"))
            raise
        finally:
            try:
                await self._attempt.finish()
                if self._stale_attempt is not None:
                    await self._stale_attempt.finish()
            finally:
                self._finish()

    async def _try_once(self, request: CallRequest) -> bool:
        """One try, from the wait for a slot to the end of the retry pause after it; whether another one follows."""
        if not await self._slots.wait(self._slot):
            return False
        try:
            if self._check_abort():
                return False
            if self.tries:
                self._replace_attempt()
            self.tries += 1
            await self._attempt.run(request.with_rid(self.rid), self._check_abort)
            if self._attempt.is_stale and not self._check_abort():
                await self._run_again(request)
        finally:
            self._slots.release()
        await self._attempt.finish()
        error = self._attempt.error
        if not self._may_retry(error) or self._check_abort():
            return False
        pause = self._retries.pause(self.tries, getattr(error, "retry_after", None))
        self._retry_log.add(self, error, pause)
        if await (self._abort | self._host_abort).wait(pause) and not self._abort.is_set():
            self.abort_soon()
        return not self._check_abort()

    async def _run_again(self, request: CallRequest) -> None:
        """Send the request once more, on a new connection: the server had closed a kept one, and this is no retry."""
        if self._stale_attempt is not None:  # of an earlier try
            await self._stale_attempt.finish()
        self._stale_attempt = self._attempt  # its abort is being sent
        self._replace_attempt()
        await self._attempt.run(request.with_rid(self.rid, fresh=True), self._check_abort)

    def _may_retry(self, error: BaseException | None) -> bool:
        if self.tries >= self._retries.tries or self._attempt.token_count:
            return False
        if isinstance(error, EngineError):
            return error.retryable
        return isinstance(error, (StreamTruncated, EngineTimeout))

    def _replace_attempt(self) -> None:
        """Take a new request id: the engine may still be cleaning up the last one."""
        del self._registry[self.rid]
        self._attempt = self._make_attempt(uuid.uuid4().hex)
        self._registry[self.rid] = self

    def _check_abort(self) -> bool:
        """Whether no request may leave any more. Reads the host's flag, and aborts the call if it is set."""
        if not self._abort.is_set() and not self.ended.done() and self._host_abort.is_set():
            self.abort_soon()
        return self._abort.is_set()

    def _after_pump(self, _pump: asyncio.Task[None]) -> None:
        """End a call whose pump was cancelled before its first step, as when the event loop is torn down."""
        if self.ended.done():
            return
        self._abort.set()
        if self._slot.done() and self._slot.result():
            self._slots.release()
        self._slots.leave(self._slot)
        self._finish()

    def _finish(self) -> None:
        """The one place where a call ends."""
        if self.ended.done():
            return
        generation = self._attempt.take()
        error = self._attempt.error
        if self._abort.is_set() and self._may_retry(error):
            error = None  # the failure would have been retried: the abort ended the call
        if isinstance(error, StreamfoldError):
            error.partial = generation
            if self.tries > 1:
                error.args = (f"{error}, after {self.tries} tries", *error.args[1:])
        self.error = error
        self._ended_at = time.monotonic()
        del self._registry[self.rid]
        self.ended.set_result(generation)


class RetryLog:
    """Counts failed tries and logs each as info; one warning a minute stands for all of a client's calls.

    Attributes:
        count: failed tries so far.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self._next_warning = -math.inf
        self._since_warning = 0

    def add(self, runner: CallRunner, error: BaseException | None, pause: float) -> None:
        """Note that a try failed with ``error``, and is repeated in ``pause`` seconds."""
        now = asyncio.get_running_loop().time()
        self.count += 1
        self._since_warning += 1
        message = f"try {runner.tries} of request {runner.rid} failed, retrying in {pause:.1f} s: {error}"
        if now < self._next_warning:
            _logger.info("%s", message)
            return
        _logger.warning("%s (%s failed since the last warning; each is logged as info)", message, self._since_warning)
        self._next_warning = now + _WARN_SECONDS
        self._since_warning = 0
