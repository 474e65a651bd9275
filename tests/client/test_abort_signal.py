"""AbortSignal: one way to end calls, pauses and samples, for flags of our own and those of a host."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Limits, Retries
from streamfold.client import abort_signal
from streamfold.client.abort_signal import AbortSignal
from support.replay import ASKED, PROMPT, until
from support.tries import BUSY, LATER, in_turn

if TYPE_CHECKING:
    from support.speaking import Speech

BOTH_LOOPS = True


class Flag:
    """A host's flag, and how often it was read."""

    def __init__(self) -> None:
        self.value: Any = False
        self.error: Exception | None = None
        self.reads = 0

    def __call__(self) -> bool:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return bool(self.value)


async def test_a_flag_set_between_two_polls_lets_no_request_leave(
    speech: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abort_signal, "_POLL_SECONDS", 3600.0)
    flag, retries = Flag(), Retries(first=0.3, longest=0.3, jitter=0)
    async with (
        speech.replay() as server,
        speech.client(server.url, retries=retries, limits=Limits(calls=1)) as client,
    ):
        server.routes[speech.path] = in_turn(server, BUSY, speech.whole)
        call = client.start(PROMPT, ASKED, aborted=flag)
        await until(lambda: client.retried == 1)
        await asyncio.sleep(0.05)  # it is in its pause, after the last poll
        flag.value = True
        generation = await asyncio.wait_for(call, 20)
        assert (generation.finish_reason, len(generation.token_ids), call.tries) == (None, 0, 1)
        assert len(server.generates) == 1


async def test_a_flag_set_while_a_call_waits_for_a_slot_lets_no_request_leave(
    speech: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abort_signal, "_POLL_SECONDS", 3600.0)
    flag = Flag()
    async with speech.replay([0.1, *speech.whole]) as server:
        async with speech.client(server.url, limits=Limits(calls=1)) as client:
            first, second = client.start(PROMPT, ASKED), client.start(PROMPT, ASKED, aborted=flag)
            await until(lambda: len(server.generates) == 1)
            flag.value = True
            assert (await first).finish_reason == "stop"
            assert (await second).finish_reason is None
        assert len(server.generates) == 1


async def test_a_flag_is_polled_only_while_something_waits_for_it() -> None:
    flag = Flag()
    signal = AbortSignal(flag)
    tasks = asyncio.all_tasks()
    waiters = [asyncio.ensure_future(signal.wait()) for _ in range(50)]
    unsubscribe = signal.subscribe(lambda: None)
    await asyncio.sleep(0)
    reads = flag.reads
    await asyncio.sleep(0.22)
    assert 1 <= flag.reads - reads <= 5, "one poller reads it for all of them"
    unsubscribe()
    flag.value = True
    assert await asyncio.gather(*waiters) == [True] * 50
    reads = flag.reads
    assert asyncio.all_tasks() == tasks
    await asyncio.sleep(0.15)
    assert flag.reads == reads, "something still polls"
    assert not signal._watches


@pytest.mark.parametrize("how", ["set", "timeout", "cancel", "error"])
async def test_nothing_polls_after_the_last_waiter_however_its_wait_ended(how: str) -> None:
    flag = Flag()
    signal = AbortSignal(flag)
    waiter = asyncio.ensure_future(signal.wait(0.08 if how == "timeout" else None))
    await asyncio.sleep(0.01)
    if how == "set":
        flag.value = True
    elif how == "error":
        flag.error = RuntimeError("gone")
    elif how == "cancel":
        waiter.cancel()
    result = (await asyncio.gather(waiter, return_exceptions=True))[0]
    expected = {"set": bool, "timeout": bool, "cancel": asyncio.CancelledError, "error": RuntimeError}
    assert (type(result), result is True) == (expected[how], how == "set")
    reads = flag.reads
    await asyncio.sleep(0.12)
    assert flag.reads == reads
    assert not signal._watches


