"""The state machine of one try of a call: an enum of states and a table (state, event) -> (state, actions).

Pure: no IO, no clock, no asyncio. :class:`~streamfold.client.attempt.Attempt` turns what happens into events, looks up
the transition, and executes its actions in order. The rules, in the order of a try:

Sending
    Nothing leaves once the call is being aborted. While the connection is being opened, an abort settles at once: only
    the connect timeout can end the connecting, and no caller has to wait for that. From then until the request is
    sent, an abort closes the connection.

Reading
    Each state that waits for the engine has a timer: the connect timeout (part of ``CONNECT``, and armed until the
    request is sent), ``first_token`` from the request to the first token, ``next_token`` between tokens (the driver
    moves it at each token, without an event), and the rest limit (``ARM_REST``: 1 s, 64 KiB) for what follows the
    terminal event or an error event, and for a body that is no event stream. ``REST_EXPIRED`` is either of its two
    limits and may be repeated. The body is read to its end, as an early close looks like a client that disconnected.

Failing
    The engine may be working on the request from ``SENT`` until the terminal event, until the end of the body after
    an error event, or until a status other than 200. A try that fails during this time sends an abort request;
    it does not drain. A try that fails at any other time sends none.

Aborting
    The abort request is sent first: some engines that see the connection closed before do not abort. The body is read
    meanwhile. When the abort request was answered, the drain starts, and the connection is closed after it. Who sends
    the request limits the wait: an engine that is silent counts as one that has answered. ``HASTEN`` ends the drain,
    and shortens the wait for the answer to 0.1 s. What is read cannot fail an abort: an error ends it early and leaves
    what was received before.

Settling
    A try settles once, when nothing reads and no answer is awaited. Before that an aborted try closes its connection
    exactly once, unless it was never opened; one that ended by itself does not close it.

A pair that is not in the table is impossible: the driver never reports that event in that state.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold.client.observer import Phase

__all__ = ["ABORTING", "PHASES", "TABLE", "Action", "Event", "State", "Transition", "head_event"]


class _Key(Enum):
    """An enum whose members are fast keys: Enum's own hash is a function in Python."""

    if not TYPE_CHECKING:  # type checkers take it for another signature
        __hash__ = object.__hash__


class State(_Key):
    """What a try waits for."""

    IDLE = auto()  # its turn: nothing was started
    CONNECTING = auto()  # the connection, TLS included
    SENDING = auto()  # the first byte of the request
    HEAD = auto()  # the status and headers
    WAITING = auto()  # the first token of a stream
    STREAMING = auto()  # the next token
    REST = auto()  # the end of the body, after the terminal event
    ERROR_EVENT = auto()  # the end of the body, after an error event
    REFUSED = auto()  # the body of a response with another status than 200
    UNREADABLE = auto()  # the body of a response with status 200 that is no event stream
    CLOSING_REST = auto()  # the reader's end, after closing in REST or REFUSED
    CLOSING_UNREADABLE = auto()  # the reader's end, after closing in UNREADABLE

    # The abort request was sent and is not answered.
    ABORT_DRAIN = auto()  # its answer; the body is read, and is drained next
    ABORT_CLOSE = auto()  # its answer; the body is read, and the connection is closed next
    ABORT_UNREAD = auto()  # its answer; the reader has ended, and the connection is closed next
    ABORT_CLOSED = auto()  # its answer and the reader's end; the connection is closed
    ABORT_ENDED = auto()  # its answer; the reader has ended, and the connection is closed
    # It was answered, or is not awaited.
    DRAINING = auto()  # the end of the body or of the drain
    CLOSING = auto()  # the reader's end; the connection is closed

    DONE = auto()  # nothing: settled by itself, with or without an error
    ABORTED = auto()  # nothing: settled by an abort, or by a failure that needed one


