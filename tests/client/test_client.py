"""The client over real HTTP: requests, responses, limits, opening and closing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold import Client, DecodeError, EngineError, Limits, Retries, StreamTruncated, Timeouts
from streamfold.client.limits import Slots
from support.calls import has_ended
from support.replay import (
    ASKED,
    DONE,
    END,
    HANG,
    LAST_CHUNK,
    PROMPT,
    Request,
    Step,
    answer_json,
    chunk,
    dripped,
    head,
    stream,
    until,
)
from support.unreachable import closed_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.speaking import Speech

BOTH_LOOPS = True


# Results.


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_a_generation_holds_what_the_engine_sent_however_the_bytes_are_split(speech: Speech, size: int) -> None:
    async with speech.replay(dripped(speech.whole, size)) as server, speech.client(server.url) as client:
        generation = await client.generate(PROMPT, {"max_new_tokens": 8})
    assert generation.token_ids.tolist() == [1, 2, 3]
    assert generation.logprobs is not None
    assert generation.logprobs.tolist() == [-0.125, -0.25, -0.375]
    assert generation.text == speech.text("bcd")
    assert generation.finish_reason == "stop"
    assert generation.prompt_tokens == len(PROMPT)


async def test_a_call_can_be_awaited_repeatedly_and_by_several_tasks(speech: Speech) -> None:
    async with speech.replay(speech.whole) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        first, second = await asyncio.gather(call, call)
        assert first is second is await call
        assert len(server.generates) == 1


async def test_a_failed_call_raises_the_same_error_each_time(speech: Speech) -> None:
    async with speech.replay(stream(*speech.events(2, finish=None))) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        errors = await asyncio.gather(call, call, return_exceptions=True)
        with pytest.raises(StreamTruncated) as again:
            await call
        assert errors[0] is errors[1] is again.value
        depth = len(again.traceback)
        with pytest.raises(StreamTruncated) as last:
            await call
        assert len(last.traceback) == depth, "the traceback grows"


async def test_a_failure_that_is_never_awaited_is_not_reported_as_never_retrieved(speech: Speech) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with speech.replay(stream(*speech.events(2, finish=None))) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        await until(partial(has_ended, call))
        del call
        gc.collect()
        await asyncio.sleep(0)
    assert reported == []


async def test_a_call_tells_what_it_is_doing(speech: Speech) -> None:
    more = asyncio.Event()
    steps: list[Step] = [
        head(),
        chunk(speech.event([1, 2], 2)),
        more,
        chunk(speech.event([3], 3, "stop")),
        chunk(DONE),
        LAST_CHUNK,
        END,
    ]
    async with speech.replay(steps) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        assert call.token_count == 0
        assert call.tokens_per_second == 0
        await until(lambda: call.token_count)
        await asyncio.sleep(0.02)
        (running,) = client.running
        assert (running.rid, running.token_count) == (call.rid, 2)
        assert running.age > 0.01
        assert 0 < running.tokens_per_second < 200
        assert call.rid in repr(call)
        more.set()
        await call
        assert client.running == []
        assert call.token_count == 3
        age, rate = call.age, call.tokens_per_second
        await asyncio.sleep(0.01)
        assert (call.age, call.tokens_per_second) == (age, rate), "they stand still after the end"


async def test_an_abort_that_the_engine_decided_on_is_a_result(speech: Speech) -> None:
    steps = stream(speech.event([1], 1), speech.event([2], 2, "abort"), DONE)
    async with speech.replay(steps) as server, speech.client(server.url) as client:
        generation = await client.generate(PROMPT, ASKED)
        assert generation.finish_reason == "abort"
        assert generation.token_ids.tolist() == [1, 2]
        assert server.aborts == []


# The end of a good stream.


async def test_a_body_is_read_to_its_end_so_that_the_engine_never_sees_a_client_leave(speech: Speech) -> None:
    left_early: list[bool] = []

    def late(request: Request) -> Iterator[Step]:
        yield from (head(), *map(chunk, speech.events(3)), chunk(DONE))
        yield 0.1
        left_early.append(request.peer_closed.is_set())
        yield from (LAST_CHUNK, END)

    async with speech.replay(late) as server, speech.client(server.url) as client:
        generation = await client.generate(PROMPT, ASKED)
        assert generation.finish_reason == "stop"
        assert left_early == [False]
        assert server.aborts == []


@pytest.mark.parametrize("last", [DONE, b""], ids=["after [DONE]", "after the terminal event"])
async def test_a_body_that_does_not_end_is_waited_for_within_bounds(speech: Speech, last: bytes) -> None:
    steps: list[Step] = [head(), *map(chunk, speech.events(3)), *([chunk(last)] if last else []), HANG]
    async with speech.replay(steps) as server, speech.client(server.url) as client:
        generation = await asyncio.wait_for(client.generate(PROMPT, ASKED), 20)
        assert generation.token_ids.tolist() == [1, 2, 3]
        await asyncio.wait_for(server.generates[0].peer_closed.wait(), 20)
        assert server.aborts == []


async def test_a_body_that_continues_after_its_terminal_event_is_read_within_bounds(speech: Speech) -> None:
    written = 0

    def endless(request: Request) -> Iterator[Step]:
        nonlocal written
        yield from (head(), *map(chunk, speech.events(3)), chunk(DONE))
        while True:
            written += 1
            yield chunk(b": more\n\n" * 1000)

    async with speech.replay(endless) as server, speech.client(server.url) as client:
        generation = await asyncio.wait_for(client.generate(PROMPT, ASKED), 20)
        assert generation.finish_reason == "stop"
        assert server.aborts == []
    assert written < 1000, "8 MB and more: it is the time that ended it"


# How many at once.


async def test_no_more_calls_run_than_the_limit_and_waiting_for_a_slot_is_no_error(speech: Speech) -> None:
    # The last waits for its slot several times as long as the timeouts.
    limits, timeouts = Limits(calls=4), Timeouts(connect=0.5, first_token=0.2, next_token=0.2)
    steps: list[Step] = [0.05, *speech.whole]
    async with speech.replay(steps) as server, speech.client(server.url, limits=limits, timeouts=timeouts) as client:
        calls = [client.start(PROMPT, ASKED) for _ in range(80)]
        assert len(client.running) == 80
        generations = await asyncio.gather(*calls)
        assert {generation.finish_reason for generation in generations} == {"stop"}
        assert server.most_open <= 4
        order = [request.rid for request in server.generates]
    places = {call.rid: place for place, call in enumerate(calls)}
    drift = [abs(places[rid] - place) for place, rid in enumerate(order)]
    assert max(drift) < 20, "first come, first served, give or take how long a connect takes"


async def test_a_slot_that_comes_in_the_moment_of_a_cancel_is_not_lost() -> None:
    slots = Slots(1)
    assert await slots.wait(slots.request())
    place = slots.request()
    waiter = asyncio.ensure_future(slots.wait(place))
    await asyncio.sleep(0)
    slots.release()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert slots.free == 1


async def test_places_are_handed_out_in_order_and_so_many_in_one_pass_of_the_event_loop() -> None:
    slots = Slots(100, per_pass=8)
    places = [slots.request() for _ in range(30)]
    for held in (8, 16, 24, 30):
        assert [place.done() for place in places] == [True] * held + [False] * (30 - held)
        await asyncio.sleep(0)
    slots.release()
    assert (slots.free, slots.waiting) == (71, 0)


async def test_a_burst_of_starts_begins_little_by_little_and_no_try_goes_through_what_others_hold(
    speech: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    """httpx goes through all that a pool holds at each step of each request: thousands of calls at a dead port stopped
    the event loop for a minute."""
    passes = 0
    begun: list[int] = []
    pools: list[object] = []  # kept, so that no two have the same id
    send = httpx.AsyncHTTPTransport.handle_async_request

    async def watched(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        begun.append(passes)
        pools.append(transport._pool)
        return await send(transport, request)

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", watched)
    retries = Retries(tries=2, first=0, longest=0)
    with closed_port() as (_, url):
        client = speech.client(url, retries=retries, transport="httpx")
        counter = asyncio.ensure_future(count())
        calls = [client.start(PROMPT, ASKED) for _ in range(300)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        counter.cancel()
        await client.aclose()
    assert {type(end) for end in ends} == {EngineError}
    assert len({id(pool) for pool in pools}) == len(pools) == 600
    assert max(Counter(begun).values()) <= 2 * 64  # the count moves in the middle of a pass


@pytest.mark.parametrize("field", ["calls", "max_event_bytes"])
def test_a_limit_below_one_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Limits(**{field: 0})


async def test_an_event_beyond_the_limit_is_refused(speech: Speech) -> None:
    limits = Limits(max_event_bytes=1000)
    steps = stream(speech.event([1], 1), b"data: " + b" " * 2000, DONE)
    async with speech.replay(steps) as server, speech.client(server.url, limits=limits) as client:
        with pytest.raises(DecodeError) as refused:
            await client.generate(PROMPT, ASKED)
    assert refused.value.kind == "too_large"
    assert refused.value.partial is not None
    assert refused.value.partial.token_ids.tolist() == [1]


# Load.


async def test_the_load_is_the_sum_over_all_workers_of_a_router(speech: Speech) -> None:
    busy, busier = ({speech.load_path: speech.load(*load)} for load in ((2, 1), (4, 0)))
    async with speech.replay(routes=busy) as one, speech.replay(routes=busier) as two:
        workers = answer_json({"workers": [{"url": one.url}, {"url": f"{two.url}/"}]})
        async with speech.replay(routes={"/workers": workers}) as router, speech.client(router.url) as client:
            assert await client.load() == 7
            assert [len(server.at(speech.load_path)) for server in (one, two, router)] == [1, 1, 0]


@pytest.mark.parametrize(
    "reply", [answer_json({"detail": "no"}, 404), answer_json("busy"), [HANG], [head(200, "x", 9), HANG]]
)
async def test_a_load_that_is_not_reported_is_an_error_and_not_idle(
    speech: Speech, reply: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 0.4)
    async with speech.replay(routes={speech.load_path: reply}) as server, speech.client(server.url) as client:
        with pytest.raises(EngineError):
            await asyncio.wait_for(client.load(), 20)


async def test_a_cancelled_load_request_leaks_nothing(speech: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 0.4)
    before = asyncio.all_tasks()
    async with speech.replay(routes={speech.load_path: [HANG]}) as slow, speech.replay() as broken:
        workers = answer_json({"workers": [{"url": slow.url}, {"url": broken.url}]})
        async with speech.replay(routes={"/workers": workers}) as router:
            async with speech.client(router.url) as client:
                asking = asyncio.ensure_future(client.load())
                await until(lambda: slow.requests and broken.requests)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            await until(lambda: slow.open == 0)
    assert asyncio.all_tasks() == before


# Opening and closing.


async def test_closing_aborts_what_runs_gives_it_to_who_waits_and_leaves_nothing(speech: Speech) -> None:
    before = asyncio.all_tasks()
    async with speech.replay([head(), chunk(speech.event([1], 1)), HANG]) as server:
        async with speech.client(server.url, limits=Limits(calls=3)) as client:
            calls = [client.start(PROMPT, ASKED) for _ in range(6)]
            waiter = asyncio.gather(calls[0], calls[5])
            await until(lambda: all(call.token_count for call in calls[:3]))
        generations = [await call for call in calls]
        assert [generation.token_ids.tolist() for generation in generations] == [[1]] * 3 + [[]] * 3
        assert list(await waiter) == [generations[0], generations[5]]
        assert sorted(server.aborts) == sorted(call.rid for call in calls[:3])
        assert len(server.generates) == 3
        await until(lambda: server.open == 0)
    assert asyncio.all_tasks() == before


async def test_closing_twice_or_unused_is_fine_and_a_closed_client_can_be_used_again(speech: Speech) -> None:
    async with speech.replay(speech.whole) as server:
        client = speech.client(server.url)
        await client.aclose()
        await client.generate(PROMPT, ASKED)
        await asyncio.gather(client.aclose(), client.aclose())
        await client.aclose()
        assert (await client.generate(PROMPT, ASKED)).finish_reason == "stop"
        await client.aclose()


async def test_nothing_can_be_started_while_the_client_closes(speech: Speech) -> None:
    async with speech.replay([HANG]) as server:
        client = speech.client(server.url)
        call = client.start(PROMPT, ASKED)
        await until(lambda: server.generates)
        closing = asyncio.ensure_future(client.aclose())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="being closed"):
            client.start(PROMPT, ASKED)
        await closing
        assert len((await call).token_ids) == 0


async def test_a_cancelled_aclose_still_closes_the_client(speech: Speech) -> None:
    async with speech.replay([HANG]) as server:
        client = speech.client(server.url)
        call = client.start(PROMPT, ASKED)
        await until(lambda: server.generates)
        closing = asyncio.ensure_future(client.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await client.aclose()
        assert has_ended(call)
        await until(lambda: server.open == 0)


def test_a_client_belongs_to_one_loop_until_it_is_closed() -> None:
    async def use(client: Client) -> None:
        assert await client.generate([1], {"max_new_tokens": 0})

    client = Client("http://127.0.0.1:9")
    with asyncio_loop() as first, asyncio_loop() as second:
        first.run_until_complete(use(client))
        with pytest.raises(RuntimeError, match=r"another event loop.*aclose"):
            second.run_until_complete(use(client))
        with pytest.raises(RuntimeError, match=r"another event loop.*aclose"):
            second.run_until_complete(client.aclose())
        first.run_until_complete(client.aclose())
        second.run_until_complete(use(client))
        second.run_until_complete(client.aclose())
        first.run_until_complete(use(client))
    with asyncio_loop() as third:  # the loop is gone, and with it all that was open
        third.run_until_complete(client.aclose())
        third.run_until_complete(use(client))
        third.run_until_complete(client.aclose())


@contextlib.contextmanager
def asyncio_loop() -> Iterator[asyncio.AbstractEventLoop]:
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        yield loop


def test_a_call_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        Client("http://127.0.0.1:9").start([1], {})


@pytest.mark.parametrize("more", [{"engine": "tgi"}, {"engine": None}, {"transport": "curl"}, {"transport": None}])
def test_an_unknown_engine_or_transport_is_refused_with_the_known_ones(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sglang|httpx"):
        Client("http://h", **more)


def test_the_repr_of_a_client_names_engine_and_address_and_no_secret() -> None:
    client = Client("http://engine:30000/base", engine="vllm", api_key="secret")
    assert repr(client) == "<Client of vllm at http://engine:30000/base: 0 running>"