async def test_a_signal_of_our_own_ends_waits_at_once_and_needs_no_polling() -> None:
    signal = AbortSignal()
    waiter = asyncio.ensure_future(signal.wait(30.0))
    await asyncio.sleep(0)
    signal.set()
    await asyncio.sleep(0)  # the subscriber
    await asyncio.sleep(0)  # the future
    await asyncio.sleep(0)  # the wait
    await asyncio.wait_for(waiter, 20)
    assert waiter.result() is True
    assert await signal.wait() is True
    assert signal() is signal.is_set() is True


async def test_a_wait_ends_soon_after_a_flag_is_set_and_at_its_timeout_otherwise() -> None:
    flag = Flag()
    signal = AbortSignal(flag)
    assert await signal.wait(0) is False
    assert await signal.wait(0.02) is False
    asyncio.get_running_loop().call_later(0.02, setattr, flag, "value", 1)
    assert await asyncio.wait_for(signal.wait(3600.0), 20) is True
    assert await signal.wait(0) is True


async def test_a_host_abort_ends_a_retry_pause_promptly(speech: Speech) -> None:
    flag = Flag()
    async with speech.replay(BUSY) as server:
        async with speech.client(server.url, retries=LATER) as client:
            call = client.start(PROMPT, ASKED, aborted=flag)
            await until(lambda: client.retried == 1)
            await asyncio.sleep(0.02)
            flag.value = True
            await asyncio.wait_for(call, 20)
        assert len(server.generates) == 1


async def test_a_pulse_that_a_poll_has_seen_ends_the_wait_although_the_flag_is_false_again() -> None:
    flag = Flag()
    signal = AbortSignal(flag)
    waiter = asyncio.ensure_future(signal.wait(5.0))
    await asyncio.sleep(0)
    reads, flag.value = flag.reads, True
    await until(lambda: flag.reads > reads)
    flag.value = False
    assert await waiter is True
    assert not signal.is_set(), "it reads the flag as it is"


async def test_a_subscriber_is_called_each_time_the_flag_becomes_true() -> None:
    flag, calls = Flag(), []
    signal = AbortSignal(flag)
    unsubscribe = signal.subscribe(lambda: calls.append(1))
    for count in (1, 2):
        flag.value = True
        await until(lambda: len(calls) == count)  # noqa: B023  # used at once
        await asyncio.sleep(0.12)
        assert len(calls) == count, "once for each time"
        flag.value = False
        await asyncio.sleep(0.12)
    unsubscribe()
    flag.value = True
    await asyncio.sleep(0.12)
    assert len(calls) == 2


async def test_who_subscribes_to_a_set_signal_is_called_soon_and_others_not_again() -> None:
    signal, calls = AbortSignal(), []
    signal.subscribe(lambda: calls.append("first"))
    signal.set()
    signal.set()
    signal.subscribe(lambda: calls.append("late"))
    assert calls == [], "never within the call that sets it"
    await asyncio.sleep(0.01)
    assert sorted(calls) == ["first", "late"]


async def test_a_callback_may_subscribe_and_unsubscribe() -> None:
    signal, calls = AbortSignal(), []

    def first() -> None:
        calls.append("first")
        undo_first()
        undo_second()  # it was notified at the same time, and must not be called any more
        signal.subscribe(lambda: calls.append("third"))

    undo_first = signal.subscribe(first)
    undo_second = signal.subscribe(lambda: calls.append("second"))
    signal.set()
    await asyncio.sleep(0.01)
    assert calls == ["first", "third"]
    undo_first()  # again: nothing happens


async def test_a_callback_that_raises_stops_no_other(caught: list[dict[str, Any]]) -> None:
    signal, calls = AbortSignal(), []
    signal.subscribe(lambda: 1 / 0)
    signal.subscribe(lambda: calls.append(1))
    signal.set()
    await asyncio.sleep(0.01)
    assert calls == [1]
    assert [type(context["exception"]) for context in caught] == [ZeroDivisionError]


