"""How a loop's reactor passes on what its sweeps have found: in order, and without keeping the event loop for long."""

from __future__ import annotations

import asyncio
import itertools
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.client.drivers.loop_reactor import LONGEST_REST, SHORTEST_REST, LoopReactor
from support.replay import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the reactor is for Linux")

BOTH_LOOPS = True

COUNT = 10
Event = tuple[int, str, Any]


@pytest.fixture
async def reactor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A reactor whose clock goes on by a millisecond each time somebody looks at it."""
    reactor = LoopReactor.acquire(asyncio.get_running_loop(), rests=(SHORTEST_REST, LONGEST_REST))
    ticks: Iterator[int] = itertools.count()
    monkeypatch.setattr("streamfold.client.drivers.loop_reactor.monotonic", lambda: next(ticks) / 1000)
    yield reactor
    monkeypatch.undo()
    reactor.release()


def listening(reactor: LoopReactor, passed: list[Event]) -> list[Event]:
    """Events of connections whose handlers note what they get."""

    def note(connection: int, kind: str, detail: object) -> None:
        passed.append((connection, kind, detail))

    for connection in range(COUNT):
        reactor.listen(connection, partial(note, connection))
    return [(connection, kind, None) for kind in ("head", "ended") for connection in range(COUNT)]


async def test_the_event_loop_has_its_turn_while_a_sweep_of_many_events_is_passed_on(reactor: LoopReactor) -> None:
    passed: list[Event] = []
    events = listening(reactor, passed)
    turns: list[int] = []

    def turn() -> None:
        turns.append(len(passed))
        if len(passed) < len(events):
            asyncio.get_running_loop().call_soon(turn)

    reactor._pass_on(events)
    turn()
    await until(lambda: len(passed) == len(events))
    assert passed == events
    assert max(after - before for before, after in itertools.pairwise([0, *turns])) < COUNT


async def test_the_events_of_a_later_sweep_wait_for_those_before(reactor: LoopReactor) -> None:
    passed: list[Event] = []
    events = listening(reactor, passed)
    for event in events:
        reactor._pass_on([event])
    await until(lambda: len(passed) == len(events))
    assert passed == events


async def test_who_asks_for_what_has_come_gets_all_of_it_at_once(reactor: LoopReactor) -> None:
    """A deadline that has passed is judged by what had arrived."""
    passed: list[Event] = []
    *events, last = listening(reactor, passed)
    reactor._pass_on(events)
    assert len(passed) < len(events)
    reactor.dispatch([last])
    assert passed == [*events, last]
    await asyncio.sleep(0)
    assert passed == [*events, last]


async def test_what_waits_of_a_connection_that_is_ended_is_not_passed_on(reactor: LoopReactor) -> None:
    passed: list[Event] = []
    events = listening(reactor, passed)
    reactor._pass_on(events)
    so_far = list(passed)
    for connection in range(COUNT):
        reactor.end(connection)
    await asyncio.sleep(0.01)
    assert passed == so_far
    assert len(so_far) < len(events)
