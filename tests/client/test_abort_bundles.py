"""Aborts of many calls at once, behind a router: each gets its abort event with its side data, and is posted."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from streamfold import Client, Experts
from streamfold.client.abort_batches import AbortBatches, PendingAbort, Shape
from streamfold.client.deadlines import Deadlines
from streamfold.engines.detect import ENGINES as ENGINE_SPECS
from streamfold.loopback import Loopback, Router
from support.calls import abort_soon
from support.carriers import HTTPX
from support.replay import (
    ASKED,
    DONE,
    END,
    FIN,
    HANG,
    LAST_CHUNK,
    PROMPT,
    RST,
    answer_json,
    begun,
    chunk,
    head,
    stream,
    until,
)
from support.speaking import SGLANG, VLLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold import Call, Generation
    from support.carriers import Carrier
    from support.replay import Request, Step, Steps
    from support.speaking import Speech

BOTH_LOOPS = True
EACH_DRIVER = True


# Loopback engines. Disconnects end nothing there, and tokens are so rare that no response ends by itself.
OPTIONS: dict[str, Any] = {"token_rate": 0.5, "stop_probability": 0, "leave_delay": None, "keep_requests": 1 << 16}
PARAMS = {"max_new_tokens": 4000, "temperature": 1}


class Engines(NamedTuple):
    """Engines behind a router, and what a call brings along if it got its abort event."""

    name: str
    options: dict[str, Any]
    experts: Experts | None
    posted: Callable[[Call], str]

    def is_whole(self, generation: Generation) -> bool:
        spans = [(version, start) for version, start, _ in generation.version_spans]
        has_experts = self.experts is None or generation.routed_experts is not None
        return generation.finish_reason == "abort" and spans == [("default", 0)] and has_experts


ENGINES = (
    Engines("sglang", {"incremental": True}, Experts(num_layers=4, top_k=2, num_experts=16), lambda call: call.rid),
    Engines("vllm", {"engine": "vllm"}, None, lambda call: f"generate-tokens-{call.rid}"),
)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is taken for silent, however busy the machine is."""
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 300.0)
    monkeypatch.setattr("streamfold.client.abort_batches._SILENT_SECONDS", 300.0)


async def storm(engines: Engines, workers: int, count: int, *, waits: bool) -> None:
    with ExitStack() as stack:
        loopbacks = [stack.enter_context(Loopback(**OPTIONS, **engines.options)) for _ in range(workers)]
        router = stack.enter_context(Router(loopbacks))
        client = Client(router.url, engine=engines.name, experts=engines.experts)  # type: ignore[arg-type]
        calls = [client.start([300, place % 500], PARAMS) for place in range(count)]
        await until(lambda: all(call.token_count for call in calls), 300)
        if waits:
            await client.abort_all()
            assert sum([engines.is_whole(await call) for call in calls]) == count
        await client.aclose()
        found = 0
        for loopback in loopbacks:
            asked = [request for request in loopback.seen() if request.body and "abort" not in request.path]
            told = json.dumps([[request.json(), request.headers] for request in asked])
            own = {engines.posted(call) for call in calls if call.rid in told}
            found += len(own)
            assert set(loopback.stats().aborts) >= own, "a request runs on where its abort was not posted"
        assert found == count


@pytest.mark.parametrize("engines", ENGINES, ids=lambda engines: engines.name)
@pytest.mark.parametrize(
    ("workers", "count"),
    [(4, 48), *[pytest.param(workers, 1024, marks=pytest.mark.soak) for workers in (4, 16)]],
)
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("patient")
async def test_each_of_many_aborts_gets_its_event_and_reaches_the_worker_that_runs_it(
    engines: Engines, workers: int, count: int
) -> None:
    await storm(engines, workers, count, waits=True)


@pytest.mark.parametrize("engines", ENGINES, ids=lambda engines: engines.name)
@pytest.mark.usefixtures("patient")
async def test_when_a_client_is_closed_each_of_its_calls_was_posted_to_the_worker_that_runs_it(
    engines: Engines,
) -> None:
    await storm(engines, 4, 48, waits=False)


