"""Timings: what they are made of, that every driver gives them, and that they are no part of what was generated."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Generation, Limits, Parser, Timings
from streamfold._core import Durations
from streamfold.client.progress import Progress
from support.replay import ASKED, END, HANG, LAST_CHUNK, PROMPT, Step, chunk, events, head, until
from support.tries import BUSY, SOON, in_turn

if TYPE_CHECKING:
    from support.speaking import Speech

BOTH_LOOPS = True
EACH_DRIVER = True


def progress(*reads: tuple[float, int], sent_at: float = 5.0) -> Progress:
    """A try that was started at 4.0 and has read so many tokens at those times."""
    gaps = Durations()
    for (before, _), (at, tokens) in itertools.pairwise(reads):
        gaps.add((at - before) / tokens, tokens)
    made = Progress()
    made.started_at, made.sent_at = 4.0, sent_at
    times = [at for at, _ in reads] or [math.inf]
    exchange: Any = SimpleNamespace(
        token_count=sum(tokens for _, tokens in reads),
        first_token_at=times[0],
        last_token_at=times[-1],
        gaps=lambda: (gaps, len(reads)),
    )
    made._exchange = exchange
    return made


def test_timings_are_those_of_vllm() -> None:
    timings = progress((6.0, 1), (6.5, 1), (7.0, 1), (9.0, 1)).timings(1.0)
    assert timings == Timings(
        queued=3.0, connect=1.0, ttft=1.0, latency=4.0, tpot=1.0, itl_mean=1.0, itl_p99=2.0, resolution=1.0
    )


def test_tokens_of_one_read_share_the_time_since_the_one_before() -> None:
    timings = progress((6.0, 4), (7.0, 2), (8.0, 2)).timings(4.0)
    assert timings is not None
    assert (timings.itl_mean, timings.resolution, timings.tpot) == (0.5, 1.0, 2.0 / 7)


def test_what_has_not_come_has_no_time() -> None:
    assert progress(sent_at=math.inf).timings(1.0) is None
    assert progress().timings(1.0) == Timings(queued=3.0, connect=1.0)
    one = progress((6.0, 1)).timings(1.0)
    assert one == Timings(queued=3.0, connect=1.0, ttft=1.0, latency=1.0)
    at_once = progress((6.0, 3)).timings(1.0)
    assert at_once == Timings(queued=3.0, connect=1.0, ttft=1.0, latency=1.0, tpot=0.0)


async def test_every_driver_times_a_call(speech: Speech) -> None:
    go_on, last = asyncio.Event(), asyncio.Event()
    steps: list[Step] = [
        head(),
        chunk(speech.event([1, 2], 2)),
        go_on,
        chunk(speech.event([3], 3)),
        last,
        chunk(speech.event([4], 4, "stop")),
        LAST_CHUNK,
        END,
    ]
    async with speech.replay(steps) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        await call.wait_tokens(2)
        go_on.set()
        await call.wait_tokens(3)
        last.set()
        generation = await call
    timings = generation.timings
    assert timings is not None
    assert timings.ttft == call.ttft
    assert timings.queued >= 0
    assert timings.connect >= 0
    assert timings.ttft is not None
    assert timings.latency is not None
    assert 0 < timings.ttft < timings.latency
    assert timings.queued + timings.connect + timings.latency <= call.age
    behind = timings.latency - timings.ttft
    assert timings.tpot == pytest.approx(behind / 3)
    assert timings.resolution == pytest.approx(behind / 2), "two reads behind the first"
    assert timings.itl_mean == pytest.approx(behind / 2), "two tokens, each of its own read"
    assert timings.itl_mean is not None
    assert timings.itl_p99 is not None
    assert timings.itl_mean <= timings.itl_p99 <= behind


async def test_a_call_is_queued_until_its_last_try_begins(speech: Speech) -> None:
    go_on = asyncio.Event()
    async with (
        speech.replay() as server,
        speech.client(server.url, limits=Limits(calls=1), retries=SOON) as client,
    ):
        server.routes[speech.path] = in_turn(server, [go_on, *speech.whole], BUSY, speech.whole)
        first, second = client.start(PROMPT, ASKED), client.start(PROMPT, ASKED)
        await until(lambda: server.generates)
        waited = second.age
        go_on.set()
        generations = await first, await second
        assert second.tries == 2
    held, queued = (generation.timings for generation in generations)
    assert held is not None
    assert queued is not None
    assert queued.queued >= waited
    assert queued.ttft is not None
    assert queued.queued + queued.connect + queued.ttft <= second.age


async def test_an_aborted_call_has_the_times_of_what_it_received(speech: Speech) -> None:
    steps: list[Step] = [head(), chunk(speech.event([1, 2], 2)), HANG]
    async with speech.replay(steps) as server, speech.client(server.url) as client:
        waiting = client.start(PROMPT, ASKED)
        assert (await waiting.abort()).timings is None, "nothing was sent"
        call = client.start(PROMPT, ASKED)
        await call.wait_tokens(2)
        timings = (await call.abort()).timings
    assert timings is not None
    assert timings.ttft == timings.latency == call.ttft
    assert (timings.tpot, timings.itl_mean, timings.resolution) == (0.0, None, None)


async def test_a_call_that_needs_no_request_has_no_times(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url) as client:
        assert (await client.generate(PROMPT, {"max_new_tokens": 0})).timings is None


def test_a_parser_alone_knows_no_time() -> None:
    parser = Parser("sglang", logprobs=False)
    parser.feed(b"".join(events(3)))
    assert parser.take().timings is None


def test_timings_are_pickled_and_no_part_of_equality() -> None:
    timed = Generation([1, 2], timings=Timings(queued=1.0, connect=2.0, ttft=0.5))
    assert pickle.loads(pickle.dumps(timed)).timings == timed.timings
    assert timed == Generation([1, 2])
    assert "ttft=500.0 ms" in repr(timed)
    with pytest.raises(ValueError, match="complete already"):
        timed._complete((), Timings(0.0, 0.0))
