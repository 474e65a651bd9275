"""The table of a try's states, explored without IO: each sequence of events that a driver can report, of any length.

:class:`World` says which events can happen next, from what was done and received so far, without a look at the table.
The product of both is finite, so the exploration visits all of it. A pair that it does not reach is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

import pytest

from streamfold.client.attempt_state import ABORTING, TABLE, Action, Event, State, head_event

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTLED = {State.DONE, State.ABORTED}
HEADS = {Event.HEAD_STREAM, Event.HEAD_REFUSED, Event.HEAD_UNREADABLE}
UNANSWERED = {State.ABORT_DRAIN, State.ABORT_CLOSE, State.ABORT_UNREAD, State.ABORT_CLOSED, State.ABORT_ENDED}
PARSED = {Event.FIRST_TOKEN, Event.FINISHED, Event.ERROR_EVENT, Event.DECODE_ERROR, Event.OVERRUN}


Reader = Literal["idle", "connect", "send", "head", "wait", "tokens", "rest", "unparsed", "body", "over"]


@dataclass(frozen=True)
class World:
    """Everything around the table: connection, response, timers, abort request.

    Attributes:
        reader: how far the exchange is, for the task that connects, sends and reads.
        phase: of the first timer, of the connect timeout too.
        running: whether the first timer runs; the phase outlives its expiry.
        limit: what the second timer limits. Who sends the abort request limits the wait for its answer by itself.
        aborts: abort requests sent.
        answered: whether the abort request was answered.
        closed, settled, sent: how often.
        by_itself: whether the exchange ended, or failed, before it was closed.
        busy: whether the engine may be working on the request.
    """

    reader: Reader = "idle"
    phase: Literal["connect", "token", "rest"] | None = None
    running: bool = False
    limit: Literal["reply", "drain"] | None = None
    aborts: int = 0
    answered: bool = False
    closed: int = 0
    settled: int = 0
    sent: int = 0
    by_itself: bool = False
    busy: bool = False

    def events(self, state: State) -> set[Event]:
        """What can happen next."""
        events = {Event.ABORT, Event.HASTEN} | self._read_events(state)
        if self.reader in ("idle", "over"):
            events.add(Event.FAILED)  # the task of the call is interrupted while it waits for a slot or the abort
        if self.running and self.phase == "token":
            events.add(Event.TOKEN_EXPIRED)
        if self.phase == "rest" and (self.running or self.reader != "over"):  # by its timer, or too many bytes
            events.add(Event.REST_EXPIRED)
        if self.limit is not None:
            events.add(Event.REPLY_EXPIRED if self.limit == "reply" else Event.DRAIN_EXPIRED)
        if self.aborts and not self.answered:
            events.add(Event.ABORT_ANSWERED)
        return events

    def _read_events(self, state: State) -> set[Event]:
        over = {Event.FAILED, Event.ENDED} if self.closed else {Event.FAILED}
        if self.reader == "idle":
            return set() if self.settled else {Event.START}
        if self.reader == "connect":
            return {Event.CONNECTED} | over
        if self.reader == "send":  # the driver lets nothing leave after an abort
            return over if self.closed or state in ABORTING else {Event.SENT} | over
        if self.reader == "head":
            return HEADS | over
        if self.reader == "body":  # the driver always reports the error that the response means
            return {Event.FAILED}
        if self.reader in ("wait", "tokens"):
            repeated = set() if state is State.STREAMING else {Event.FIRST_TOKEN}
            return (PARSED - {Event.FIRST_TOKEN}) | repeated | {Event.ENDED, Event.FAILED}
        if self.reader == "rest":
            return {Event.ERROR_EVENT, Event.DECODE_ERROR, Event.ENDED, Event.FAILED}
        return {Event.ENDED, Event.FAILED} if self.reader == "unparsed" else set()

    def after(self, event: Event) -> World:
        """What ``event`` says about the world, before any action."""
        readers: dict[Event, Reader] = {
            Event.START: "connect",
            Event.CONNECTED: "send",
            Event.HEAD_STREAM: "wait",
            Event.HEAD_REFUSED: "body",
            Event.HEAD_UNREADABLE: "body",
            Event.FIRST_TOKEN: "tokens",
            Event.FINISHED: "rest",
            Event.ERROR_EVENT: "unparsed",
            Event.DECODE_ERROR: "unparsed",
            Event.OVERRUN: "unparsed",
        }
        busy = self.busy and event not in (Event.FINISHED, Event.HEAD_REFUSED, Event.ENDED)
        if event is Event.SENT:
            return replace(self, reader="head", sent=self.sent + 1, busy=True)
        if event in readers:
            return replace(self, reader=readers[event], busy=busy)
        if event in (Event.ENDED, Event.FAILED):
            if self.reader == "idle":
                return self
            by_itself = self.by_itself or (self.reader != "over" and not self.closed)
            return replace(self, reader="over", phase=None, running=False, by_itself=by_itself, busy=busy)
        if event in (Event.TOKEN_EXPIRED, Event.REST_EXPIRED):
            return replace(self, running=False)
        if event in (Event.REPLY_EXPIRED, Event.DRAIN_EXPIRED):
            return replace(self, limit=None)
        return replace(self, answered=True) if event is Event.ABORT_ANSWERED else self

    def did(self, action: Action, state: State) -> World:
        """Check that ``action`` may be executed, and execute it."""
        assert not self.settled, "no action after settling"
        if action is Action.CONNECT:
            assert self.reader == "connect"
            assert not self.closed
            return replace(self, phase="connect", running=True)
        if action is Action.SEND:
            assert self.reader == "send"
            assert state not in ABORTING, "nothing leaves after an abort"
            assert (self.closed, self.aborts) == (0, 0)
            return self
        if action is Action.SEND_ABORT:
            assert self.sent, "there is a request to abort"
            assert not self.aborts, "one abort request"
            return replace(self, aborts=1)
        if action is Action.CLOSE:
            assert self.reader != "idle"
            assert not self.closed, "closed once"
            return replace(self, closed=1)
        if action is Action.SETTLE:
            return replace(self, settled=1, limit=None, phase=None, running=False)
        return self._armed(action)

    def _armed(self, action: Action) -> World:
        if action in (Action.ARM_FIRST_TOKEN, Action.ARM_NEXT_TOKEN, Action.ARM_REST, Action.DISARM):
            assert self.reader not in ("idle", "connect", "send", "over"), "the body is being read"
            if action is Action.DISARM:
                return replace(self, phase=None, running=False)
            return replace(self, phase="rest" if action is Action.ARM_REST else "token", running=True)
        assert self.aborts
        assert not self.closed or action is not Action.ARM_DRAIN
        if action is Action.HURRY_REPLY:
            assert not self.answered, "there is a wait to shorten"
        return replace(self, limit="drain" if action is Action.ARM_DRAIN else "reply")


Node = tuple[State, World]


def step(node: Node, event: Event) -> Node:
    """The transition for ``event``, with the actions' preconditions checked."""
    state, world = node
    assert event in TABLE[state], f"{event} can happen in {state}: {world}"
    after, actions = TABLE[state][event]
    world = world.after(event)
    for action in actions:
        world = world.did(action, after)
    return after, world