# How they leave.

COUNT = 100


async def running(client: Client, count: int = COUNT) -> list[Call]:
    calls = [client.start(PROMPT, ASKED) for _ in range(count)]
    await until(lambda: sum(call.token_count for call in calls) == 2 * count)
    return calls


async def test_aborts_of_vllm_that_are_asked_for_together_are_one_post() -> None:
    async with VLLM.replay(VLLM.running) as server, VLLM.client(server.url) as client:
        calls = await running(client)
        await client.abort_all()
        [post] = server.at(VLLM.abort_path)
        assert post.rids == [call.rid for call in calls]


async def test_aborts_of_vllm_that_are_asked_for_during_a_post_are_the_next_one() -> None:
    answered = asyncio.Event()
    held: list[Step] = [answered, *answer_json(None)]
    async with (
        VLLM.replay(VLLM.running, routes={VLLM.abort_path: held}) as server,
        VLLM.client(server.url) as client,
    ):
        first, *others = await running(client, 10)
        abort_soon(first)
        await until(lambda: server.aborts)
        for call in others:
            abort_soon(call)
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert server.aborts == [first.rid]
        answered.set()
        await client.abort_all()
        assert [post.rids for post in server.at(VLLM.abort_path)] == [[first.rid], [call.rid for call in others]]


