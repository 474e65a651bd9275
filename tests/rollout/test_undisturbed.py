"""Invariant: undisturbed. Cut, retry, resume as you like: a sample ends as if nothing had ever happened to it.

All over real HTTP, against engines that follow a script of every fault that a client has to survive, while the samples
are cut from this side as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from conftest import LOOPS
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.pool import Pool
from streamfold.rollout.rollout import Rollout, RolloutConfig
from streamfold.samples.sample import Sample
from support.disturbing import SHAPE, TOP_P, WIRES, Departures, Site, Watched, Wire, at, departures, nothing_is_left
from support.rollouts import Counted, everywhere
from support.undisturbed import Work, carry, work_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from streamfold.rollout.groups import Group

    Tell = Callable[[str, object], None]

pytestmark = pytest.mark.usefixtures("kept_briefly")

BATCH = 16  # samples at once


def run(loop: str, main: Coroutine[Any, Any, None]) -> None:
    with contextlib.closing(LOOPS[loop]()) as running:
        try:
            running.run_until_complete(main)
        finally:  # after a failure
            tasks = asyncio.all_tasks(running)
            for task in tasks:
                task.cancel()
            if tasks:
                running.run_until_complete(asyncio.wait(tasks))


@pytest.fixture(autouse=True)
def _engines_do_what_they_are_told(caplog: pytest.LogCaptureFixture) -> Any:
    """An injected fault must not be an error of the loopback engine itself."""
    yield
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    assert [r.getMessage() for r in records if r.levelno >= logging.ERROR and "loopback" in r.name] == []


# Sample by sample.


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
@pytest.mark.parametrize("count", [16, pytest.param(400, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_a_sample_ends_as_undisturbed_whatever_engines_and_callers_do_to_it(
    wire: Wire, count: int, monkeypatch: pytest.MonkeyPatch, record_property: Tell
) -> None:
    left = departures(monkeypatch)

    async def main(site: Site) -> None:
        decoder = site.one.tokenizer
        side_data: dict[str, Any] = {"experts": SHAPE if wire.tells_side_data else None}
        if site.one.config.skip_tokenizer_init:
            side_data["tokenizer"] = decoder
        async with Watched(site.url, tokenizer=decoder) as first, Watched(site.url, **side_data) as second:
            clients = (first, second)
            works: list[Work] = []
            async with nothing_is_left(site, *clients):
                while len(works) < count or (len(works) < count + 8 * BATCH and wire.kinds - set(site.done)):
                    if len(works) >= count:  # what chance has left out is to happen too
                        site.follow(wire.kinds - set(site.done))
                    more = [work_of(site, len(works) + i) for i in range(BATCH)]
                    works += more
                    ends = {decoder.eos_token_id}
                    await asyncio.gather(*[carry(work, clients[i % 2], ends) for i, work in enumerate(more)])
            assert {i: wrong for i, work in enumerate(works) if (wrong := work.differs(clients[i % 2]))} == {}
            assert set(site.done) == wire.kinds
            check_counts(site, clients, [work.sample for work in works], left)
            cuts = sum((work.cuts for work in works), Counter())
            tell(record_property, site, clients, samples=len(works), cuts=dict(cuts))

    with at(wire) as site:
        run(wire.loop, main(site))


def check_counts(site: Site, clients: tuple[Watched, ...], samples: list[Sample], left: Departures) -> None:
    """Tokens that came are kept or counted as dropped; requests that left were counted, and are those that came."""
    kept = sum(sample.response_length for sample in samples)
    dropped = sum(
        s.metadata.get("streamfold_lost_side_data", 0) + s.metadata.get("streamfold_restarted_tokens", 0)
        for s in samples
    )
    assert sum(client.tokens for client in clients) == kept + dropped
    assert len(set(left)) == len(left) <= sum(client.tries for client in clients) + left.again
    asked = set(site.asked())
    assert asked <= set(left)
    if not site.wire.dying:  # a worker that dies has not read all that was sent to it
        assert set(left) - asked <= site.told()  # a busy one reads some only when they have been aborted and closed


def tell(record_property: Tell, site: Site, clients: tuple[Watched, ...], **figures: object) -> None:
    tries = sum(client.tries for client in clients)
    figures |= {"tries": tries, "requests": len(site.asked()), "faults": dict(sorted(site.done.items()))}
    for name, figure in figures.items():
        record_property(name, figure)
    print(site.wire.name, figures)


# Group by group.

SIZE = 4
PARAMS: dict[str, Any] = {"max_new_tokens": 48, "temperature": 1.0}


@pytest.mark.parametrize(
    ("wire", "how", "more"),
    [(WIRES[0], "rollouts", TOP_P), (WIRES[1], "pool", {}), (WIRES[2], "rollouts", {}), (WIRES[3], "pool", {})],
    ids=lambda value: getattr(value, "name", value if isinstance(value, str) else ""),
)
@pytest.mark.parametrize("count", [8, pytest.param(125, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_groups_end_as_undisturbed_through_rollouts_that_are_cut_again_and_again(
    wire: Wire, how: str, more: dict[str, Any], *, count: int, monkeypatch: pytest.MonkeyPatch, record_property: Tell
) -> None:
    left, rewards = departures(monkeypatch), Counted()
    take: Callable[[Rollout, Buffer, int], Awaitable[list[Group]]] = from_rollouts if how == "rollouts" else from_pool

    async def main(site: Site) -> None:
        decoder = site.one.tokenizer
        config = RolloutConfig(
            sampling_params={**PARAMS, **more},
            groups=3,
            over_sampling=6,
            concurrency=20,
            partial_rollout=True,
            stop_ids=(decoder.eos_token_id,),
            seed=40,
            max_failures=0,
            progress=False,
        )
        groups = groups_with_prompts(count)
        works = [
            Work(site, sample, {**PARAMS, **more, "sampling_seed": 40 + place})
            for group in groups
            for place, sample in enumerate(group)
        ]
        experts = SHAPE if wire is WIRES[1] else None
        async with Watched(site.url, tokenizer=decoder, experts=experts) as client:
            source = Buffer(groups)
            async with nothing_is_left(site, client):
                given = await take(Rollout(client, config, reward=rewards), source, count)
            assert everywhere(source, given) == list(range(count))
            assert {work.sample.index: wrong for work in works if (wrong := work.differs(client))} == {}
            samples = [work.sample for work in works]
            assert sorted(rewards.asked) == sorted((s.index, s.response) for s in samples)
            assert all(sample.reward == len(sample.response) for sample in samples)
            check_counts(site, (client,), samples, left)
            tell(record_property, site, (client,), samples=len(samples))

    with at(wire, seed=11) as site:
        run(wire.loop, main(site))


def groups_with_prompts(count: int) -> list[list[Sample]]:
    return [
        [Sample(group_index=g, index=SIZE * g + i, tokens=[300 + g, 301, 302]) for i in range(SIZE)]
        for g in range(count)
    ]


async def from_rollouts(rollout: Rollout, source: Buffer, count: int) -> list[Group]:
    """Rollout after rollout, each of which cuts what it does not need; some are cancelled."""
    dice, given = random.Random(count), list[Any]()
    for rollout_id in range(1000):
        running = asyncio.ensure_future(rollout.run(source, rollout_id))
        if dice.random() < 0.5:
            await asyncio.wait({running}, timeout=dice.uniform(0, 0.3))
            running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            given += running.result().groups
        assert source.in_flight == 0
        if len(given) == count:
            return given
    raise AssertionError("it never came to an end")


async def from_pool(rollout: Rollout, source: Buffer, count: int) -> list[Group]:
    """Out of a pool that is paused in the middle of everything."""
    dice, given = random.Random(count), list[Any]()
    async with Pool(rollout, source, in_flight=6) as pool:
        while len(given) < count:
            waiting = asyncio.ensure_future(pool.next(min(3, count - len(given))))
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=dice.uniform(0.02, 0.3))
                await pool.pause()
                pool.version += 1
                pool.resume()
            given += waiting.result()
        told = pool.metrics()
    samples = [sample for group in given for sample in group]
    assert told["streamfold/rewards"] == len(samples)
    assert told["streamfold/tokens/generated"] - told["streamfold/tokens/lost"] == sum(
        s.response_length for s in samples
    )
    assert told["streamfold/groups/done"] == count
    assert told["streamfold/groups/failed"] == 0
    return given