@pytest.fixture
async def caught() -> list[dict[str, Any]]:
    """What the event loop's exception handler gets."""
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: contexts.append(context))
    return contexts


async def test_what_a_flag_raises_comes_out_of_reading_and_of_waiting(caught: list[dict[str, Any]]) -> None:
    flag = Flag()
    signal = AbortSignal(flag)
    both = signal | AbortSignal()
    waiters = [asyncio.ensure_future(each.wait()) for each in (signal, signal, both)]
    undo = signal.subscribe(lambda: pytest.fail("it was not set"))
    await asyncio.sleep(0)
    flag.error = RuntimeError("the host is gone")
    for waiter in waiters:
        with pytest.raises(RuntimeError, match="the host is gone"):
            await asyncio.wait_for(waiter, 20)
    for read in (signal.is_set, signal, both):
        with pytest.raises(RuntimeError, match="the host is gone"):
            read()
    with pytest.raises(RuntimeError, match="the host is gone"):
        both.subscribe(lambda: None)
    undo()
    assert [context["exception"] for context in caught] == [flag.error], "once, for the subscriber who takes no errors"
    assert not signal._watches
    assert not both._watches


async def test_what_a_flag_raises_in_a_pause_fails_the_call(speech: Speech) -> None:
    flag = Flag()
    async with speech.replay(BUSY) as server, speech.client(server.url, retries=LATER) as client:
        call = client.start(PROMPT, ASKED, aborted=flag)
        await until(lambda: client.retried == 1)
        await asyncio.sleep(0.02)
        flag.error = KeyError("no such state")
        with pytest.raises(KeyError, match="no such state"):
            await asyncio.wait_for(call, 20)
        assert client.running == []


async def test_a_combination_is_set_by_either_part_and_setting_it_leaves_the_parts_alone() -> None:
    flag = Flag()
    for index in range(3):
        own, host = AbortSignal(), AbortSignal(flag)
        both = own | host
        waiter = asyncio.ensure_future(both.wait(30.0))
        await asyncio.sleep(0)
        assert not both.is_set()
        if index == 0:
            own.set()
        elif index == 1:
            flag.value = True
        else:
            both.set()
        assert both.is_set()
        assert await asyncio.wait_for(waiter, 20) is True
        assert (own.is_set(), host.is_set()) == (index == 0, index == 1)
        assert [own._watches, host._watches, both._watches] == [{}, {}, {}]
        flag.value = False


def test_a_flag_is_wrapped_once_and_no_flag_is_never_set() -> None:
    signal = AbortSignal.of(lambda: True)
    assert signal.is_set()
    assert AbortSignal.of(signal) is signal
    assert not AbortSignal.of(None).is_set()


def test_a_signal_works_on_two_event_loops_one_after_the_other() -> None:
    """The first loop ends with a subscriber left."""
    flag = Flag()
    signal, own = AbortSignal(flag), AbortSignal()

    async def first() -> None:
        signal.subscribe(lambda: pytest.fail("its loop is closed"))
        own.subscribe(lambda: pytest.fail("its loop is closed"))
        assert await signal.wait(0.01) is False

    async def second() -> None:
        asyncio.get_running_loop().call_later(0.01, setattr, flag, "value", 1)
        assert await signal.wait(5.0) is True
        own.set()
        assert await own.wait(5.0) is True
        assert not any(loop.is_closed() for loop in signal._watches), "what belongs to a closed loop is dropped"

    asyncio.run(first())
    asyncio.run(second())


async def test_a_signal_may_be_set_from_another_thread() -> None:
    signal, calls = AbortSignal(), []
    signal.subscribe(lambda: calls.append(threading.current_thread()))
    thread = threading.Thread(target=signal.set)
    thread.start()
    assert await signal.wait(5.0) is True
    await until(lambda: len(calls) == 1)
    thread.join()
    assert calls == [threading.current_thread()]
