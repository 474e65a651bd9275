"""Thousands of streams through a limit: those that wait do not fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, EngineError, Limits, Retries, Timeouts
from streamfold.client.drivers.direct import DirectDriver
from streamfold.loopback.core.scheduler import Scheduler
from streamfold.rollout.metrics import EventLoopLag
from support.descriptors import room_for
from support.disturbing import Wire, at, nothing_is_left
from support.loopback_http import post
from support.replay import ASKED, PROMPT, until
from support.unreachable import closed_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.client.drivers.base import Exchange, HttpRequest, Listener
    from support.speaking import Speech

BOTH_LOOPS = True

pytestmark = pytest.mark.usefixtures("kept_briefly")

WIRE = Wire("many", {"incremental": True, "stop_probability": 0, "token_rate": None})
PARAMS: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests an engine had, each time that it got another one."""
    found: list[int] = []
    enqueue = Scheduler._enqueue

    def counted(scheduler: Scheduler, request: Any) -> None:
        enqueue(scheduler, request)
        found.append(scheduler.running + scheduler.waiting)

    monkeypatch.setattr(Scheduler, "_enqueue", counted)
    return found


@pytest.mark.parametrize(("streams", "limit"), [(256, 64), pytest.param(2048, 512, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
async def test_many_streams_at_once_go_through_a_limit_and_none_fails(
    streams: int, limit: int, most: list[int], record_property: Callable[[str, object], None]
) -> None:
    """encode/httpx#1171, NovaSky-AI/SkyRL#1381: those that waited for a connection ran into a timeout, or there were
    as many limits as calls."""
    prompts = [[300, i // 256, i % 256] for i in range(streams)]
    with room_for(3 * limit), at(WIRE, faults=False, max_running_requests=limit) as site:
        (engine,) = site.engines
        # Waiting counts to none of these, and nothing is tried again.
        options: dict[str, Any] = {"timeouts": Timeouts(connect=5, first_token=60), "retries": Retries(tries=1)}
        async with Client(site.url, limits=Limits(calls=limit), **options) as client, nothing_is_left(site, client):
            await asyncio.to_thread(post, engine, "pause_generation", {"mode": "retract"})
            with EventLoopLag() as watch:
                calls = [client.start(prompt, PARAMS) for prompt in prompts]
                await until(lambda: engine.stats().open_connections == limit, 120)
                await asyncio.sleep(0.05)
                assert engine.stats().open_connections == limit
                assert len(client.running) == streams
                await asyncio.to_thread(post, engine, "continue_generation")
                generations = await asyncio.gather(*calls)
        assert max(most) <= limit
        assert len(most) == streams, "each was requested once"
        for prompt, generation in zip(prompts, generations, strict=True):
            assert generation.token_ids.tolist() == engine.undisturbed(prompt, PARAMS).token_ids
        pause = round(1000 * watch.longest_pause)
        record_property("longest pause of the event loop in milliseconds", pause)
        print(f"{streams} streams, {limit} at once: {watch.seconds:.1f} s, longest pause of the event loop {pause} ms")


async def test_a_burst_of_starts_begins_little_by_little_with_the_direct_driver(
    speech: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0
    begun: list[int] = []
    start = DirectDriver.start

    def watched(driver: DirectDriver, request: HttpRequest, listener: Listener) -> Exchange:
        if request.stream is not None:
            begun.append(passes)
        return start(driver, request, listener)

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(DirectDriver, "start", watched)
    with closed_port() as (_, url):
        client = speech.client(url, retries=Retries(tries=2, first=0, longest=0))
        counter = asyncio.ensure_future(count())
        calls = [client.start(PROMPT, ASKED) for _ in range(300)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        counter.cancel()
        await client.aclose()
    assert {type(end) for end in ends} == {EngineError}
    assert len(begun) == 600
    assert max(Counter(begun).values()) <= 2 * 64  # the count moves in the middle of a pass