class Event(_Key):
    """What happened."""

    START = auto()
    CONNECTED = auto()  # the connection is open, or a kept one is used
    SENT = auto()  # the first byte of the request leaves now
    HEAD_STREAM = auto()  # status 200, an event stream
    HEAD_REFUSED = auto()  # another status
    HEAD_UNREADABLE = auto()  # status 200, no event stream
    FIRST_TOKEN = auto()  # may be repeated, except in STREAMING
    FINISHED = auto()  # the terminal event was received
    ERROR_EVENT = auto()  # the engine reported an error in the stream
    DECODE_ERROR = auto()  # the stream breaks its format
    OVERRUN = auto()  # the stream goes on far past max_new_tokens
    ENDED = auto()  # the exchange is over: the response is complete, or it was stopped by CLOSE
    FAILED = auto()  # the exchange is over in any other way, or the task of the call was interrupted
    TOKEN_EXPIRED = auto()  # no first or next token in time
    REST_EXPIRED = auto()  # the rest of the body takes too long, or is too long
    REPLY_EXPIRED = auto()  # after HASTEN, the abort request was not answered in time
    DRAIN_EXPIRED = auto()
    ABORT = auto()
    HASTEN = auto()  # end the drain
    ABORT_ANSWERED = auto()  # by the engine, or it failed, or the engine is silent


class Action(_Key):
    """What the driver has to do, at once."""

    CONNECT = auto()  # open the connection, within the connect timeout
    SEND = auto()  # send the request, unless the call is being aborted by now
    SEND_ABORT = auto()
    CLOSE = auto()  # the connection, in any state that it is in
    SETTLE = auto()  # disarm all timers: the result is final
    # Of the first timer. Each replaces the last.
    ARM_FIRST_TOKEN = auto()
    ARM_NEXT_TOKEN = auto()
    ARM_REST = auto()
    DISARM = auto()
    # Of the second timer, which limits an abort. Each replaces the last.
    HURRY_REPLY = auto()  # never later than it is armed for
    ARM_DRAIN = auto()


Transition = tuple[State, tuple[Action, ...]]


def head_event(status: int, *, is_stream: bool) -> Event:
    """The event that the response's head is."""
    if is_stream:
        return Event.HEAD_STREAM
    return Event.HEAD_UNREADABLE if status == 200 else Event.HEAD_REFUSED


#: An abort is under way, or was: failures are no longer recorded.
ABORTING = frozenset(
    {
        State.ABORT_DRAIN,
        State.ABORT_CLOSE,
        State.ABORT_UNREAD,
        State.ABORT_CLOSED,
        State.ABORT_ENDED,
        State.DRAINING,
        State.CLOSING,
        State.ABORTED,
    }
)

#: What observers of the call are told of a state; of one that is not here, nothing. A drain is told if it takes time.
PHASES: Mapping[State, Phase] = {
    State.CONNECTING: "connect",
    State.HEAD: "prefill",
    State.STREAMING: "tokens",
    **dict.fromkeys((State.ABORT_DRAIN, State.ABORT_CLOSE, State.ABORT_UNREAD), "abort"),
    **dict.fromkeys((State.ABORT_CLOSED, State.ABORT_ENDED), "abort"),
}

_HEADS = (Event.HEAD_STREAM, Event.HEAD_REFUSED, Event.HEAD_UNREADABLE)
_BROKEN = (Event.ERROR_EVENT, Event.DECODE_ERROR, Event.OVERRUN)
_PARSED = (Event.FIRST_TOKEN, Event.FINISHED, *_BROKEN)
_EXPIRED = (Event.TOKEN_EXPIRED, Event.REST_EXPIRED)
_ANSWERED = (Event.ABORT_ANSWERED, Event.REPLY_EXPIRED)
_OVER = (Event.ENDED, Event.FAILED)

_SETTLED: Transition = (State.DONE, (Action.SETTLE,))
_ABORT: Transition = (State.ABORT_DRAIN, (Action.SEND_ABORT,))
_FAIL: Transition = (State.ABORT_CLOSE, (Action.SEND_ABORT,))
_FAIL_UNREAD: Transition = (State.ABORT_UNREAD, (Action.SEND_ABORT,))
_ABORT_CLOSED: Transition = (State.ABORT_CLOSED, (Action.SEND_ABORT,))
_CLOSE: Transition = (State.CLOSING, (Action.CLOSE,))
_CLOSE_EARLY: Transition = (State.ABORT_CLOSED, (Action.CLOSE,))


def _each(events: tuple[Event, ...], transition: Transition | None) -> dict[Event, Transition | None]:
    return dict.fromkeys(events, transition)


