"""Cancels and a host's abort flag at every point where a call can wait: nothing is sent afterwards, nothing is lost.

The kinds of fault are jd/tenacity#529 (a retry that swallows a cancel) and vllm-project/vime#294 (a request that
leaves just after the abort of all).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from streamfold import Call, Client, Experts, Generation, Limits, Retries, Timeouts
from support.calls import abort_soon
from support.replay import ASKED, HANG, PROMPT, Replay, begun, chunk, head, until
from support.tries import BUSY, LATER, SOON, in_turn, rids
from support.unreachable import first_bytes, full_house

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from support.speaking import Speech, Spoken

BOTH_LOOPS = True
EACH_DRIVER = True

POINTS: dict[str, tuple[Spoken, list[int]]] = {  # what the engine does, and the tokens that have come by then
    "slot": (lambda speech: speech.running, []),
    "headers": ([HANG], []),
    "first event": ([head(), HANG], []),
    "between events": (lambda speech: speech.running, [1, 2]),
    "second try": ([head(), HANG], []),
    "pause": (BUSY, []),
    "drain": (lambda speech: speech.running, [1, 2]),
}
HOWS = ("cancel", "wait_for", "cancel of the pump too")


@contextlib.asynccontextmanager
async def at_point(speech: Speech, point: str) -> AsyncIterator[tuple[Replay, Client, Call]]:
    """A call that waits just there."""
    steps, kept = POINTS[point]
    retries = SOON if point == "second try" else LATER
    async with (
        speech.replay(speech.told(steps)) as server,
        speech.client(server.url, retries=retries, limits=Limits(calls=1)) as client,
    ):
        if point == "slot":
            await begun(client)
        if point == "second try":
            server.routes[speech.path] = in_turn(server, BUSY, speech.told(steps))
        call = client.start(PROMPT, ASKED)
        await until(lambda: point == "slot" or len(server.generates) == 1 + (point == "second try"))
        await until(lambda: call.token_count == len(kept))
        if point == "pause":
            await until(lambda: client.retried == 1)
        if point == "drain":
            abort_soon(call, drain=60)
            await until(lambda: server.aborts)
        await asyncio.sleep(0.02)
        yield server, client, call


async def _wait(call: Call) -> Generation:
    return await call


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("point", POINTS)
async def test_a_cancel_goes_through_from_every_point_with_the_prefix_kept_the_socket_closed_and_no_later_request(
    speech: Speech, point: str, how: str
) -> None:
    async with at_point(speech, point) as (server, client, call):
        (*others,) = (running.rid for running in client.running if running.rid != call.rid)
        waiter = asyncio.ensure_future(_wait(call))
        await asyncio.sleep(0)
        sent = len(server.generates)
        if how == "wait_for":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waiter, 0.02)
        elif how == "cancel":
            waiter.cancel()
        else:  # as at the end of asyncio.run
            for task in asyncio.all_tasks():
                if task is waiter or task.get_name().startswith("streamfold "):
                    task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiter, 20)
        assert waiter.cancelled()
        assert (await call.abort()).token_ids.tolist() == POINTS[point][1]
        if how != "cancel of the pump too":
            assert [running.rid for running in client.running] == others
        await client.aclose()
        await until(lambda: server.open == 0)
        await asyncio.sleep(0.03)
        assert len(server.generates) == sent


@pytest.mark.parametrize("how", ["cancel", "wait_for"])
async def test_a_cancel_goes_through_from_the_connect_and_no_request_leaves_later(how: str) -> None:
    with full_house() as (server, url):
        async with Client(url, timeouts=Timeouts(connect=1.0), retries=LATER) as client:
            call = client.start(PROMPT, ASKED)
            waiter = asyncio.ensure_future(_wait(call))
            await asyncio.sleep(0.05)
            if how == "wait_for":
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(waiter, 0.02)
            else:
                waiter.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(waiter, 0.5)
            assert waiter.cancelled()
            assert len((await call.abort()).token_ids) == 0
            assert client.running == []
            accepting = asyncio.ensure_future(asyncio.to_thread(first_bytes, server))
        received = await accepting
        assert received, "no connection was made: this tests nothing"
        assert not any(received)


# A host's own flag.


def from_look(number: int) -> Callable[[], bool]:
    """A flag that is seen raised from the so-manieth look on."""
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return looks >= number

    return look


async def test_a_flag_that_is_raised_before_the_start_lets_nothing_leave(speech: Speech) -> None:
    async with speech.replay(speech.whole) as server, speech.client(server.url) as client:
        generation = await client.generate(PROMPT, ASKED, aborted=lambda: True)
        assert (generation.finish_reason, len(generation.token_ids)) == (None, 0)
        assert client.running == []
        assert server.accepted == 0


async def test_a_flag_that_is_raised_while_a_call_waits_for_its_slot_lets_nothing_leave(speech: Speech) -> None:
    aborting = False
    async with speech.replay(speech.running) as server, speech.client(server.url, limits=Limits(calls=1)) as client:
        first = await begun(client)
        second = client.start(PROMPT, ASKED, aborted=lambda: aborting)
        await asyncio.sleep(0)
        aborting = True
        await first.abort()
        generation = await asyncio.wait_for(_wait(second), 20)
        assert (generation.finish_reason, len(generation.token_ids)) == (None, 0)
        assert second.aborting
        assert rids(server) == [first.rid]


async def test_a_flag_that_is_raised_in_a_pause_ends_it_soon_and_lets_nothing_leave(speech: Speech) -> None:
    aborting = False
    async with speech.replay(BUSY) as server, speech.client(server.url, retries=LATER) as client:
        call = client.start(PROMPT, ASKED, aborted=lambda: aborting)
        await until(lambda: client.retried == 1)
        aborting = True
        generation = await asyncio.wait_for(_wait(call), 20)
        assert (generation.finish_reason, len(generation.token_ids)) == (None, 0)
        assert len(server.generates) == 1


@pytest.mark.parametrize("number", range(1, 6))
async def test_whenever_the_flag_is_raised_no_request_leaves_that_is_not_ended_too(speech: Speech, number: int) -> None:
    async with speech.replay([head(), HANG]) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED, aborted=from_look(number))
        waiting = asyncio.ensure_future(_wait(call))
        await asyncio.wait([waiting], timeout=10 if number <= 4 else 0.3)
        left_alone = not waiting.done()
        generation = await call.abort()
        sent = rids(server)
        # Looked at before the slot is used, before the first byte, after it, and with the headers.
        assert len(sent) == (0 if number <= 2 else 1)
        assert left_alone == (number > 4), "it is looked at around the sending only: the rest is for Call.abort()"
        assert set(server.aborts) == set(sent)
        assert len(generation.token_ids) == 0
    await until(lambda: server.open == 0)


@pytest.mark.parametrize("number", range(5, 11))
async def test_a_flag_is_looked_at_again_around_every_later_try(speech: Speech, number: int) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=Retries(tries=2, first=0.0)) as client:
        server.routes[speech.path] = in_turn(server, BUSY, [head(), HANG])
        call = client.start(PROMPT, ASKED, aborted=from_look(number))
        waiting = asyncio.ensure_future(_wait(call))
        await asyncio.wait_for(waiting, 20)
        assert call.aborting
        assert 1 <= len(server.generates) <= 2
        assert set(server.aborts) == set(rids(server)[1:])


async def test_a_flag_that_stays_down_changes_nothing(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=SOON) as client:
        server.routes[speech.path] = in_turn(server, BUSY, speech.whole)
        generation = await client.generate(PROMPT, ASKED, aborted=lambda: False)
        assert generation.finish_reason == "stop"
        assert len(server.generates) == 2
        assert server.aborts == []


async def test_a_request_that_the_flag_catches_right_after_its_sending_is_drained_like_any_other(
    speech: Speech,
) -> None:
    async with speech.replay() as server:
        server.routes[speech.path] = lambda request: [
            head(),
            *map(chunk, speech.events(2, finish=None)),
            server.aborted[request.rid],
            HANG,
        ]
        async with speech.client(server.url, experts=Experts(2, 1), timeouts=Timeouts(drain=0.2)) as client:
            generation = await client.generate(PROMPT, ASKED, aborted=from_look(3))
            assert generation.token_ids.tolist() == [1, 2], "what came in the drain is kept"
