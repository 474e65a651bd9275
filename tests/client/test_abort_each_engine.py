"""Aborts of many calls, and of calls whose engines stand behind a router."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from streamfold import Client, EngineError, Limits
from support.calls import abort_soon, has_ended
from support.replay import (
    ASKED,
    END,
    HANG,
    PROMPT,
    RST,
    Step,
    answer_json,
    begun,
    head,
    until,
)
from support.speaking import SGLANG

if TYPE_CHECKING:
    from support.speaking import Speech

BOTH_LOOPS = True
EACH_DRIVER = True


# All of them.


async def test_abort_all_ends_every_call_of_this_client_and_of_no_other(speech: Speech) -> None:
    async with (
        speech.replay(speech.running) as server,
        speech.client(server.url, limits=Limits(calls=3)) as client,
        speech.client(server.url) as other,
    ):
        await client.abort_all()
        bystander = await begun(other)
        calls = [client.start(PROMPT, ASKED) for _ in range(5)]
        await until(lambda: sum(call.token_count for call in calls) == 6)
        await client.abort_all()
        assert all(has_ended(call) for call in calls)
        assert client.running == []
        assert sorted(server.aborts) == sorted(call.rid for call in calls[:3])
        assert [len((await call).token_ids) for call in calls] == [2, 2, 2, 0, 0]
        assert not has_ended(bystander)


async def test_calls_that_are_started_while_all_are_aborted_run_on(speech: Speech) -> None:
    async with speech.replay(speech.running) as server, speech.client(server.url) as client:
        await begun(client)
        aborting = asyncio.ensure_future(client.abort_all())
        await asyncio.sleep(0)
        late = client.start(PROMPT, ASKED)
        await aborting
        assert [running.rid for running in client.running] == [late.rid]


# Behind a router.


async def test_behind_a_router_aborts_go_to_each_worker_and_not_to_the_router(speech: Speech) -> None:
    async with speech.replay() as one, speech.replay() as two:
        workers = answer_json({"workers": [{"url": one.url}, {"url": two.url}]})
        async with (
            speech.replay(speech.running, routes={"/workers": workers}) as router,
            speech.client(router.url, api_key="k") as client,
        ):
            calls = [await begun(client) for _ in range(5)]
            await asyncio.gather(*[call.abort() for call in calls])
            rids = sorted(call.rid for call in calls)
            assert sorted(one.aborts) == sorted(two.aborts) == rids
            assert router.aborts == []
            assert len(router.at("/workers")) == 1, "asked once for all of them"
            assert one.requests[0].headers["authorization"] == "Bearer k"


async def test_a_dead_worker_is_logged_once_and_does_not_delay_aborts_at_the_others(
    speech: Speech, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 0.4)
    async with speech.replay() as dead:
        pass
    async with speech.replay() as alive, speech.replay(routes={speech.abort_path: [HANG]}) as silent:
        workers = answer_json({"workers": [{"url": server.url} for server in (dead, silent, alive)]})
        async with (
            speech.replay(speech.running, routes={"/workers": workers}) as router,
            speech.client(router.url) as client,
        ):
            calls = [await begun(client) for _ in range(3)]
            with caplog.at_level(logging.WARNING, "streamfold"):
                generations = await asyncio.wait_for(asyncio.gather(*[call.abort() for call in calls]), 20)
        assert [len(generation.token_ids) for generation in generations] == [2, 2, 2]
        assert sorted(alive.aborts) == sorted(call.rid for call in calls)
        assert [caplog.text.count(server.url) > 0 for server in (dead, silent, alive)] == [True, True, False]
        assert len(caplog.records) == 2


async def test_an_early_abort_is_repeated_at_each_worker_without_waiting_for_one_that_hangs(
    speech: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr("streamfold.client.abort_batches._SILENT_SECONDS", 60.0)
    enough = asyncio.Event()
    hangs: list[Step] = [enough, *answer_json(None)]
    async with speech.replay() as alive, speech.replay(routes={speech.abort_path: hangs}) as silent:
        workers = answer_json({"workers": [{"url": silent.url}, {"url": alive.url}]})
        async with (
            speech.replay([HANG], routes={"/workers": workers}) as router,
            speech.client(router.url) as client,
        ):
            call = client.start(PROMPT, ASKED)
            await until(lambda: router.generates)
            abort_soon(call)
            await until(lambda: len(alive.aborts) == 2)
            assert not has_ended(call), "its socket was closed before"
            enough.set()
            await call.abort()
            assert alive.aborts == [call.rid] * 2


@pytest.mark.parametrize(
    "workers",
    [
        answer_json({"detail": "Not Found"}, 404),
        answer_json({"workers": []}),
        answer_json({"workers": [{"url": "grpc://10.0.0.1:5"}]}),
        answer_json("pong"),
        [head(200, "text/html", 6) + b"<html>", END],
        answer_json({"detail": "busy"}, 503),
        [RST],
    ],
    ids=["none", "empty", "not http", "no list", "html", "busy", "reset"],
)
async def test_without_a_list_of_workers_the_base_url_is_the_engine(speech: Speech, workers: list[Step]) -> None:
    async with (
        speech.replay(speech.running, routes={"/workers": workers}) as server,
        speech.client(server.url) as client,
    ):
        call = await begun(client)
        await call.abort()
        assert server.aborts == [call.rid]


async def test_the_list_of_workers_is_asked_for_now_and_then_and_soon_after_a_failure(
    speech: Speech,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamfold.client.control._FAILED_WORKERS_TTL", 0.05)
    async with speech.replay(speech.running) as server, speech.client(server.url) as client:
        busy = answer_json({"error": "starting"}, 503)
        for answer, asked in (([RST], 1), (busy, 2), (answer_json({"workers": []}), 3), ([RST], 3)):
            server.routes["/workers"] = answer
            await (await begun(client)).abort()
            assert len(server.at("/workers")) == asked
            await asyncio.sleep(0.1)


async def test_a_worker_whose_abort_endpoint_was_missing_for_a_moment_gets_later_aborts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What stands before a worker that restarts may answer for it. Some releases are ended by nothing but an abort."""
    monkeypatch.setattr("streamfold.client.control._WORKERS_TTL", 0.0)
    gone = answer_json({"detail": "Not Found"}, 404)
    async with SGLANG.replay(SGLANG.running, routes={"/abort_request": gone}) as server, Client(server.url) as client:
        await (await begun(client)).abort()
        server.routes["/abort_request"] = answer_json(None)
        call = await begun(client)
        await call.abort()
        assert server.aborts[1:] == [call.rid]


