"""Retry pauses: their length, what ends them, and that many tries leak nothing."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, EngineTimeout, Limits, Retries, StreamfoldError, Timeouts
from support.calls import has_ended, runner_of, wait_for_end
from support.leftovers import open_files, settled
from support.replay import (
    ASKED,
    DONE,
    FIN,
    HANG,
    PROMPT,
    RST,
    Request,
    Step,
    Steps,
    answer,
    answer_json,
    chunk,
    head,
    stream,
    until,
)
from support.tries import BUSY, LATER, SOON, in_turn

if TYPE_CHECKING:
    from support.speaking import Speech, Spoken

BOTH_LOOPS = True
EACH_DRIVER = True


async def test_a_pause_is_as_long_as_the_engine_asks_for(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=SOON) as client:
        slow: list[Step] = [0.02, *speech.whole]
        server.routes[speech.path] = in_turn(server, answer(b"slow down", 429, retry_after="1"), slow)
        call = client.start(PROMPT, ASKED)
        await call
        assert call.tries == 2
        assert call.age >= 0.99  # clocks are coarse
        assert call.tokens_per_second * call.age > 3.1, "it counts from the sending of the last try"


def test_pauses_grow_to_a_limit_and_chance_keeps_clients_apart() -> None:
    policy = Retries(first=0.5, longest=10.0, jitter=0.5)
    for failures, most in [(1, 0.5), (2, 1.0), (3, 2.0), (5, 8.0), (6, 10.0), (60, 10.0), (5000, 10.0)]:
        pauses = [policy.pause(failures) for _ in range(50)]
        assert all(most / 2 <= pause <= most for pause in pauses)
        assert len(set(pauses)) > 1
    assert [Retries(jitter=0.0).pause(failures) for failures in (1, 2, 3)] == [0.5, 1.0, 2.0]


def test_a_pause_that_the_engine_asks_for_is_never_shortened() -> None:
    policy = Retries(first=0.5, longest=10.0, jitter=0.5)
    pauses = [policy.pause(1, 30.0) for _ in range(50)]
    assert all(30.0 <= pause <= 45.0 for pause in pauses)
    assert len(set(pauses)) > 1, "calls with the same Retry-After would all be retried at once"
    assert policy.pause(10, 0.0) >= 5.0, "nor does it shorten ours"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tries": 0}, {"tries": 2.5}, {"first": -1}, {"first": None}, {"longest": float("nan")}),
        *({"longest": float("inf")}, {"jitter": -0.1}, {"jitter": 1.1}, {"jitter": float("nan")}),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Retries(**wrong)


async def test_a_call_that_pauses_gives_its_slot_back(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=LATER, limits=Limits(calls=1)) as client:
        server.routes[speech.path] = in_turn(server, BUSY, speech.whole)
        pausing = client.start(PROMPT, ASKED)
        assert (await asyncio.wait_for(client.generate(PROMPT, ASKED), 20)).finish_reason == "stop"
        assert not has_ended(pausing)
        await pausing.abort()


@pytest.mark.parametrize("reply", [BUSY, answer(b"", 429, retry_after="3600")], ids=["our pause", "the engine's"])
@pytest.mark.parametrize("how", ["abort", "abort_all", "aclose", "cancel", "timeout", "host"])
async def test_every_end_of_a_call_ends_its_pause_at_once_and_nothing_more_is_sent(
    speech: Speech, reply: Steps, how: str
) -> None:
    aborting = False
    async with speech.replay(reply) as server, speech.client(server.url, retries=LATER) as client:
        call = client.start(PROMPT, ASKED, aborted=lambda: aborting)
        waiter = asyncio.ensure_future(wait_for_end(call))
        await until(lambda: client.retried == 1)
        await asyncio.sleep(0.02)
        assert not has_ended(call)
        if how == "abort":
            assert await asyncio.wait_for(call.abort(), 20) is await call
        elif how == "abort_all":
            await asyncio.wait_for(client.abort_all(), 20)
        elif how == "aclose":
            await asyncio.wait_for(client.aclose(), 20)
        elif how == "cancel":
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(waiter, 20)
        elif how == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waiter, 0.05)
        else:
            aborting = True
            await asyncio.wait_for(waiter, 20)
        generation = await call
        assert (generation.finish_reason, len(generation.token_ids)) == (None, 0)
        assert client.running == []
        await asyncio.sleep(0.05)
        assert (len(server.generates), server.aborts) == (1, []), "nothing ran there that had to be aborted"


async def test_an_abort_while_a_failed_try_is_being_cleared_away_is_a_result_and_there_is_no_other_try(
    speech: Speech,
) -> None:
    async with speech.replay([HANG], routes={speech.abort_path: [0.3, *answer_json(None)]}) as server:
        async with speech.client(server.url, retries=SOON, timeouts=Timeouts(first_token=0.1)) as client:
            call = client.start(PROMPT, ASKED)
            await until(lambda: server.aborts)
            assert not has_ended(call)
            generation = await asyncio.wait_for(call.abort(), 20)
            assert (generation.finish_reason, len(generation.token_ids)) == (None, 0)
            assert await call is generation
        assert len(server.generates) == 1


async def test_an_abort_of_the_last_try_does_not_hide_its_error(speech: Speech) -> None:
    async with speech.replay([HANG], routes={speech.abort_path: [0.3, *answer_json(None)]}) as server:
        timeouts = Timeouts(first_token=0.1)
        async with speech.client(server.url, retries=Retries(tries=1), timeouts=timeouts) as client:
            call = client.start(PROMPT, ASKED)
            await until(lambda: server.aborts)
            await call.abort()
            with pytest.raises(EngineTimeout):
                await call


# Nothing left.

FAULTS: tuple[Spoken, ...] = (
    BUSY,
    answer(b"", 429, retry_after="0"),
    [FIN],
    [RST],
    [HANG],
    [head(), HANG],
    [head(), FIN],
    [head(), chunk(b"data: {"), RST],
    lambda speech: [*speech.two, RST],
    lambda speech: [*speech.two, FIN],
    lambda speech: stream(speech.refusal(503), DONE),
    answer_json({"error": "no"}, 400),
    lambda speech: [0.02, *speech.whole],
    lambda speech: speech.whole,
    lambda speech: speech.whole,
)


async def ended_somehow(client: Client, dice: random.Random) -> None:
    """One call among random faults, which may be aborted or cancelled at any moment of it."""
    call = client.start(PROMPT, ASKED)
    waiter = asyncio.ensure_future(wait_for_end(call))
    if dice.random() < 0.5:
        await asyncio.sleep(dice.uniform(0, 0.15))
        how = dice.choice(["abort", "cancel", "cancel twice"])
        if how == "abort":
            await call.abort()
        else:
            waiter.cancel()
            if how == "cancel twice":
                await asyncio.sleep(0)
                waiter.cancel()
    await asyncio.wait([waiter])
    assert has_ended(call)
    ids = runner_of(call).ended.result().token_ids.tolist()
    assert ids in ([], [1], [1, 2], [1, 2, 3]), "tokens of two tries got mixed"
    if not call.aborting and ids != [1, 2, 3]:
        with pytest.raises(StreamfoldError):
            await call


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("kept_briefly")
async def test_after_any_number_of_tries_among_random_faults_nothing_is_left(speech: Speech, count: int) -> None:
    dice = random.Random(count)
    timeouts, limits = Timeouts(first_token=0.05, next_token=0.05), Limits(calls=12)
    retries = Retries(tries=5, first=0.005, longest=0.02)
    async with (
        speech.replay() as server,
        speech.client(server.url, retries=retries, timeouts=timeouts, limits=limits) as client,
    ):
        server.routes[speech.path] = speech.whole
        await client.generate(PROMPT, ASKED)
        assert client._session is not None
        session = client._session
        await until(lambda: server.open == 0)
        tasks, files = await settled()

        def any_fault(_: Request) -> Steps:
            return speech.told(dice.choice(FAULTS))

        server.routes[speech.path] = any_fault
        places = asyncio.Semaphore(24)

        async def one() -> None:
            async with places:
                await ended_somehow(client, dice)

        await asyncio.gather(*[one() for _ in range(count)])
        assert client.retried, "nothing was tried again: this tests nothing"
        await until(lambda: server.open == 0)
        await until(lambda: asyncio.all_tasks() == tasks)
        await until(lambda: open_files() <= files)
        assert client.running == []
        assert session.calls == {}
        assert (session.slots.free, session.slots.waiting) == (12, 0)
