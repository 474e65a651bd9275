"""CallRunner: runs one call, from its wait for a slot through its tries and retries to its Generation.

:class:`~streamfold.Call` is what users see of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING

from streamfold.client.limits import check_seconds
from streamfold.client.request import new_rid
from streamfold.client.responses import is_duplicate_rid
from streamfold.errors import EngineError, EngineTimeout, StreamfoldError, StreamTruncated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy as np
    import numpy.typing as npt

    from streamfold._core import Durations, Generation
    from streamfold.client.abort_signal import AbortSignal
    from streamfold.client.attempt import Attempt
    from streamfold.client.limits import Retries, Slots
    from streamfold.client.observer import Observation, Phase
    from streamfold.client.request import CallRequest
    from streamfold.client.side_data import MissingSideData

__all__ = ["CallRunner", "RetryLog"]

_logger = logging.getLogger("streamfold")

_WARN_SECONDS = 60.0
_MAX_EMPTY_REPLIES = 3


class CallRunner:
    """One call. It has no task: callbacks lead from the slot to the try, to its end, to a retry pause and so on.

    Bound to the running event loop.

    Args:
        request: what its tries send.
        new_attempt: makes a try of it, with a request id.
        retries: how often, and after which pauses, a failed try is repeated.
        slots: limits how many tries run at once.
        registry: the client's calls that have not ended, by the request id of the current try.
        host_abort: read right before and right after each send, and watched during retry pauses. None: never set.
        retry_log: counts and logs failed tries.
        missing: notes the side data that was requested and not received.
        observation: tells observers of it. None: there are none.
        on_done: called once, when the call has ended and everything is cleaned up.

    Attributes:
        started_at: by ``time.monotonic()``.
        ended: resolved with what was received when the call ends, also after a failure.
        tries: tries so far; 0 while the call waits for its first slot.
        error: what the call failed with.
    """

    def __init__(
        self,
        request: CallRequest,
        new_attempt: Callable[[str, CallRequest], Attempt],
        *,
        retries: Retries,
        slots: Slots,
        registry: dict[str, CallRunner],
        host_abort: AbortSignal | None,
        retry_log: RetryLog,
        missing: MissingSideData,
        observation: Observation | None,
        on_done: Callable[[CallRunner], object],
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.started_at: float = time.monotonic()
        self.ended: asyncio.Future[Generation] = loop.create_future()
        self.tries: int = 0
        self.error: BaseException | None = None
        self._request = request
        self._new_attempt = new_attempt
        self._attempt = new_attempt(request.options.rid, request)
        self._unsettled = 0  # tries that were started: one, and those whose kept connection the server had closed
        self._retries = retries
        self._slots = slots
        self._registry = registry
        self._is_aborting = False
        self._has_host_begun = False  # the abort, by its flag alone
        self._host_abort = host_abort
        self._retry_log = retry_log
        self._missing = missing
        self._observation = observation
        self._on_done = on_done
        self._pause_timer: asyncio.Handle | None = None
        self._ignore_host: Callable[[], None] | None = None  # ends the watch of the host's flag, after a pause
        self._waiters: list[asyncio.Future[None]] = []
        self._token_waiters: dict[asyncio.Future[None], int] = {}  # each for so many tokens
        self._ended_at = math.inf
        self._slot: asyncio.Future[bool] | None = None
        self._first_try_at = math.inf
        self._empty_replies = 0

    def start(self) -> None:
        """Queue up for a slot. The first request leaves in a later pass of the event loop."""
        self._registry[self.rid] = self
        self._queue_up()

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

    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens received so far: int32 ``[n]``."""
        return self.ended.result().token_ids.copy() if self.ended.done() else self._attempt.token_ids()

    def snapshot(self) -> Generation:
        """What was received so far: what an abort without a drain would give now."""
        return self.ended.result() if self.ended.done() else self._noted(self._attempt.snapshot())

    def _noted(self, generation: Generation) -> Generation:
        """A generation of the current try, with what is missing in it, and when its tokens came."""
        missing, timings = self._missing.names(self._request, generation), self._attempt.timings(self.started_at)
        generation._complete(missing, timings)  # noqa: SLF001  # nobody has the generation yet
        return generation

    def generation(self) -> Generation:
        """What was received, when the call has ended."""
        return self.ended.result()

    def gaps(self) -> tuple[Durations, int]:
        """The times between the tokens so far, of the current try, and how many reads brought them."""
        return self._attempt.gaps()

    @property
    def failure(self) -> BaseException | None:
        """What the current try failed with; a retry may follow."""
        return self._attempt.error

    @property
    def engine_name(self) -> str:
        """The kind of server."""
        return self._request.engine.name

    @property
    def base_url(self) -> str:
        """Where requests are sent to."""
        return str(self._request.base_url)

    @property
    def server(self) -> tuple[str, int]:
        """Address and port of the server; of a Unix socket its path and 0."""
        origin = self._request.base_url.origin
        return origin.host, origin.port

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
        return self._is_aborting

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
        if self._is_aborting:
            if self._has_host_begun and drain is None:
                self._has_host_begun = False  # the host sets its flag and cancels the task: one abort
            else:
                self._attempt.end_drain()
            return
        self._is_aborting = True
        if self._slot is not None:
            self._slots.leave(self._slot)
        if self._pause_timer is not None:
            self._end_pause()
            self._end()
            return
        connecting = self._attempt.connecting
        self._attempt.abort(drain)
        if connecting:
            self._finish()  # the try goes on until the connection opens or fails; the callers need not wait for that

    def interrupt(self, error: BaseException) -> None:
        """End soon, as the event loop is torn down. A request that has left is aborted at the engine."""
        self._attempt.interrupt(StreamfoldError(f"the call was interrupted: {error!r}"))
        if not self._is_aborting:
            self.abort_soon(drain=0.0)

    @staticmethod
    async def wait(runners: Collection[CallRunner]) -> None:
        """Wait until all calls have ended. Cancelling this aborts them, and still waits: aborts take bounded time."""
        cancelled = None
        for runner in runners:
            while not runner.ended.done():
                waiter = runner._loop.create_future()  # noqa: SLF001  # to cancel a task cancels what it awaits
                runner._waiters.append(waiter)  # noqa: SLF001
                try:
                    await waiter
                except asyncio.CancelledError as error:  # a second one ends the drain
                    cancelled = error
                    for each in runners:
                        each.abort_soon()
        if cancelled is not None:
            raise cancelled

    async def wait_tokens(self, count: int) -> int:
        """Wait for ``count`` tokens or the end; return how many there are. Cancelling this ends the wait only."""
        if self.token_count < count and not self.ended.done():
            waiter = self._loop.create_future()
            self._token_waiters[waiter] = count
            self._watch_tokens()
            try:
                await waiter
            finally:
                del self._token_waiters[waiter]
        return self.token_count

    async def result(self) -> Generation:
        """Wait for the end; return the generation or raise the error."""
        await self.wait((self,))
        if self.error is not None:
            raise self.error.with_traceback(None)  # the same error each time; its traceback must not grow
        return self.ended.result()

    # Its course.

    def _queue_up(self) -> None:
        self._tell("queue", time.monotonic())
        self._slot = slot = self._slots.request()
        slot.add_done_callback(self._on_slot)

    def _on_slot(self, slot: asyncio.Future[bool]) -> None:
        self._slot = None
        if not slot.result():  # it has left the queue
            self._end()
        elif self.check_abort():
            self._slots.release()
            self._end()
        else:
            if self.tries:
                self._replace_attempt()
            else:
                self._first_try_at = time.monotonic()
            self.tries += 1
            self._try()

    def _try(self, *, fresh: bool = False) -> None:
        self._unsettled += 1
        is_observed = self._observation is not None
        self._attempt.start(self, fresh=fresh, has_flag=self._host_abort is not None, is_observed=is_observed)

    def _watch_tokens(self) -> None:
        """Ask the try to tell when there are enough tokens for the next of those who wait."""
        counts = [count for waiter, count in self._token_waiters.items() if not waiter.done()]
        if counts and self._attempt.notify_at(min(counts)):
            self.on_tokens()

    # What the try calls: see AttemptOwner.

    def on_tokens(self) -> None:
        """There are enough tokens for some of those who wait for them."""
        so_far = self.token_count
        for waiter, count in self._token_waiters.items():
            if count <= so_far and not waiter.done():
                waiter.set_result(None)
        self._watch_tokens()

    def on_phase(self, phase: Phase) -> None:
        """The try has begun a phase."""
        if self._observation is not None:
            now = time.monotonic()
            self._observation.phase(self, phase, min(now, self._attempt.first_token_at) if phase == "tokens" else now)

    def _tell(self, phase: Phase, at: float) -> None:
        if self._observation is not None:
            self._observation.phase(self, phase, at)

    def on_over(self) -> None:
        """Nothing more of the try is sent or read."""
        if self._attempt.is_stale and not self.check_abort():
            # The server had closed a kept connection: the request is sent once more, on a new one. It is no retry.
            self._replace_attempt()
            self._try(fresh=True)
        else:
            self._slots.release()

    def on_settled(self) -> None:
        """A try waits for nothing any more, not even for the answer to its abort request."""
        self._unsettled -= 1
        if self._unsettled:
            return
        self._attempt.take()
        self._note_empty_reply()
        error = self._attempt.error
        if self.ended.done() or not self._may_retry(error) or self.check_abort():
            self._end()
            return
        pause = self._retries.pause(self.tries, getattr(error, "retry_after", None))
        self._retry_log.add(self, error, pause)
        self._tell("retry", time.monotonic())
        self._pause_timer = self._loop.call_later(pause, self._after_pause)
        if self._host_abort is not None:
            self._ignore_host = self._host_abort.subscribe(self.abort_soon, on_error=self._fail)

    def _note_empty_reply(self) -> None:
        """Stop at the third reply with status 200 and no byte, if the engine answers others: it fails on this one."""
        error = self._attempt.error
        if not isinstance(error, StreamTruncated) or error.received:
            return
        self._empty_replies += 1
        if self._empty_replies >= _MAX_EMPTY_REPLIES and self._retry_log.succeeded_at > self._first_try_at:
            self._attempt.error = EngineError(
                f"{self._empty_replies} empty replies, while other calls succeed: the engine failed on this request; "
                "see its log; are the sampling parameters right?",
                status=200,
            )
            self._attempt.error.__cause__ = error

    def _after_pause(self) -> None:
        if not self.check_abort():  # otherwise that has ended the call
            self._end_pause()
            self._queue_up()

    def _end_pause(self) -> None:
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None
        if self._ignore_host is not None:
            self._ignore_host()
            self._ignore_host = None

    def _may_retry(self, error: BaseException | None) -> bool:
        if error is None or self._retries.is_last(self.tries) or self._attempt.token_count:
            return False
        if is_duplicate_rid(error):
            return self.rid != self._request.given_rid  # the next try has another id
        if isinstance(error, EngineError):
            return error.retryable
        return isinstance(error, (StreamTruncated, EngineTimeout))

    def _replace_attempt(self) -> None:
        """Take a new request id: the engine may still be cleaning up the last one."""
        del self._registry[self.rid]
        self._attempt = self._new_attempt(new_rid(), self._request)
        self._registry[self.rid] = self
        self._watch_tokens()

    def check_abort(self) -> bool:
        """Whether no request may leave any more. Reads the host's flag, and aborts the call if it is set."""
        if not self._is_aborting and not self.ended.done() and self.is_host_aborting():
            self._has_host_begun = True
            self.abort_soon()
        return self._is_aborting

    def is_host_aborting(self) -> bool:
        """Read the host's flag; if that raises, the call fails with it."""
        try:
            return self._host_abort is not None and self._host_abort.is_set()
        except Exception as error:  # noqa: BLE001  # of any type: it is the host's
            self._fail(error)
            return False

    def _fail(self, error: Exception) -> None:
        """The host's flag cannot be read."""
        self._attempt.error = error  # in place of a failure that was to be retried
        self.abort_soon()

    def _end(self) -> None:
        """Everything is cleaned up."""
        self._finish()
        self._request.drop_body()
        self._on_done(self)

    def _finish(self) -> None:
        """The one place where a call ends."""
        if self.ended.done():
            return
        generation = self._noted(self._attempt.take())
        error = self._attempt.error
        if self._is_aborting and self._may_retry(error):
            error = None  # the failure would have been retried: the abort ended the call
        if isinstance(error, StreamfoldError):
            error.partial = generation
            if is_duplicate_rid(error) and self.rid == self._request.given_rid:
                error.args = (f"{error}: the rid was given to this call; give each call its own, or none",)
            if self.tries > 1:
                error.args = (f"{error}, after {self.tries} tries", *error.args[1:])
        self.error = error
        self._ended_at = time.monotonic()
        if error is None and generation.finish_reason in ("stop", "length"):
            self._retry_log.succeeded_at = self._ended_at
        del self._registry[self.rid]
        self.ended.set_result(generation)
        if self._observation is not None:
            self._observation.end(self, self._ended_at)
        for waiter in (*self._waiters, *self._token_waiters):
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


class RetryLog:
    """Counts failed tries and logs each as info; one warning a minute stands for all of a client's calls.

    Attributes:
        count: failed tries so far.
        succeeded_at: when a call was last finished by the engine, by ``time.monotonic()``.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.succeeded_at: float = -math.inf
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
