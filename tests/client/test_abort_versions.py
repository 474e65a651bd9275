"""vLLM tells weight versions in its terminal event: an abort waits for it a little, though nothing was asked for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import pytest

from streamfold import Client, Timeouts
from streamfold.loopback import Loopback
from support.replay import DONE, PROMPT, begun, chunk, head, stream, until
from support.speaking import VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamfold import Call, Generation
    from support.replay import Replay, Request, Route, Step

BOTH_LOOPS = True
EACH_DRIVER = True

PARAMS = {"max_new_tokens": 4000, "ignore_eos": True}
CALLS = 12


def slow(**options: Any) -> Loopback:
    return Loopback(engine="vllm", dev_mode=True, token_rate=200, prefill_delay=0.001, **options)


def covers(generation: Generation, version: str | None) -> bool:
    count = len(generation.token_ids)
    return generation.version_spans == ([(version, 0, count)] if count else [])


async def started(client: Client) -> list[Call]:
    calls = [client.start([5, 6, 7], PARAMS) for _ in range(CALLS)]
    await until(lambda: all(call.token_count > 1 for call in calls))
    return calls


async def test_no_aborted_call_loses_its_versions() -> None:
    with slow() as engine:
        async with Client(engine.url, engine="vllm") as client:
            generations = await asyncio.gather(*(call.abort() for call in await started(client)))
            assert all(covers(generation, "default") for generation in generations)
            assert {generation.finish_reason for generation in generations} == {"abort"}
            calls = await started(client)
            await client.abort_all()
            assert all([covers(await call, "default") for call in calls])


async def test_a_cancelled_call_keeps_its_versions_too() -> None:
    with slow() as engine:
        async with Client(engine.url, engine="vllm") as client:
            (call, *others) = await started(client)

            async def wait() -> None:
                await call

            waiter = asyncio.ensure_future(wait())
            await asyncio.sleep(0)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert covers(await call.abort(), "default")
            for other in others:
                await other.abort()


@pytest.mark.parametrize("engine", ["vllm", "vllm-completions"])
async def test_releases_that_tell_no_versions_leave_a_span_without_one(
    engine: Literal["vllm", "vllm-completions"],
) -> None:
    with slow(version="0.28.0") as loopback:
        async with Client(loopback.url, engine=engine) as client:
            generations = await asyncio.gather(*(call.abort() for call in await started(client)))
    assert all(covers(generation, None) for generation in generations)


def deaf(server: Replay) -> Route:
    """An engine whose abort has reached the wrong one of its processes: the request runs on."""

    def route(request: Request) -> Iterator[Step]:
        yield from (head(), *map(chunk, VLLM.events(2, finish=None)))
        yield server.aborted[request.rid]
        yield 30

    return route


async def test_where_the_terminal_event_does_not_come_an_abort_ends_without_it() -> None:
    async with VLLM.replay() as server:
        server.routes[VLLM.path] = deaf(server)
        async with VLLM.client(server.url) as client:
            generation = await asyncio.wait_for((await begun(client)).abort(), 20)
            assert (generation.token_ids.tolist(), generation.finish_reason) == ([1, 2], None)
            assert generation.version_spans == [(None, 0, 2)]


def late(server: Replay) -> Route:
    """An engine whose terminal event comes a little after its reply to the abort."""

    def route(request: Request) -> Iterator[Step]:
        yield from (head(), *map(chunk, VLLM.events(2, finish=None)))
        yield server.aborted[request.rid]
        yield 0.5
        yield from stream(VLLM.event([], 2, "abort", prompt=len(PROMPT), version="7"), DONE)[1:]

    return route


async def test_a_drain_that_is_given_wins_over_the_engine_s_own() -> None:
    async with VLLM.replay() as server:
        server.routes[VLLM.path] = late(server)
        async with VLLM.client(server.url) as client:
            assert (await (await begun(client)).abort(drain=20)).version_spans == [("7", 0, 2)]
            assert (await (await begun(client)).abort(drain=0)).version_spans == [(None, 0, 2)]
            assert (await (await begun(client)).abort()).version_spans == [(None, 0, 2)]


def test_a_client_that_never_drains_does_not_wait_for_versions_either() -> None:
    async def drains(**options: Any) -> float:
        async with Client("http://127.0.0.1:9", **options) as client:
            call = client.start([5], PARAMS)
            await call.abort()
            return call._runner._request.drain

    assert asyncio.run(drains(engine="vllm")) == 0.1
    assert asyncio.run(drains(engine="vllm-completions")) == 0.1
    assert asyncio.run(drains(engine="vllm", timeouts=Timeouts(drain=0))) == 0
    assert asyncio.run(drains(engine="vllm", timeouts=Timeouts(drain=0.05))) == 0.05
    assert asyncio.run(drains(engine="sglang")) == 0
