"""Attempt: one try of a call, from opening its connection to the last byte of the response that is read.

It executes the table in :mod:`streamfold.client.attempt_state`, which holds the rules: what the driver reports, timers
and aborts become events, and the table's actions are executed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from streamfold.client.attempt_state import ABORTING, PHASES, TABLE, Action, Event, State, head_event
from streamfold.client.deadlines import Deadline
from streamfold.client.limits import Default
from streamfold.client.progress import Progress
from streamfold.client.request import replaced
from streamfold.client.responses import error_from_failure, error_from_response, is_duplicate_rid
from streamfold.errors import EngineError, EngineTimeout, StreamfoldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold._core import Generation
    from streamfold.client.abort_batches import PendingAbort
    from streamfold.client.control import EngineControl
    from streamfold.client.deadlines import Deadlines
    from streamfold.client.drivers.base import Driver, Failure, Head, Kind
    from streamfold.client.observer import Phase as CallPhase
    from streamfold.client.request import CallRequest

__all__ = ["Attempt", "AttemptOwner"]

_logger = logging.getLogger("streamfold")

_QUEUED = "no first token of request %s in %g s: requests wait at the engine, as long again is waited"

# After the terminal event the body is read to its end: closing the socket would look like a client that disconnected.
_REST_SECONDS = 1.0
# Engines that see the socket close first may not abort: so long their answers are waited for without a drain.
_HURRIED_REPLY_SECONDS = 0.1
_DRAIN_SECONDS_EACH = 0.001  # that one of many terminal events takes

_Phase = Literal["first_token", "next_token", "rest"]


class AttemptOwner(Protocol):
    """The call that a try belongs to."""

    def check_abort(self) -> bool:
        """Whether no request may leave any more. Calls :meth:`Attempt.abort` first if a flag of the host says so."""

    def on_tokens(self) -> None:
        """As many tokens have come as :meth:`Attempt.notify_at` asked for."""

    def is_host_aborting(self) -> bool:
        """Whether a flag of the host says so. Nothing is aborted for that."""

    def on_phase(self, phase: CallPhase) -> None:
        """A phase has begun. Not called in a row for the same one."""

    def on_over(self) -> None:
        """Nothing more is sent or read. Called once."""

    def on_settled(self) -> None:
        """An abort request has been answered too, if one had to be sent. Called once, after :meth:`on_over`."""


class Attempt(Progress):
    """One request under one request id.

    :meth:`start` is called once. :meth:`abort` ends it early.

    Args:
        rid: the request id.
        request: what is sent under it. Its body is dropped at the first token: it is not sent again.
        driver: carries the request.
        control: sends the abort request.
        deadlines: of the client.

    Attributes:
        error: what it failed with; :meth:`start` does not raise it.
        is_stale: whether a kept connection failed before the first byte of the reply.
    """

    def __init__(
        self,
        rid: str,
        request: CallRequest,
        *,
        driver: Driver,
        control: EngineControl,
        deadlines: Deadlines,
    ) -> None:
        super().__init__()
        self.rid = rid
        self.error: BaseException | None = None
        self.is_stale: bool = False
        self._request = request
        self._driver = driver
        self._control = control
        self._timeouts = request.timeouts
        self._notify_at = 0
        self._state = State.IDLE
        self._phase_of_call: CallPhase | None = None  # the last one that the owner was told of
        self._owner: AttemptOwner | None = None  # until it has no use for anything more
        self._has_flag = self._is_observed = False
        self._head: Head | None = None
        self._failure: Failure | None = None
        self._is_over = False  # nothing more is sent or read
        self._is_settled = False
        self._told_over = False
        self._is_finished = False  # the terminal event was received
        self._lacks_abort = False  # an abort ended the stream in another way than by a terminal event
        self._pending: PendingAbort | None = None  # the abort request, once it was asked for
        self._phase: _Phase | None = None
        self._deadlines = deadlines
        self._deadline = Deadline(deadlines, self._expired, self._look)  # of the phase
        self._is_extended = False  # the time to the first token
        self._drain = self._longest_drain = 0.0
        self._is_draining = False
        self._drain_until = 0.0  # by the clock of the event loop, at most
        self._abort_deadline: Deadline | None = None  # of the reply to the abort request, then of the drain
        self._abort_due_at = math.inf

    def notify_at(self, count: int) -> bool:
        """Tell the owner once, when ``count`` tokens have come. Returns whether they have come already."""
        self._notify_at = count
        return self._exchange is not None and self._exchange.notify_at(count)

    @property
    def connecting(self) -> bool:
        """Whether the connection is being opened."""
        return self._state is State.CONNECTING

    def start(self, owner: AttemptOwner, *, fresh: bool, has_flag: bool, is_observed: bool = True) -> None:
        """Send the request and read the response to its end. Not after :meth:`abort`.

        Args:
            owner: is told the end, maybe before this returns.
            fresh: whether to use a new connection only.
            has_flag: whether the owner looks at a flag of the host. Its ``check_abort`` is called right before the
                request is sent, which does not leave if this is true, and again right after.
            is_observed: whether the owner is told of phases.
        """
        self._owner, self._has_flag, self._is_observed = owner, has_flag, is_observed
        self._note_start()
        try:
            self._exchange = self._driver.start(self._request.with_rid(self.rid, fresh=fresh), self._listen)
        except Exception as error:  # noqa: BLE001  # raised to those who await the call
            self._end(error)
        except BaseException as error:  # Rust panicked
            self._end(StreamfoldError(f"the call was interrupted: {error!r}"))
            raise
        else:
            if self._notify_at:
                self._exchange.notify_at(self._notify_at)
            self._on(Event.START)

    def take(self) -> Generation:
        """Return what was received. Nothing more is parsed afterwards."""
        if self._generation is None:
            taken = self._request.nothing() if self._exchange is None else self._exchange.take()
            self._generation = generation = self._completed(taken)
            if isinstance(self.error, EngineTimeout) and generation.finish_reason in ("stop", "length"):
                self.error = None  # the terminal event arrived during the abort
        return self._generation

    def snapshot(self) -> Generation:
        """A copy of what was received so far; of nothing that runs anything changes."""
        if self._generation is not None:
            return replaced(self._generation)
        return self._request.nothing() if self._exchange is None else self._completed(self._exchange.snapshot())

    def _completed(self, generation: Generation) -> Generation:
        return replaced(generation, finish_reason="abort") if self._lacks_abort else generation

    # Ending early.

    def abort(self, drain: float | None = None) -> None:
        """Abort the request at the engine, read on for ``drain`` seconds, close. Idempotent.

        Without ``drain``, for as long as the request has it; as part of a storm, which keeps engines and router busy,
        for as long as other aborts get their terminal events, up to ``Timeouts.drain``.

        The abort request is sent first. The socket is closed when the engine has answered, or is silent for 1 s.
        """
        if self._state not in ABORTING:
            self._drain = self._request.drain if drain is None else drain
            self._longest_drain = self._timeouts.drain if drain is None else drain
        self._on(Event.ABORT)

    def end_drain(self) -> None:
        """End an abort's drain, and shorten its wait for the engine's answer."""
        self._on(Event.HASTEN)

    def interrupt(self, error: BaseException) -> None:
        """Read nothing more, and end with ``error``, unless it failed before or is being aborted."""
        if self._exchange is None or self._is_over:
            self._fail(Event.FAILED, error)
        else:
            self._end(error)
            self._exchange.end()

    def _fail(self, event: Event, error: BaseException) -> None:
        if self._state not in ABORTING:
            self.error = self.error or error
        self._on(event)

    # The table.

    def _on(self, event: Event) -> None:
        """Make the transition that the table names."""
        self._state, actions = TABLE[self._state][event]
        if self._is_observed:
            self._tell(PHASES.get(self._state))
        for action in actions:
            self._actions[action](self)

    def _tell(self, phase: CallPhase | None) -> None:
        if phase is not None and phase != self._phase_of_call and self._owner is not None:
            self._phase_of_call = phase
            self._owner.on_phase(phase)

    def _send(self) -> None:
        """Nothing is awaited between the look at the host's flag and the first byte."""
        if self._exchange is None or self._owner is None or (self._has_flag and self._owner.check_abort()):
            return
        self._note_sent()
        if self._state is State.SENDING:
            self._on(Event.SENT)
        else:  # it did not leave: the server had closed the kept connection
            self._set_phase("first_token", self._timeouts.first_token)
        self._exchange.send()
        if self._has_flag:
            asyncio.get_running_loop().call_soon(self._look_for_abort)  # the host's flag may have been set meanwhile

    def _look_for_abort(self) -> None:
        if self._has_flag and self._owner is not None and not self._is_over:
            self._owner.check_abort()

    def _send_abort(self) -> None:
        self._pending = self._control.send_abort(
            self.rid, has_tokens=self.token_count > 0, answered=self._on_abort_answered
        )
        self._pending.is_finished = self._is_finished
        if self._head is not None or self._is_over:
            self._note_responded()
        if self._exchange is not None:
            self._exchange.abort()

    def _on_abort_answered(self) -> None:
        self._on(Event.ABORT_ANSWERED)

    def _note_responded(self) -> None:
        """The headers were received, or never will be."""
        if self._pending is not None:
            self._pending.has_responded = True

    def _close(self) -> None:
        if self._exchange is not None:
            self._exchange.end()

    def _settle(self) -> None:
        if self._is_draining:
            self._is_draining = False
            self._control.draining -= 1
        self._phase = None
        self._deadline.close()
        self._stop_abort_timer()
        self._close()  # unless the connection is kept
        self._is_settled = True
        self._call_back()

    def _call_back(self) -> None:
        """Tell the owner each of the two ends, in their order, once."""
        owner = self._owner
        if owner is None or not self._is_over:
            return
        if not self._told_over:
            self._told_over = True
            owner.on_over()
        if self._is_settled and self._owner is not None:
            self._owner = None
            owner.on_settled()

    # What the driver reports.

    def _listen(self, kind: Kind, detail: Any) -> None:  # noqa: ANN401  # each kind has its own
        if self._is_over:
            return
        try:
            self._reports[kind](self, detail)
        except Exception as error:  # noqa: BLE001  # a fault of our own
            self._break_off(error)

    def _break_off(self, error: Exception) -> None:
        """End at once, in any state: who awaits the call gets the error, and does not wait for ever."""
        self._state = State.ABORTED  # which takes whatever may still come
        self.error = StreamfoldError(f"the call was interrupted: {error!r}")
        self.error.__cause__ = error
        self._is_over = True
        self._note_responded()
        self._settle()

    def _on_connected(self, _: None) -> None:
        if self._state is State.HEAD:
            self._send()
        else:
            self._on(Event.CONNECTED)

    def _on_head(self, head: Head) -> None:
        self._look_for_abort()
        self._head = head
        self._note_responded()
        self._on(head_event(head.status, is_stream=head.is_stream))

    def _on_token(self, _: None) -> None:
        self._request.drop_body()
        self._on(Event.FIRST_TOKEN)

    def _on_tokens(self, _: None) -> None:
        if self._owner is not None:
            self._owner.on_tokens()

    def _on_finished(self, _: None) -> None:
        self._is_finished = True
        self._on(Event.FINISHED)
        if self._pending is not None:
            self._control.abort_event_at = self._deadlines.now()
            self._pending.finish()

    def _on_overrun(self, _: None) -> None:
        self._on(Event.OVERRUN)

    def _on_error(self, error: StreamfoldError) -> None:
        if self._is_aborted_by_others(error):
            self._lacks_abort = True
            self._on_finished(None)
            return
        # Where the engine has the client's own id twice, a router has sent the request again: the first one runs on.
        runs_on = is_duplicate_rid(error) and self.rid != self._request.given_rid
        is_last_word = isinstance(error, EngineError) and not runs_on
        self._fail(Event.ERROR_EVENT if is_last_word else Event.DECODE_ERROR, error)

    def _is_aborted_by_others(self, error: StreamfoldError) -> bool:
        """Whether this is how the engine ends a stream that was aborted, by us or the host, with all others."""
        if self._state not in (State.WAITING, State.STREAMING) or not self._control.engine.may_be_abort(error):
            return False
        is_host_aborting = self._owner is not None and self._owner.is_host_aborting()
        return is_host_aborting or self._control.may_have_ended(self.sent_at)

    def _on_failed(self, failure: Failure) -> None:
        self._failure = failure
        self.is_stale = failure.is_stale

    def _on_ended(self, _: None) -> None:
        if self._failure is not None and self._state is not State.REST:
            self._end(error_from_failure(self._failure, self._request.url, self._timeouts.connect))
        elif self._head is not None and not self._head.is_stream and self._exchange is not None:
            hint = self._control.engine.hint(self._head.status)
            self._end(error_from_response(self._head, self._exchange.take_body(), hint))
        else:
            self._end()

    def _end(self, error: BaseException | None = None) -> None:
        """Nothing more is read."""
        self._note_responded()
        self._phase = None  # the deadline of the last one may pass: it means nothing any more
        self._is_over = True
        if error is None:
            self._on(Event.ENDED)
        else:
            self._fail(Event.FAILED, error)
        self._call_back()

    # Timers.

    def _set_phase(self, phase: _Phase | None, seconds: float | None) -> None:
        self._phase = phase
        self._deadline.set(seconds)

    def _read_on(self) -> None:
        if self._exchange is not None:
            self._exchange.urgent()

    def _look(self) -> None:
        """The deadline has passed: read what has arrived, and move the deadline if a token came in time."""
        if self._phase == "next_token" and self._move_deadline():
            return
        self._read_on()
        if self._phase == "next_token":
            self._move_deadline()

    def _move_deadline(self) -> bool:
        limit = self._timeouts.next_token
        left = math.inf if limit is None else self.last_token_at + limit - time.monotonic()
        if left > 0:
            self._deadline.set(left)
        return left > 0

    def _expired(self) -> None:
        if self._phase == "rest":
            self._on(Event.REST_EXPIRED)
        elif self._phase == "next_token" and self._move_deadline():
            return
        elif self._phase == "first_token" and isinstance(self._timeouts.first_token, Default) and not self._is_extended:
            self._extend(self._timeouts.first_token)
        elif self._phase is not None:
            self._time_out(self._phase)

    def _time_out(self, phase: Literal["first_token", "next_token"]) -> None:
        limit, awaited = getattr(self._timeouts, phase), phase.replace("_", " ")
        since = time.monotonic() - self.sent_at
        more = f", extended once: {since:.0f} s" if self._is_extended and since > 1.5 * limit else ""
        error = EngineTimeout(f"no {awaited} within {limit:g} s (Timeouts.{phase}{more})", phase=phase)
        self._fail(Event.TOKEN_EXPIRED, error)

    def _extend(self, seconds: float) -> None:
        """Wait as long again, unless no request waits at the engine."""
        self._is_extended = True
        self._set_phase("first_token", seconds)
        self._control.ask_for_queue(self._on_queue)

    def _on_queue(self, has_queue: bool) -> None:  # noqa: FBT001  # the answer
        if self._phase != "first_token" or self._is_over or self._state in ABORTING:
            return
        if has_queue:
            _logger.warning(_QUEUED, self.rid, self._timeouts.first_token)
        else:
            self._time_out("first_token")

    def _set_abort_timer(self, seconds: float) -> None:
        if self._abort_deadline is None:
            self._abort_deadline = Deadline(self._deadlines, self._abort_expired, self._read_on)
        self._abort_due_at = self._deadlines.now() + seconds
        self._abort_deadline.set(seconds)

    def _stop_abort_timer(self) -> None:
        if self._abort_deadline is not None:
            self._abort_deadline.close()
            self._abort_deadline = None

    def _abort_expired(self) -> None:
        if self._is_draining:
            self._on_drained()
        else:
            self._on(Event.REPLY_EXPIRED)

    def _hurry_reply(self) -> None:
        if self._deadlines.now() + _HURRIED_REPLY_SECONDS < self._abort_due_at:
            self._set_abort_timer(_HURRIED_REPLY_SECONDS)

    def _arm_drain(self) -> None:
        if self._drain > 0:
            self._tell("drain")
            self._control.draining += 1
            self._is_draining = True
            self._drain_until = self._deadlines.now() + self._longest_drain
            self._set_abort_timer(self._drain)
        else:
            self._stop_abort_timer()
            self._on(Event.DRAIN_EXPIRED)

    def _on_drained(self) -> None:
        control, begun_at = self._control, self._drain_until - self._longest_drain
        quiet = self._drain + _DRAIN_SECONDS_EACH * control.draining
        until = min(self._drain_until, max(begun_at, control.abort_event_at) + quiet)
        left = until - self._deadlines.now()
        if left > 0:
            self._set_abort_timer(left)
        else:
            self._on(Event.DRAIN_EXPIRED)

    _actions: ClassVar[dict[Action, Callable[[Attempt], None]]] = {
        Action.CONNECT: lambda _: None,  # by Driver.start
        Action.SEND: _send,
        Action.SEND_ABORT: _send_abort,
        Action.CLOSE: _close,
        Action.SETTLE: _settle,
        Action.ARM_FIRST_TOKEN: lambda self: self._set_phase("first_token", self._timeouts.first_token),
        Action.ARM_NEXT_TOKEN: lambda self: self._set_phase("next_token", self._timeouts.next_token),
        Action.ARM_REST: lambda self: self._set_phase("rest", _REST_SECONDS),
        Action.DISARM: lambda self: self._set_phase(None, None),
        Action.HURRY_REPLY: _hurry_reply,
        Action.ARM_DRAIN: _arm_drain,
    }
    _reports: ClassVar[dict[Kind, Callable[[Attempt, Any], None]]] = {
        "connected": _on_connected,
        "head": _on_head,
        "first_token": _on_token,
        "tokens": _on_tokens,
        "finished": _on_finished,
        "overrun": _on_overrun,
        "error": _on_error,
        "failed": _on_failed,
        "ended": _on_ended,
    }