def explore() -> dict[Node, dict[Event, Node]]:
    """All that can be reached, and the step for each event there."""
    start = (State.IDLE, World())
    graph: dict[Node, dict[Event, Node]] = {}
    todo = [start]
    while todo:
        node = todo.pop()
        if node not in graph:
            graph[node] = {event: step(node, event) for event in node[1].events(node[0])}
            todo += graph[node].values()
    return graph


GRAPH = explore()


def edges() -> Iterator[tuple[Node, Event, Node]]:
    for node, steps in GRAPH.items():
        for event, following in steps.items():
            yield node, event, following


def test_the_table_holds_exactly_the_pairs_that_can_happen() -> None:
    assert set(TABLE) == set(State)
    possible = {(node[0], event) for node, event, _ in edges()}
    in_table = {(state, event) for state, row in TABLE.items() for event in row}
    for state, event in product(State, Event):
        assert ((state, event) in in_table) == ((state, event) in possible), (state, event)


def test_each_state_and_each_action_is_used() -> None:
    assert {state for state, _ in GRAPH} == set(State)
    assert {action for row in TABLE.values() for _, actions in row.values() for action in actions} == set(Action)


def test_a_try_settles_once_and_nothing_is_done_afterwards() -> None:
    for (state, world), _, (after, later) in edges():
        assert later.settled == (after in SETTLED)
        if state in SETTLED:
            assert after is state
            assert (later.closed, later.aborts, later.sent) == (world.closed, world.aborts, world.sent)


def test_a_try_that_settles_was_closed_once_unless_it_ended_by_itself() -> None:
    for state, world in GRAPH:
        if state in SETTLED and world.reader != "idle":
            assert world.closed or world.by_itself
            assert world.closed or state is State.DONE, "an abort always closes what it opened"