# None: the event changes nothing.
_ROWS: dict[State, dict[Event, Transition | None]] = {
    State.IDLE: {
        Event.START: (State.CONNECTING, (Action.CONNECT,)),
        Event.FAILED: _SETTLED,
        Event.ABORT: (State.ABORTED, (Action.SETTLE,)),
        Event.HASTEN: None,
    },
    State.CONNECTING: {
        Event.CONNECTED: (State.SENDING, (Action.SEND,)),
        Event.FAILED: _SETTLED,
        Event.ABORT: (State.ABORTED, (Action.CLOSE, Action.SETTLE)),
        Event.HASTEN: None,
    },
    State.SENDING: {
        Event.SENT: (State.HEAD, (Action.ARM_FIRST_TOKEN,)),
        Event.FAILED: _SETTLED,
        Event.ABORT: _CLOSE,
        Event.HASTEN: None,
    },
    State.HEAD: {
        Event.HEAD_STREAM: (State.WAITING, ()),
        Event.HEAD_REFUSED: (State.REFUSED, (Action.ARM_REST,)),
        Event.HEAD_UNREADABLE: (State.UNREADABLE, (Action.ARM_REST,)),
        Event.TOKEN_EXPIRED: _FAIL,
        Event.FAILED: _FAIL_UNREAD,
        Event.ABORT: _ABORT,
        Event.HASTEN: None,
    },
    State.WAITING: {
        Event.FIRST_TOKEN: (State.STREAMING, (Action.ARM_NEXT_TOKEN,)),
        Event.FINISHED: (State.REST, (Action.ARM_REST,)),
        Event.ERROR_EVENT: (State.ERROR_EVENT, (Action.ARM_REST,)),
        Event.DECODE_ERROR: _FAIL,
        Event.OVERRUN: _FAIL,  # which is no failure: the engine has to be stopped in the same way
        Event.TOKEN_EXPIRED: _FAIL,
        Event.ENDED: _SETTLED,  # the body's last bytes were the terminal event, without its blank line
        Event.FAILED: _FAIL_UNREAD,
        Event.ABORT: _ABORT,
        Event.HASTEN: None,
    },
    State.STREAMING: {
        Event.FINISHED: (State.REST, (Action.ARM_REST,)),
        Event.ERROR_EVENT: (State.ERROR_EVENT, (Action.ARM_REST,)),
        Event.DECODE_ERROR: _FAIL,
        Event.OVERRUN: _FAIL,  # which is no failure: the engine has to be stopped in the same way
        Event.TOKEN_EXPIRED: _FAIL,
        Event.ENDED: _SETTLED,  # as in WAITING
        Event.FAILED: _FAIL_UNREAD,
        Event.ABORT: _ABORT,
        Event.HASTEN: None,
    },
    State.REST: {
        Event.ERROR_EVENT: (State.REST, (Action.ARM_REST,)),
        Event.DECODE_ERROR: None,  # as when vLLM's usage contradicts the stream: the limits of the rest still hold
        Event.REST_EXPIRED: (State.CLOSING_REST, (Action.CLOSE,)),
        **_each(_OVER, _SETTLED),
        Event.ABORT: _ABORT,
        Event.HASTEN: None,
    },
    State.ERROR_EVENT: {
        Event.REST_EXPIRED: _FAIL,
        Event.ENDED: _SETTLED,
        Event.FAILED: _FAIL_UNREAD,
        Event.ABORT: (State.ABORT_DRAIN, (Action.SEND_ABORT, Action.DISARM)),
        Event.HASTEN: None,
    },
    State.REFUSED: {
        Event.REST_EXPIRED: (State.CLOSING_REST, (Action.CLOSE,)),
        Event.FAILED: _SETTLED,
        Event.ABORT: _ABORT,
        Event.HASTEN: None,
    },
    State.UNREADABLE: {
        Event.REST_EXPIRED: (State.CLOSING_UNREADABLE, (Action.CLOSE,)),
        Event.FAILED: _FAIL_UNREAD,
        Event.ABORT: _ABORT,
        Event.HASTEN: None,
    },
    State.CLOSING_REST: {
        **_each((Event.ERROR_EVENT, Event.DECODE_ERROR, Event.REST_EXPIRED), None),
        **_each(_OVER, _SETTLED),
        Event.ABORT: _ABORT_CLOSED,
        Event.HASTEN: None,
    },
    State.CLOSING_UNREADABLE: {
        Event.REST_EXPIRED: None,
        Event.FAILED: (State.ABORT_ENDED, (Action.SEND_ABORT,)),
        Event.ABORT: _ABORT_CLOSED,
        Event.HASTEN: None,
    },
    State.ABORT_DRAIN: {
        Event.HEAD_STREAM: None,
        **_each((Event.HEAD_REFUSED, Event.HEAD_UNREADABLE), (State.ABORT_DRAIN, (Action.ARM_REST,))),
        Event.FIRST_TOKEN: None,
        Event.FINISHED: (State.ABORT_DRAIN, (Action.ARM_REST,)),
        **_each((*_BROKEN, Event.REST_EXPIRED), _CLOSE_EARLY),
        Event.TOKEN_EXPIRED: None,
        **_each(_OVER, (State.ABORT_UNREAD, ())),
        Event.ABORT_ANSWERED: (State.DRAINING, (Action.ARM_DRAIN,)),
        Event.ABORT: None,
        Event.HASTEN: (State.ABORT_CLOSE, (Action.HURRY_REPLY,)),
    },
    State.ABORT_CLOSE: {
        **_each((*_HEADS, Event.FIRST_TOKEN, Event.FINISHED, *_EXPIRED), None),
        **_each(_BROKEN, _CLOSE_EARLY),
        **_each(_OVER, (State.ABORT_UNREAD, ())),
        **_each(_ANSWERED, _CLOSE),
        Event.ABORT: None,
        Event.HASTEN: (State.ABORT_CLOSE, (Action.HURRY_REPLY,)),
    },
    State.ABORT_UNREAD: {
        **_each(_ANSWERED, (State.ABORTED, (Action.CLOSE, Action.SETTLE))),
        Event.FAILED: None,
        Event.ABORT: None,
        Event.HASTEN: (State.ABORT_UNREAD, (Action.HURRY_REPLY,)),
    },
    State.ABORT_CLOSED: {
        **_each((Event.ERROR_EVENT, Event.DECODE_ERROR, *_EXPIRED), None),
        **_each(_OVER, (State.ABORT_ENDED, ())),
        **_each(_ANSWERED, (State.CLOSING, ())),
        Event.ABORT: None,
        Event.HASTEN: (State.ABORT_CLOSED, (Action.HURRY_REPLY,)),
    },
    State.ABORT_ENDED: {
        **_each(_ANSWERED, (State.ABORTED, (Action.SETTLE,))),
        Event.FAILED: None,
        Event.ABORT: None,
        Event.HASTEN: (State.ABORT_ENDED, (Action.HURRY_REPLY,)),
    },
    State.DRAINING: {
        Event.HEAD_STREAM: None,
        **_each((Event.HEAD_REFUSED, Event.HEAD_UNREADABLE), (State.DRAINING, (Action.ARM_REST,))),
        Event.FIRST_TOKEN: None,
        Event.FINISHED: (State.DRAINING, (Action.ARM_REST,)),
        **_each((*_BROKEN, Event.REST_EXPIRED, Event.DRAIN_EXPIRED), _CLOSE),
        Event.TOKEN_EXPIRED: None,
        **_each(_OVER, (State.ABORTED, (Action.CLOSE, Action.SETTLE))),
        Event.ABORT: None,
        Event.HASTEN: _CLOSE,
    },
    State.CLOSING: {
        **_each((*_HEADS, *_PARSED, *_EXPIRED), None),
        **_each(_OVER, (State.ABORTED, (Action.SETTLE,))),
        **_each((*_ANSWERED, Event.DRAIN_EXPIRED, Event.ABORT, Event.HASTEN), None),
    },
    State.DONE: _each((Event.FAILED, Event.ABORT, Event.HASTEN), None),
    State.ABORTED: _each(
        # It may have settled while connecting, and before the abort request was answered.
        (Event.CONNECTED, *_OVER, Event.ABORT_ANSWERED, Event.ABORT, Event.HASTEN),
        None,
    ),
}

TABLE: Mapping[State, Mapping[Event, Transition]] = {
    state: {event: transition or (state, ()) for event, transition in row.items()} for state, row in _ROWS.items()
}
