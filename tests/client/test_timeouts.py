"""Timeouts: one for each phase, none for the whole call, and the abort at a silent engine."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold import Client, EngineError, EngineTimeout, Retries, Timeouts
from streamfold.client.deadlines import Deadline, Deadlines
from support.replay import (
    ASKED,
    DONE,
    END,
    HANG,
    LAST_CHUNK,
    PROMPT,
    Replay,
    Request,
    Step,
    chunk,
    head,
    stream,
    until,
)
from support.unreachable import first_bytes, full_house

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.speaking import Speech, Spoken

BOTH_LOOPS = True

ONCE = Retries(tries=1)
PING = chunk(b": ping\n\n")


async def timed_out(speech: Speech, server: Replay, timeouts: Timeouts) -> EngineTimeout:
    async with speech.client(server.url, timeouts=timeouts, retries=ONCE) as client:
        call = client.start(PROMPT, ASKED)
        with pytest.raises(EngineTimeout) as raised:
            await asyncio.wait_for(call, 20)
        assert set(server.aborts) == {call.rid}, "the request is aborted at the engine, which would continue"
    await until(lambda: server.open == 0)
    assert raised.value.partial is not None
    return raised.value


@pytest.mark.parametrize(
    "steps",
    [
        [HANG],
        [head(), HANG],
        [head(), *[PING, 0.05] * 200],
        [head(), *[chunk(b"data: \n\n"), 0.05] * 200],
        lambda speech: [head(), *[chunk(speech.event([], 0)), 0.05] * 200],
    ],
    ids=["no headers", "headers alone", "comments", "blank events", "events without tokens"],
)
async def test_the_first_token_timeout_holds_although_other_bytes_arrive(speech: Speech, steps: Spoken) -> None:
    async with speech.replay(speech.told(steps)) as server:
        error = await timed_out(speech, server, Timeouts(first_token=0.3))
        assert error.phase == "first_token"
        assert error.partial is not None
        assert len(error.partial.token_ids) == 0
        assert "0.3 s" in str(error)


@pytest.mark.parametrize(
    "steps",
    [[HANG], [PING, 0.05] * 200, lambda speech: [chunk(speech.event([], 3)), 0.05] * 200],
    ids=["silence", "comments", "events without tokens"],
)
async def test_the_next_token_timeout_holds_and_the_prefix_is_kept(speech: Speech, steps: Spoken) -> None:
    async with speech.replay([head(), *map(chunk, speech.events(3, finish=None)), *speech.told(steps)]) as server:
        error = await timed_out(speech, server, Timeouts(next_token=0.3))
        assert error.phase == "next_token"
        assert error.partial is not None
        assert error.partial.token_ids.tolist() == [1, 2, 3]
        assert error.partial.finish_reason is None


async def test_a_slow_but_steady_answer_passes_however_long_it_takes(speech: Speech) -> None:
    steps: list[Step] = [head(), PING]
    for payload in speech.events(20):
        steps += [0.05, chunk(payload), PING]
    timeouts = Timeouts(connect=0.5, first_token=0.5, next_token=0.5)
    async with (
        speech.replay([*steps, chunk(DONE), LAST_CHUNK, END]) as server,
        speech.client(server.url, timeouts=timeouts) as client,
    ):
        generation = await client.generate(PROMPT, ASKED)
        assert len(generation.token_ids) == 20
        assert server.aborts == []


async def test_the_next_token_timeout_does_not_shorten_the_wait_for_the_first_token(speech: Speech) -> None:
    steps: list[Step] = [head(), 0.5, *map(chunk, speech.events(2)), chunk(DONE), LAST_CHUNK, END]
    async with speech.replay(steps) as server, speech.client(server.url, timeouts=Timeouts(next_token=0.2)) as client:
        assert (await client.generate(PROMPT, ASKED)).finish_reason == "stop"


async def test_a_phase_without_a_limit_is_waited_for(speech: Speech) -> None:
    steps: list[Step] = [
        0.3,
        head(),
        0.3,
        chunk(speech.event([1], 1)),
        0.3,
        chunk(speech.event([2], 2, "stop")),
        LAST_CHUNK,
        END,
    ]
    none = Timeouts(connect=None, first_token=None, next_token=None)
    async with speech.replay(steps) as server, speech.client(server.url, timeouts=none) as client:
        assert (await client.generate(PROMPT, ASKED)).token_ids.tolist() == [1, 2]
    only_next = Timeouts(first_token=None, next_token=0.1)
    async with speech.replay([0.3, head(), chunk(speech.event([1], 1)), HANG]) as server:
        assert (await timed_out(speech, server, only_next)).phase == "next_token"


async def test_httpx_itself_limits_nothing_but_the_connect(speech: Speech) -> None:
    """2389-research/tracker#575: a limit on each read, shorter than the prefill, ended healthy requests."""
    timeouts: list[object] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        timeouts.append(request.extensions["timeout"])
        return httpx.Response(400)

    transport = httpx.MockTransport(refuse)
    async with speech.client("http://engine", timeouts=Timeouts(connect=7), transport=transport) as client:
        with pytest.raises(EngineError):
            await client.generate(PROMPT, ASKED)
    assert timeouts[0] == {"connect": 7}