def test_the_request_leaves_once_and_not_after_an_abort_or_a_close() -> None:
    for (state, world), event, (_, later) in edges():
        assert later.sent <= 1
        if event is Event.SENT:
            assert state is State.SENDING
            assert (world.closed, world.aborts) == (0, 0)


def test_the_abort_request_is_sent_before_the_close_and_only_once_the_request_has_left() -> None:
    for (state, world), _, (_, later) in edges():
        if later.aborts > world.aborts:
            assert world.sent
            # What the engine does not work on, and a body that does not end, may have been closed before.
            assert not world.closed or state in {State.CLOSING_REST, State.CLOSING_UNREADABLE}
        if later.closed > world.closed and later.sent and state in ABORTING:
            assert world.aborts


def test_an_abort_of_a_request_that_has_left_is_sent_to_the_engine_and_drains() -> None:
    for (state, world), event, (after, later) in edges():
        if event is Event.ABORT and world.sent and state not in ABORTING | SETTLED:
            assert later.aborts == 1
            assert after is (State.ABORT_CLOSED if world.closed else State.ABORT_DRAIN)


def test_a_failure_is_sent_to_the_engine_if_it_may_be_working_and_does_not_drain() -> None:
    for (state, world), event, (after, later) in edges():
        if state in ABORTING or event is Event.ABORT:
            continue
        if event in (Event.FAILED, Event.TOKEN_EXPIRED, Event.OVERRUN) or (event is Event.DECODE_ERROR and world.busy):
            assert later.aborts == world.busy
            assert (after in ABORTING) == world.busy
        elif event is Event.REST_EXPIRED and state is State.ERROR_EVENT:
            assert after is State.ABORT_CLOSE
        else:
            assert after not in ABORTING, (state, event)
        assert after is not State.ABORT_DRAIN


def test_an_error_event_waits_for_the_end_of_the_body_and_needs_no_abort_then() -> None:
    for state in (State.WAITING, State.STREAMING):
        assert TABLE[state][Event.ERROR_EVENT] == (State.ERROR_EVENT, (Action.ARM_REST,))
    assert TABLE[State.ERROR_EVENT][Event.ENDED] == (State.DONE, (Action.SETTLE,))


def test_an_error_after_the_terminal_event_keeps_the_limits_of_the_rest() -> None:
    for event, actions in ((Event.ERROR_EVENT, (Action.ARM_REST,)), (Event.DECODE_ERROR, ())):
        assert TABLE[State.REST][event] == (State.REST, actions)


def test_the_wait_for_the_answer_ends_with_it_or_with_its_timer() -> None:
    for (state, world), event, (after, later) in edges():
        if later.aborts > world.aborts:
            assert after in UNANSWERED
        elif state in UNANSWERED:
            answered = event in (Event.ABORT_ANSWERED, Event.REPLY_EXPIRED)
            assert (after not in UNANSWERED) == answered


def test_only_a_hasten_or_the_end_of_reading_takes_the_drain_from_an_abort() -> None:
    for (state, _), event, (after, _) in edges():
        if state is State.ABORT_DRAIN and after is not State.ABORT_DRAIN:
            assert after is State.ABORT_CLOSE or event is not Event.HASTEN
            assert (after is State.ABORT_CLOSE) == (event is Event.HASTEN)
        if after is State.ABORT_DRAIN:
            assert state is State.ABORT_DRAIN or event is Event.ABORT


@pytest.mark.parametrize("state", [State.ABORT_DRAIN, State.DRAINING])
def test_the_rest_of_a_body_is_limited_in_a_drain_too(state: State) -> None:
    for event in (Event.FINISHED, Event.HEAD_REFUSED, Event.HEAD_UNREADABLE):
        assert TABLE[state][event] == (state, (Action.ARM_REST,))


def test_a_timer_runs_in_each_state_that_waits_for_the_engine() -> None:
    closing = {State.CLOSING, State.CLOSING_REST, State.CLOSING_UNREADABLE}  # they wait for our own close
    for state, world in GRAPH:
        if state in closing or state in SETTLED or state is State.IDLE:
            continue
        if state in ABORTING:
            is_limited = world.limit == "drain" if state is State.DRAINING else world.aborts and not world.answered
            assert is_limited, (state, world)
        else:
            assert world.running, (state, world)


def test_an_abort_is_never_left_and_always_settles_as_one() -> None:
    for (state, _), _, (after, _) in edges():
        if state in ABORTING:
            assert after in ABORTING