async def test_a_router_in_trouble_does_not_make_its_workers_forgotten(
    speech: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfold.client.control._WORKERS_TTL", 0.05)
    async with speech.replay() as worker:
        routes = {"/workers": answer_json({"workers": [{"url": worker.url}]})}
        async with speech.replay(speech.running, routes=routes) as router, speech.client(router.url) as client:
            calls = []
            for answer in (routes["/workers"], [RST], answer_json({"error": "starting"}, 503)):
                router.routes["/workers"] = answer
                calls.append(await begun(client))
                await calls[-1].abort()
                await asyncio.sleep(0.1)
            assert worker.aborts == [call.rid for call in calls]
            assert router.aborts == []


async def test_many_simultaneous_aborts_use_few_connections(speech: Speech) -> None:
    count = 100
    async with speech.replay(speech.running) as server, speech.client(server.url) as client:
        calls = [client.start(PROMPT, ASKED) for _ in range(count)]
        await until(lambda: sum(call.token_count for call in calls) == 2 * count)
        await client.abort_all()
        await until(lambda: len(server.aborts) >= count)  # on a slow machine, sockets close before all aborts arrive
        assert sorted(server.aborts) == sorted(call.rid for call in calls)
        assert server.most_open <= count + 32
    await until(lambda: server.open == 0)


async def test_an_abort_that_the_engine_refuses_is_logged_and_ends_the_call_all_the_same(
    speech: Speech,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal = answer_json({"error": "Unauthorized"}, 401)
    async with (
        speech.replay(speech.running, routes={speech.abort_path: refusal}) as server,
        speech.client(server.url) as client,
    ):
        with caplog.at_level(logging.WARNING, "streamfold"):
            assert (await (await begun(client)).abort()).token_ids.tolist() == [1, 2]
        assert "Unauthorized" in caplog.text
        with pytest.raises(EngineError):
            await client.load()


async def test_a_worker_that_hangs_delays_neither_aborts_at_the_others_nor_the_closing_of_the_client(
    speech: Speech,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr("streamfold.client.control_requests._MAX_CONCURRENT", 4)  # all of them would take 25 s
    before = asyncio.all_tasks()
    count = 100
    async with speech.replay() as alive, speech.replay(routes={speech.abort_path: [HANG]}) as silent:
        workers = answer_json({"workers": [{"url": silent.url}, {"url": alive.url}]})
        async with speech.replay(speech.running, routes={"/workers": workers}) as router:
            client = speech.client(router.url)
            calls = [client.start(PROMPT, ASKED) for _ in range(count)]
            await until(lambda: sum(call.token_count for call in calls) == 2 * count)
            await client.abort_all()
            await until(lambda: len(alive.aborts) == count)
            assert 0 < len(silent.at(speech.abort_path)) < count, "nothing hung: this tests nothing"
            await asyncio.wait_for(client.aclose(), 20)
            named = [task.get_coro().__qualname__ for task in asyncio.all_tasks() - before]  # type: ignore[union-attr]
            ours = ("EngineControl.", "AbortBatches.", "ControlRequests.")
            assert not [name for name in named if name.startswith(ours)], "it closed before they had ended"
        await until(lambda: silent.open == 0)