async def test_a_busy_event_loop_is_not_a_silent_engine(speech: Speech) -> None:
    go_on = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def engine() -> None:
            guest, _ = listener.accept()
            with guest:
                guest.recv(10_000)
                guest.sendall(head() + chunk(speech.event([1], 1)))
                time.sleep(0.1)
                guest.sendall(chunk(speech.event([2], 2)))
                go_on.wait(10)
                guest.sendall(chunk(speech.event([3], 3, "stop")) + chunk(DONE) + LAST_CHUNK)

        serving = asyncio.ensure_future(asyncio.to_thread(engine))  # a thread: this loop will be busy
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with speech.client(url, timeouts=Timeouts(next_token=0.3)) as client:
            call = client.start(PROMPT, ASKED)
            await until(lambda: call.token_count)
            time.sleep(0.5)  # noqa: ASYNC251  # the point: past the limit, with the token waiting in the socket
            await until(lambda: call.token_count == 2)
            await asyncio.sleep(0.05)
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):  # no abort request has connected
                listener.accept()
            go_on.set()
            assert (await call).token_ids.tolist() == [1, 2, 3]
        await serving


async def test_a_response_that_ends_during_the_abort_after_its_timeout_is_a_success(speech: Speech) -> None:
    async with speech.replay(routes={speech.abort_path: [0.3, *stream()]}) as server:

        def slow(request: Request) -> Iterator[Step]:
            yield from (head(), chunk(speech.event([1], 1)))
            yield server.aborted[request.rid]
            yield from (chunk(speech.event([2], 2, "stop")), chunk(DONE), LAST_CHUNK, END)

        server.routes[speech.path] = slow
        async with speech.client(server.url, timeouts=Timeouts(next_token=0.2)) as client:
            assert (await client.generate(PROMPT, ASKED)).token_ids.tolist() == [1, 2]


async def test_the_connect_timeout_holds_and_nothing_is_sent() -> None:
    with full_house() as (server, url):
        async with Client(url, timeouts=Timeouts(connect=0.3), retries=ONCE) as client:
            with pytest.raises(EngineTimeout) as raised:
                await asyncio.wait_for(client.generate(PROMPT, ASKED), 20)
            assert raised.value.phase == "connect"
            assert raised.value.partial is not None
        assert not any(await asyncio.to_thread(first_bytes, server))


async def test_an_abort_while_connecting_returns_at_once_and_no_request_leaves_after_it() -> None:
    with full_house() as (server, url):
        async with Client(url, timeouts=Timeouts(connect=60)) as client:
            call = client.start(PROMPT, ASKED)
            waiter = asyncio.ensure_future(client.generate(PROMPT, ASKED))
            await asyncio.sleep(0.1)
            generation = await asyncio.wait_for(call.abort(), 20)
            assert len(generation.token_ids) == 0
            assert generation.finish_reason is None
            assert await call is generation
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(waiter, 20)
            assert client.running == []
            accepting = asyncio.ensure_future(asyncio.to_thread(first_bytes, server))
        received = await accepting
        assert received, "no connection was made: this tests nothing"
        assert not any(received)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-4, 1e-3])
async def test_a_deadline_that_is_due_at_once_may_still_move(seconds: float) -> None:
    """uvloop's handle of a call that is due at once does not tell when that is."""
    expired = asyncio.Event()
    deadline = Deadline(Deadlines(), expired.set)
    for after in (seconds, seconds / 2, 60.0, seconds):
        deadline.set(after)
    await asyncio.wait_for(expired.wait(), 20)
    deadline.set(None)


@pytest.mark.parametrize(
    "wrong", [{"connect": -1}, {"first_token": math.nan}, {"next_token": -0.5}, {"drain": None}, {"drain": math.inf}]
)
def test_a_time_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Timeouts(**wrong)