def test_an_abort_settles_as_one_and_a_second_one_changes_nothing() -> None:
    for node, event, after in edges():
        if event is Event.ABORT:
            assert after[0] in ABORTING or node[0] is State.DONE
            assert after == node or node[0] not in ABORTING | SETTLED


def test_a_hasten_shortens_the_wait_for_the_answer_and_ends_the_drain_and_does_nothing_before_an_abort() -> None:
    for (state, world), event, (after, later) in edges():
        if event is not Event.HASTEN:
            continue
        actions = TABLE[state][event][1]
        if state in UNANSWERED:
            assert after is (State.ABORT_CLOSE if state is State.ABORT_DRAIN else state)
            assert actions == (Action.HURRY_REPLY,)
        elif state is State.DRAINING:
            assert (after, actions) == (State.CLOSING, (Action.CLOSE,))
        else:
            assert (after, later) == (state, world)


@pytest.mark.parametrize("answered", [True, False], ids=["engine that answers", "engine that does not answer"])
def test_an_abort_in_any_state_settles_within_four_events(answered: bool) -> None:
    answer = Event.ABORT_ANSWERED if answered else Event.REPLY_EXPIRED
    for node in GRAPH:
        state, world = step(node, Event.ABORT)
        for _ in range(4):
            if state in SETTLED:
                break
            # The engine sends nothing: what remains are our timers, and the reader's end after our close.
            if world.closed and world.reader != "over":
                event = Event.FAILED
            else:
                event = Event.DRAIN_EXPIRED if world.limit == "drain" else answer
                if event is Event.REPLY_EXPIRED and world.limit is None:
                    event = Event.HASTEN
            assert event in world.events(state), node
            state, world = step((state, world), event)
        assert state in SETTLED, node


def test_without_any_sign_of_the_engine_each_try_settles_by_its_timers() -> None:
    for node in GRAPH:
        state, world = node
        for _ in range(6):
            if state in SETTLED or state is State.IDLE:
                break
            if world.reader != "over" and (world.closed or world.phase == "connect"):
                event = Event.FAILED  # the reader's end after our close, or the connect timeout
            elif world.limit is not None:
                event = Event.REPLY_EXPIRED if world.limit == "reply" else Event.DRAIN_EXPIRED
            elif state in UNANSWERED:
                event = Event.ABORT_ANSWERED  # or the engine is silent
            else:
                event = Event.REST_EXPIRED if world.phase == "rest" else Event.TOKEN_EXPIRED
            assert event in world.events(state), node
            state, world = step((state, world), event)
        assert state in SETTLED or state is State.IDLE, node


def test_what_is_read_can_only_shorten_an_abort() -> None:
    order = [State.ABORT_DRAIN, State.ABORT_CLOSE, State.ABORT_CLOSED, State.DRAINING, State.CLOSING]
    for (state, _), event, (after, _) in edges():
        if state in order and event in HEADS | PARSED:
            assert after in order
            assert order.index(after) >= order.index(state)


@pytest.mark.parametrize(
    ("status", "is_stream", "event"),
    [
        (200, True, Event.HEAD_STREAM),
        (200, False, Event.HEAD_UNREADABLE),
        (204, False, Event.HEAD_REFUSED),
        (503, False, Event.HEAD_REFUSED),
    ],
)
def test_the_head_of_a_response_is_one_of_three_events(status: int, is_stream: bool, event: Event) -> None:
    assert head_event(status, is_stream=is_stream) is event


def test_the_longest_abort_in_full() -> None:
    """One sequence as a reader would follow it."""
    expected: list[tuple[Event, State, tuple[Action, ...]]] = [
        (Event.START, State.CONNECTING, (Action.CONNECT,)),
        (Event.CONNECTED, State.SENDING, (Action.SEND,)),
        (Event.SENT, State.HEAD, (Action.ARM_FIRST_TOKEN,)),
        (Event.HEAD_STREAM, State.WAITING, ()),
        (Event.FIRST_TOKEN, State.STREAMING, (Action.ARM_NEXT_TOKEN,)),
        (Event.ABORT, State.ABORT_DRAIN, (Action.SEND_ABORT,)),
        (Event.ABORT_ANSWERED, State.DRAINING, (Action.ARM_DRAIN,)),
        (Event.FINISHED, State.DRAINING, (Action.ARM_REST,)),
        (Event.DRAIN_EXPIRED, State.CLOSING, (Action.CLOSE,)),
        (Event.ENDED, State.ABORTED, (Action.SETTLE,)),
    ]
    state = State.IDLE
    for event, following, actions in expected:
        assert TABLE[state][event] == (following, actions)
        state = following
