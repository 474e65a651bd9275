"""A look into a call that runs: ``Call.token_ids()`` and ``Call.wait_tokens()``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Client, Generation, Limits, StreamTruncated
from streamfold.client.attempt import Attempt
from support.replay import (
    ASKED,
    DONE,
    END,
    FIN,
    HANG,
    LAST_CHUNK,
    PROMPT,
    RUNNING,
    Replay,
    Step,
    begun,
    chunk,
    dripped,
    event,
    events,
    head,
    stream,
    until,
)
from support.tries import BUSY, LATER, SOON, in_turn

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from support.speaking import Speech

BOTH_LOOPS = True

TRANSPORTS = pytest.mark.parametrize("transport", ["direct", "httpx"])


def soon(waiting: Coroutine[Any, Any, int]) -> asyncio.Task[int]:
    """Started, and looked at no earlier than the call."""
    return asyncio.ensure_future(asyncio.wait_for(waiting, 30))


async def test_each_who_waits_is_woken_once_its_own_number_of_tokens_has_come(speech: Speech) -> None:
    gates = [asyncio.Event() for _ in range(3)]
    steps: list[Step] = [head()]
    for gate, (ids, count) in zip(gates, [([1, 2], 2), ([3], 3), ([4, 5, 6], 6)], strict=True):
        steps += [gate, chunk(speech.event(ids, count, "stop" if count == 6 else None))]
    async with speech.replay([*steps, LAST_CHUNK, END]) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        waiting = {n: soon(call.wait_tokens(n)) for n in (3, 1, 6, 2, 5, 3_000)}
        assert await call.wait_tokens(0) == 0
        await asyncio.sleep(0)
        gates[0].set()
        assert await waiting[1] == await waiting[2] == 2
        assert call.token_ids().tolist() == [1, 2]
        assert not any(waiting[n].done() for n in (3, 5, 6, 3_000))
        gates[1].set()
        assert await waiting[3] == 3
        assert await call.wait_tokens(3) == 3
        assert not waiting[5].done()
        gates[2].set()
        assert await waiting[5] == await waiting[6] == 6
        assert await waiting[3_000] == 6, "the call has ended"
        assert (await call).token_ids.tolist() == call.token_ids().tolist() == [1, 2, 3, 4, 5, 6]


@TRANSPORTS
async def test_no_event_in_between_wakes_anybody(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for kind, hear in Attempt._reports.items():

        def noted(attempt: Attempt, detail: object, kind: str = kind, hear: Any = hear) -> None:
            told.append(kind)
            hear(attempt, detail)

        monkeypatch.setitem(Attempt._reports, kind, noted)
    go_on = asyncio.Event()
    steps: list[Step] = [head(), go_on, *map(chunk, events(400)), chunk(DONE), LAST_CHUNK, END]
    async with Replay(steps) as server, Client(server.url, transport=transport) as client:
        call = client.start(PROMPT, {"max_new_tokens": 400})
        waiting = [soon(call.wait_tokens(n)) for n in (390, 7, 390)]
        await until(lambda: server.generates)
        go_on.set()
        assert [await each >= n for each, n in zip(waiting, (390, 7, 390), strict=True)] == [True] * 3
        await call
    assert told.count("tokens") in (1, 2), "one for each number, fewer where one read brings enough for both"


@TRANSPORTS
async def test_a_look_is_a_copy_in_every_state_of_the_call(transport: Any) -> None:
    steps: list[Step] = [head(), chunk(event([3, 1, 2], 3)), HANG]
    async with Replay(steps) as server, Client(server.url, transport=transport) as client:
        call = client.start(PROMPT, ASKED)
        none = call.token_ids()
        assert none.dtype == np.int32
        assert len(none) == 0
        assert await asyncio.wait_for(call.wait_tokens(2), 30) == 3
        ids = call.token_ids()
        assert ids.dtype == np.int32
        ids[:] = 9
        part = await call.abort()
        call.token_ids()[:] = 9
        assert part.token_ids.tolist() == call.token_ids().tolist() == [3, 1, 2]
        assert await call.wait_tokens(4) == 3


@TRANSPORTS
async def test_a_snapshot_is_what_an_abort_at_this_moment_gives(transport: Any) -> None:
    steps: list[Step] = [head(), chunk(event([3, 1, 2], 3)), HANG]
    asked = {"max_new_tokens": 9, "top_p": 0.5}
    async with Replay(steps) as server, Client(server.url, transport=transport) as client:
        call, other = client.start(PROMPT, asked, top_p=True), client.start(PROMPT, asked, top_p=True)
        none = call.snapshot()
        assert (none.token_ids.tolist(), none.text, none.finish_reason, none.missing) == ([], None, None, ())
        assert none.logprobs is not None
        for each in (call, other):
            await asyncio.wait_for(each.wait_tokens(3), 30)
        part = call.snapshot()
        assert part.token_ids.tolist() == [3, 1, 2]
        assert part.missing == ("top_p",)
        assert part.timings is not None
        assert not call.aborting
        part.token_ids[:] = 9
        assert (part.text, part.finish_reason) == ((await other.abort(drain=0)).text, None)
        assert call.snapshot() == await other.abort()
        assert await call.abort(drain=0) == call.snapshot() == await other.abort()
        assert call.snapshot() is await call.abort(), "it has ended"


@TRANSPORTS
async def test_a_call_ends_as_it_would_if_nobody_had_looked(transport: Any) -> None:
    payloads = events(60)
    steps: list[Step] = [head(), *dripped(map(chunk, payloads), 97), chunk(DONE), LAST_CHUNK, END]
    async with Replay(steps) as server, Client(server.url, transport=transport) as client:
        call, undisturbed = client.start(PROMPT, ASKED), client.start(PROMPT, ASKED)
        seen = 0
        while not call.error and call.token_count < 60:
            snapshot = call.snapshot()
            assert len(snapshot.token_ids) == call.token_count >= seen
            assert snapshot.token_ids.tolist() == [*range(1, 1 + call.token_count)]
            seen = call.token_count
            await asyncio.sleep(0)
        assert await call == await undisturbed == call.snapshot()


@TRANSPORTS
async def test_a_snapshot_between_two_tries_is_empty_and_the_next_try_goes_on(transport: Any) -> None:
    async with Replay() as server, Client(server.url, transport=transport, retries=LATER) as client:
        server.routes[server.path] = in_turn(server, BUSY)
        call = client.start(PROMPT, ASKED)
        await until(lambda: client.retried)
        assert [call.snapshot().token_ids.tolist() for _ in range(3)] == [[]] * 3
        assert (await call.abort()).token_ids.tolist() == []
        assert call.error is None


@TRANSPORTS
async def test_a_snapshot_of_a_call_that_waits_for_a_slot_is_empty(transport: Any) -> None:
    async with Replay(RUNNING) as server, Client(server.url, transport=transport, limits=Limits(calls=1)) as client:
        first = await begun(client)
        queued = client.start(PROMPT, ASKED)
        assert queued.snapshot() == queued.snapshot() == Generation([], [])
        assert ", ," not in repr(queued.snapshot())
        await first.abort()
        await asyncio.wait_for(queued.wait_tokens(2), 30)
        assert queued.snapshot().token_ids.tolist() == [1, 2]
        assert (await queued.abort(drain=0)).token_ids.tolist() == [1, 2]


@TRANSPORTS
async def test_a_snapshot_of_a_call_that_has_failed_is_what_its_error_holds(transport: Any) -> None:
    async with Replay([head(), chunk(event([1], 1)), FIN]) as server, Client(server.url, transport=transport) as client:
        call = client.start(PROMPT, ASKED)
        with pytest.raises(StreamTruncated) as caught:
            await call
        assert call.snapshot() is caught.value.partial
        assert call.snapshot().token_ids.tolist() == [1]


@TRANSPORTS
async def test_who_waits_over_a_retry_is_woken_by_the_tokens_of_the_next_try_alone(transport: Any) -> None:
    go_on = asyncio.Event()
    async with Replay() as server, Client(server.url, transport=transport, retries=SOON) as client:
        good: list[Step] = [
            head(),
            chunk(event([1], 1)),
            go_on,
            chunk(event([2], 2, "stop")),
            chunk(DONE),
            LAST_CHUNK,
            END,
        ]
        server.routes[server.path] = in_turn(server, BUSY, [head(), FIN], good)
        call = client.start(PROMPT, ASKED)
        one, two = soon(call.wait_tokens(1)), soon(call.wait_tokens(2))
        assert await one == 1
        assert call.tries == 3
        assert not two.done()
        go_on.set()
        assert await two == 2


async def test_who_waits_over_the_loss_of_a_kept_connection_is_woken_by_the_next_one() -> None:
    whole = stream(*events(2), DONE)
    async with Replay() as server, Client(server.url) as client:
        server.routes[server.path] = in_turn(server, whole, [FIN], whole)
        await client.generate(PROMPT, ASKED)
        call = client.start(PROMPT, ASKED)
        assert await asyncio.wait_for(call.wait_tokens(2), 30) == 2
        await call


@pytest.mark.parametrize("end", ["abort", "error", "pause"])
async def test_the_end_of_the_call_wakes_all_and_raises_nothing(end: str) -> None:
    begin: list[Step] = [head(), chunk(event([1], 1))]
    replies: dict[str, list[Step]] = {"abort": [*begin, HANG], "error": [*begin, FIN], "pause": BUSY}
    async with Replay(replies[end]) as server, Client(server.url, retries=LATER) as client:
        call = client.start(PROMPT, ASKED)
        waiting = [soon(call.wait_tokens(n)) for n in (50, 60, 50)]
        if end == "pause":
            await until(lambda: client.retried)
            await call.abort()
        elif end == "abort":
            await asyncio.wait_for(call.wait_tokens(1), 30)
            await call.abort()
        else:
            with pytest.raises(StreamTruncated):
                await call
        assert [await each for each in waiting] == [int(end != "pause")] * 3
        assert await call.wait_tokens(50) == int(end != "pause")


async def test_to_end_a_wait_does_not_end_the_call_nor_the_waits_of_others() -> None:
    go_on = asyncio.Event()
    steps: list[Step] = [
        head(),
        chunk(event([1], 1)),
        go_on,
        chunk(event([2, 3], 3, "stop")),
        chunk(DONE),
        LAST_CHUNK,
        END,
    ]
    async with Replay(steps) as server, Client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        first, other = soon(call.wait_tokens(2)), soon(call.wait_tokens(3))
        await call.wait_tokens(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not call.aborting
        go_on.set()
        assert await other == 3
        assert (await call).finish_reason == "stop"


async def test_a_call_without_a_budget_has_no_tokens_to_wait_for() -> None:
    async with Client("127.0.0.1:9") as client:
        call = client.start(PROMPT, {"max_new_tokens": 0})
        assert await call.wait_tokens(5) == 0
        assert call.token_ids().tolist() == []


async def test_a_number_of_tokens_that_is_none_is_refused() -> None:
    async with Client("127.0.0.1:9") as client:
        call = client.start(PROMPT, {"max_new_tokens": 0})
        with pytest.raises(ValueError, match="n must be 0 or more tokens, not -1"):
            await call.wait_tokens(-1)
        with pytest.raises(TypeError):
            await call.wait_tokens(1.5)  # type: ignore[arg-type]