async def test_an_abort_waits_for_its_post_while_others_are_answered(
    speech: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a storm takes: a worker that answers somebody is not silent."""
    monkeypatch.setattr("streamfold.client.abort_batches._SILENT_SECONDS", 1.0)
    open_at_post: list[bool] = []

    def slowly(request: Request) -> Steps:
        for rid in request.rids:
            stream = next(each for each in server.generates if each.rid == rid)
            open_at_post.append(not stream.peer_closed.is_set())
        return [0.1, *answer_json(None)]

    async with speech.replay(speech.running, routes={speech.abort_path: slowly}) as server:
        for name, requests in (("_PIPELINED", 64), ("_LISTED", 4), ("_SINGLE", 1)):
            monkeypatch.setattr(f"streamfold.client.abort_batches.{name}", Shape(posts=1, requests=requests))
        async with speech.client(server.url) as client:
            await running(client, 20)
            await client.abort_all()
        assert open_at_post == [True] * 20


async def test_a_call_whose_stream_has_ended_waits_for_no_worker_and_none_is_posted_to_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router does not tell which worker has a request: each worker is posted the aborts from another one on."""
    monkeypatch.setattr("streamfold.client.abort_batches._PIPELINED", Shape(posts=1, requests=1))
    monkeypatch.setattr("streamfold.client.abort_batches._SINGLE", Shape(posts=1, requests=1))
    ending, answering = asyncio.Event(), asyncio.Event()
    held: list[Step] = [answering, *answer_json(None)]
    rest = stream(SGLANG.event([3], 3, "abort"), DONE)[1:]
    async with SGLANG.replay(routes={SGLANG.abort_path: held}) as one, SGLANG.replay() as two:
        two.routes[SGLANG.abort_path] = held
        workers = answer_json({"workers": [{"url": one.url}, {"url": two.url}]})
        steps: Steps = [*SGLANG.two, ending, *rest]
        async with (
            SGLANG.replay(steps, routes={"/workers": workers}) as router,
            SGLANG.client(router.url) as client,
        ):
            calls = await running(client, 4)
            aborting = asyncio.ensure_future(client.abort_all())
            await until(lambda: one.aborts and two.aborts)
            ending.set()
            await asyncio.wait_for(asyncio.gather(*calls), 20)
            answering.set()
            await aborting
        assert (one.aborts, two.aborts) == ([calls[0].rid], [calls[2].rid])
        assert [(await call).finish_reason for call in calls] == ["abort"] * 4


async def test_a_call_whose_stream_has_ended_is_not_posted_at_all() -> None:
    held = asyncio.Event()
    steps: Steps = [*SGLANG.two, chunk(SGLANG.event([3], 3, "stop")), held, chunk(DONE), LAST_CHUNK, END]
    async with SGLANG.replay(steps) as server, SGLANG.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        await call.wait_tokens(3)
        generation = await call.abort()
        assert (generation.finish_reason, server.aborts) == ("stop", [])
        held.set()


async def test_a_call_whose_stream_has_ended_does_not_count_as_one_that_was_not_posted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, requests = ENGINE_SPECS["sglang"], SimpleNamespace(pipelines=True)
    parts: dict[str, Any] = {"engine": lambda: engine, "requests": requests, "deadlines": Deadlines(), "spawn": None}
    batches = AbortBatches("http://engine", **parts)
    answered: list[str] = []
    aborts = [PendingAbort(rid, has_tokens=True, answered=partial(answered.append, rid)) for rid in "ab"]
    PendingAbort.post_all(aborts, [batches])
    aborts[0].finish()
    assert answered == ["a"]
    batches.drop("for a test")
    assert answered == ["a", "b"]
    assert "1 aborts were not posted: for a test" in caplog.text
    assert batches.is_idle


# Servers that do not answer a whole row.


CLOSING: list[Step] = [head(200, None, 0, connection="close"), FIN]
ODD: dict[str, Steps] = {
    "closes": [FIN],
    "resets": [RST],
    "closes behind a good reply": CLOSING,
    "fails": answer_json({"error": "busy"}, 503),
    "no http": [b"220 smtp ready\r\n\r\n", FIN],
    "hangs": [HANG],
}


@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
@pytest.mark.parametrize("place", [1, 8])
async def test_what_a_server_leaves_of_a_row_is_posted_one_by_one(
    odd: Steps, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 4.0 if odd == [HANG] else 60.0  # a busy machine is no silent worker
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", seconds)
    async with SGLANG.replay(SGLANG.running) as server, SGLANG.client(server.url) as client:
        good = answer_json(None)
        server.routes[SGLANG.abort_path] = lambda _: odd if len(server.aborts) == place else good
        calls = await running(client)
        await client.abort_all()
        await until(lambda: set(server.aborts) == {call.rid for call in calls})


async def test_a_worker_that_has_answered_others_is_not_silent_however_late_that_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 1.0)
    async with SGLANG.replay(SGLANG.running) as server, SGLANG.client(server.url) as client:
        good = answer_json(None)
        server.routes[SGLANG.abort_path] = lambda _: [HANG] if len(server.aborts) == 1 else good
        calls = await running(client, 40)
        asyncio.get_running_loop().call_later(0.9, time.sleep, 1.0)  # a busy event loop
        await client.abort_all()
        await until(lambda: set(server.aborts) == {call.rid for call in calls})


# The end.


async def test_a_silent_worker_gets_one_warning_and_the_client_is_closed_in_bounded_time(
    speech: Speech, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, carrier: Carrier
) -> None:
    seconds = 6.0 if carrier is HTTPX else 1.5  # the others read what has come before they call a worker silent
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", seconds)
    monkeypatch.setattr("streamfold.client.abort_batches._SILENT_SECONDS", seconds / 3)
    async with speech.replay() as alive, speech.replay(routes={speech.abort_path: [HANG]}) as silent:
        workers = answer_json({"workers": [{"url": silent.url}, {"url": alive.url}]})
        async with speech.replay(speech.running, routes={"/workers": workers}) as router:
            client = speech.client(router.url)
            calls = await running(client)
            with caplog.at_level(logging.WARNING, "streamfold"):
                await client.abort_all()
                await asyncio.wait_for(client.aclose(), 20)
            assert sorted(alive.aborts) == sorted(call.rid for call in calls)
            assert [silent.url in record.message for record in caplog.records] == [True]


async def test_an_abort_asked_for_right_before_the_client_is_closed_is_posted(speech: Speech) -> None:
    async with speech.replay(speech.running) as server:
        async with speech.client(server.url) as client:
            call = await begun(client)
            abort_soon(call)
        assert server.aborts == [call.rid]
