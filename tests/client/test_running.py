"""Client.running: a snapshot of each running call, without touching its buffers."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING

import pytest

from streamfold import Limits, Running, StreamTruncated
from streamfold.client._internal import Totals, totals_of
from streamfold.client.limits import Slots
from support.calls import has_ended
from support.replay import (
    ASKED,
    DONE,
    END,
    HANG,
    LAST_CHUNK,
    PROMPT,
    Step,
    begun,
    chunk,
    head,
    until,
)
from support.tries import BUSY, LATER, SOON, in_turn, rids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.replay import Request
    from support.speaking import Speech

BOTH_LOOPS = True


async def test_a_call_is_seen_in_every_state_from_its_start_to_its_end(speech: Speech) -> None:
    go_on, last = asyncio.Event(), asyncio.Event()
    steps: list[Step] = [
        head(),
        go_on,
        chunk(speech.event([1, 2], 2)),
        last,
        chunk(speech.event([3], 3, "stop")),
        LAST_CHUNK,
        END,
    ]
    async with speech.replay(steps) as server, speech.client(server.url, limits=Limits(calls=1)) as client:
        first, second = client.start(PROMPT, ASKED), client.start(PROMPT, ASKED)
        seen = client.running
        assert [running.rid for running in seen] == [first.rid, second.rid], "oldest first"
        assert {running.engine for running in seen} == {client.base_url}
        assert [running.tries for running in seen] == [0, 0]
        assert "waiting for a slot" in repr(second)

        await until(lambda: server.generates)
        await asyncio.sleep(0.05)
        waits, queues = client.running
        assert (waits.tries, waits.token_count, waits.tokens_per_second) == (1, 0, 0.0)
        assert (waits.ttft, waits.last_event) == (None, None)
        assert waits.age >= 0.04
        assert (queues.tries, queues.ttft) == (0, None)

        go_on.set()
        await until(lambda: first.token_count)
        await asyncio.sleep(0.03)
        runs = client.running[0]
        assert runs.token_count == 2
        assert runs.ttft is not None
        assert runs.last_event is not None
        assert 0.04 <= runs.ttft <= runs.age - 0.02
        assert 0.02 <= runs.last_event < runs.age
        assert 0 < runs.tokens_per_second <= 2 / 0.06
        assert waits.token_count == 0, "a snapshot stays as it was"

        await second.abort()
        last.set()
        await first
        assert client.running == []
        ended = (first.age, first.tokens_per_second, first.ttft, first.last_event)
        assert first.ttft == runs.ttft
        await asyncio.sleep(0.02)
        assert ended == (first.age, first.tokens_per_second, first.ttft, first.last_event), "they stand still"


async def test_heartbeats_do_not_make_a_silent_engine_look_alive(speech: Speech) -> None:
    def beats(_: Request) -> Iterator[Step]:
        yield from speech.running[:-1]
        for _beat in range(100):
            yield chunk(b": ping\n\n" + speech.event([], 2))
            yield 0.005

    async with speech.replay(beats) as server, speech.client(server.url) as client:
        call = await begun(client)
        await asyncio.sleep(0.1)
        (running,) = client.running
        assert running.last_event is not None
        assert running.last_event >= 0.09
        await call.abort()


async def test_the_registry_follows_a_call_to_its_next_try(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=SOON) as client:
        server.routes[speech.path] = in_turn(server, BUSY, BUSY, speech.running)
        old = client.start(PROMPT, ASKED, rid="mine-0001")
        await until(lambda: len(server.generates) == 3)
        server.routes[speech.path] = speech.running
        young = await begun(client)
        assert [running.rid for running in client.running] == [old.rid, young.rid], "oldest first, by their starts"
        assert old.rid == rids(server)[2]
        assert "try 3" in repr(old)
        running = client.running[0]
        assert (running.tries, running.token_count) == (3, 2)
        assert running.ttft is not None
        assert running.ttft < running.age, "it counts from the sending of the last try"

        again = client.start(PROMPT, ASKED, rid="mine-0001")  # which no call goes by any more
        with pytest.raises(ValueError, match="in use"):
            client.start(PROMPT, ASKED, rid=old.rid)
        await client.abort_all()
        assert {old.rid, young.rid, again.rid} <= set(server.aborts) | {again.rid}
        assert client.running == []


async def test_a_call_that_pauses_is_still_there_and_has_no_tokens(speech: Speech) -> None:
    async with speech.replay(BUSY) as server, speech.client(server.url, retries=LATER) as client:
        call = client.start(PROMPT, ASKED)
        await until(lambda: client.retried == 1)
        await asyncio.sleep(0.02)
        (running,) = client.running
        assert (running.rid, running.tries, running.token_count, running.tokens_per_second) == (call.rid, 1, 0, 0.0)
        assert (running.ttft, running.last_event) == (None, None)
        await call.abort()


async def test_a_snapshot_can_be_taken_at_any_moment_and_sent_elsewhere(speech: Speech) -> None:
    async with (
        speech.replay([0.01, *speech.whole]) as server,
        speech.client(server.url, limits=Limits(calls=8), retries=SOON) as client,
    ):
        calls = [client.start(PROMPT, ASKED) for _ in range(40)]
        while seen := client.running:
            totals = totals_of(client)
            assert (totals.calls, totals.tokens) == (len(seen), sum(running.token_count for running in seen))
            assert totals.slowest_tokens == seen[0].token_count
            assert totals.slowest_age is not None
            assert totals.slowest_age >= seen[0].age
            assert all(type(running) is Running for running in seen)
            assert [running.rid for running in seen] == [call.rid for call in calls if not has_ended(call)]
            assert pickle.loads(pickle.dumps(seen)) == seen
            await asyncio.sleep(0)
        assert all(has_ended(call) for call in calls)
        assert totals_of(client) == Totals()


async def test_a_failed_call_leaves_the_registry_with_its_error(speech: Speech) -> None:
    truncated: list[Step] = [head(), chunk(speech.event([1], 1)), chunk(DONE), LAST_CHUNK, END]
    async with speech.replay(truncated) as server, speech.client(server.url) as client:
        with pytest.raises(StreamTruncated):
            await client.generate(PROMPT, ASKED)
        assert client.running == []


# The queue for a slot.


async def test_those_that_leave_the_queue_for_a_slot_are_not_remembered(speech: Speech) -> None:
    async with speech.replay([HANG]) as server, speech.client(server.url, limits=Limits(calls=1)) as client:
        client.start(PROMPT, ASKED)
        assert client._session is not None
        slots = client._session.slots
        for _ in range(100):
            await client.start(PROMPT, ASKED).abort()
        assert slots.waiting == 0
        waiters = [asyncio.ensure_future(client.generate(PROMPT, ASKED)) for _ in range(100)]
        await asyncio.sleep(0)
        assert slots.waiting == 100
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)
        assert slots.waiting == 0


async def test_a_cancelled_waiter_leaves_the_queue_and_the_next_one_gets_the_place() -> None:
    slots = Slots(1)
    assert await slots.wait(slots.request())
    waiters = [asyncio.ensure_future(slots.wait(slots.request())) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.wait(waiters[:1])
    assert slots.waiting == 2
    slots.release()
    assert await waiters[1] is True
    assert (slots.free, slots.waiting) == (0, 1)
    slots.dismiss()
    assert await waiters[2] is False
    slots.release()
    assert (slots.free, slots.waiting) == (1, 0)
