"""Many aborts over real HTTP: what is kept is a prefix of the undisturbed run, and every engine gets the aborts.

The kind of fault is encode/httpx#1461 and PrimeIntellect-ai/prime-rl#1939: of requests that are aborted around their
connect or in a burst of starts, some are left over, and others begin after the end.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, Limits
from support.disturbing import Site, Wire, at, departures, nothing_is_left
from support.replay import until

if TYPE_CHECKING:
    from streamfold import Call
    from streamfold.loopback.core.reply import Reply

BOTH_LOOPS = True
EACH_DRIVER = True

pytestmark = pytest.mark.usefixtures("kept_briefly")

# Engines that never notice a disconnect, with responses longer than any test waits for.
OPTIONS: dict[str, Any] = {"leave_delay": None, "stop_probability": 0, "token_rate": 500, "prefill_delay": 0.003}
WIRES = (
    Wire("incremental", {**OPTIONS, "incremental": True}),
    Wire("cumulative, behind a router", OPTIONS, behind_router=True),
)
LONG = 30_000
SEEDS = 8
SLOTS = 12


def params(seed: int, most: int = LONG) -> dict[str, Any]:
    return {"max_new_tokens": most, "temperature": 1, "sampling_seed": seed}


def beginnings(site: Site) -> list[Reply]:
    """The first tokens of what each seed gives; no call gets farther within the bounds of an abort."""
    return [site.one.undisturbed([300, seed], params(seed, 1500), return_logprob=True) for seed in range(SEEDS)]


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
@pytest.mark.parametrize("count", [80, pytest.param(2500, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
async def test_calls_that_are_aborted_at_any_moment_keep_a_true_prefix_and_every_engine_gets_the_aborts(
    wire: Wire, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, dice = departures(monkeypatch), random.Random(count)
    kept: list[int] = []
    with at(wire, faults=False) as site:
        wanted = beginnings(site)

        async def one(client: Client, places: asyncio.Semaphore, seed: int, *, waits: bool) -> None:
            async with places:
                call = client.start([300, seed], params(seed))
                if waits:  # however slow the machine is, some have got somewhere
                    await until(lambda: call.token_count)
                await asyncio.sleep(dice.uniform(0, 0.03))
                generation = await call.abort()
            n = len(generation.token_ids)
            assert generation.token_ids.tolist() == wanted[seed].token_ids[:n]
            assert generation.logprobs is not None
            assert generation.logprobs.tolist() == (wanted[seed].logprobs or [])[:n]
            kept.append(n)

        async with Client(site.url, limits=Limits(calls=SLOTS)) as client, nothing_is_left(site, client):
            places = asyncio.Semaphore(SLOTS + 4)  # so that some wait for a slot
            await asyncio.gather(*[one(client, places, i % SEEDS, waits=i % 4 == 0) for i in range(count)])
        assert sum(n > 0 for n in kept) >= count // 4
        assert set(site.asked()) <= set(left)  # a busy engine may have read one only when it was closed already
        for engine in site.engines:
            assert set(left).issuperset(engine.stats().aborts)
            asked = {request.json()["rid"] for request in engine.seen() if request.path == "/generate" and request.body}
            assert asked.issubset(engine.stats().aborts), "each engine was posted the aborts of what it ran"


@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
async def test_an_abort_in_a_burst_of_starts_lets_no_request_leave_afterwards_and_leaves_no_task(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, dice = departures(monkeypatch), random.Random(rounds)
    with at(WIRES[0], faults=False) as site:
        wanted = beginnings(site)
        async with Client(site.url, limits=Limits(calls=SLOTS)) as client:
            for _ in range(rounds):
                aborting = False
                calls: list[Call] = []

                async def submit() -> None:
                    for i in range(1000):
                        seed = i % SEEDS
                        calls.append(client.start([300, seed], params(seed), aborted=lambda: aborting))  # noqa: B023
                        if i % 20 == 0:
                            await asyncio.sleep(0)

                async with nothing_is_left(site, client):
                    submitting = asyncio.ensure_future(submit())
                    if not left:  # however slow the machine is, the first burst gets somewhere
                        await until(lambda: left)
                    await asyncio.sleep(dice.uniform(0, 0.1))
                    aborting, before = True, len(left)
                    await client.abort_all()
                    await submitting
                    generations = await asyncio.gather(*calls)
                assert len(left) == before
                assert len(generations) == 1000
                for i, generation in enumerate(generations):
                    n = len(generation.token_ids)
                    assert generation.token_ids.tolist() == wanted[i % SEEDS].token_ids[:n]
        assert set(site.asked()) <= set(left) == site.told()
