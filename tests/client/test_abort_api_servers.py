"""The abort of all requests where it misses some: vLLM with several API servers, each of which aborts its own."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold.loopback import Loopback
from support.replay import HANG, PROMPT, RST, Replay, Steps, answer_json, until
from support.speaking import SGLANG, VLLM
from support.tries import in_turn

if TYPE_CHECKING:
    from streamfold import Call, Client

BOTH_LOOPS = True

LONG = {"max_new_tokens": 20_000}
PAUSE, RESUME = "/pause?mode=abort&clear_cache=false", "/resume"
NOT_PAUSED = answer_json({"is_paused": False})
TAKEN = answer_json({"status": "taken"})


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr("streamfold.client.sweep._SWEEP_SECONDS", 0.02)
    monkeypatch.setattr("streamfold.client.sweep.REPEAT_SECONDS", 0.01)


def busy_box(**options: Any) -> Loopback:
    """An engine that ends no request for a closed stream."""
    return Loopback(engine="vllm", token_rate=200, stop_probability=0, leave_delay=None, **options)


async def started(client: Client, count: int) -> list[Call]:
    calls = [client.start(PROMPT, LONG) for _ in range(count)]
    await until(lambda: all(call.token_count for call in calls))
    return calls


def controls(engine: Loopback) -> list[str]:
    """What was asked of the engine about pauses."""
    seen = [f"{one.path}?{one.query}" if one.query else one.path for one in engine.seen()]
    return [path for path in seen if "pause" in path or path == RESUME]


def stuck(*loads: int, state: Steps = NOT_PAUSED, pause: Steps = TAKEN, resume: Steps = TAKEN) -> Replay:
    """An engine that tells these loads whatever is aborted, the last one ever after."""
    server = VLLM.replay(routes={"/is_paused": state, "/pause": pause, RESUME: resume})
    server.routes[VLLM.load_path] = in_turn(server, *map(VLLM.load, loads), path=VLLM.load_path)
    return server


def steps_of(server: Replay) -> list[str]:
    return [request.target for request in server.requests if "pause" in request.target or request.target == RESUME]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Against an engine.


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
async def test_the_requests_of_all_api_servers_end_and_the_engine_serves_on(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with busy_box(api_servers=4, version=version) as engine:
        async with VLLM.client(engine.url) as client, VLLM.client(engine.url) as other:
            calls = [*await started(client, 8), *await started(other, 4)]
            assert await client.abort_engines() is True
            assert await client.load() == 0
            ends = await asyncio.gather(*calls, return_exceptions=True)
            if version == "0.32.0":  # the release that tells an abort
                assert [getattr(end, "finish_reason", end) for end in ends] == ["abort"] * 12
            assert controls(engine) == ["/is_paused", PAUSE, RESUME]
            assert (await client.generate(PROMPT, {"max_new_tokens": 3})).finish_reason == "length"
    assert [said for said in warnings(caplog) if "new requests wait in between" in said] == warnings(caplog)
    assert len(warnings(caplog)) == 1


async def test_an_engine_that_the_abort_empties_is_neither_asked_nor_paused() -> None:
    with busy_box() as engine:
        async with VLLM.client(engine.url) as client:
            calls = await started(client, 12)
            assert await client.abort_engines() is True
            await asyncio.gather(*calls)
        assert controls(engine) == []


async def test_an_engine_that_somebody_else_has_paused_is_left_paused_and_is_not_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with busy_box(api_servers=4) as engine:
        async with VLLM.client(engine.url) as client:
            calls = await started(client, 12)
            async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as somebody:
                await somebody.post("/pause?mode=keep")
                assert await client.abort_engines(0.5) is False
                assert (await somebody.get("/is_paused")).json() == {"is_paused": True}
                assert set(controls(engine)) == {"/pause?mode=keep", "/is_paused"}
                (said,) = warnings(caplog)
                assert "somebody has paused it" in said
                await somebody.post(RESUME)
            assert await client.abort_engines() is True, "nobody has paused it any more"
            await asyncio.gather(*calls)


# What an engine may answer.


@pytest.mark.parametrize(
    "state",
    [answer_json({"detail": "Not Found"}, 404), answer_json({"error": "x"}, 500), [HANG], [RST], answer_json("yes")],
    ids=["404", "500", "silent", "reset", "odd"],
)
async def test_an_engine_that_does_not_tell_whether_it_is_paused_is_neither_paused_nor_resumed(
    state: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    async with stuck(1, state=state) as server, VLLM.client(server.url) as client:
        assert await asyncio.wait_for(client.abort_engines(0.8), 20) is False
        assert set(steps_of(server)) == {"/is_paused"}
    (said,) = warnings(caplog)
    assert "does not tell whether somebody has paused it" in said


async def test_an_engine_without_a_state_of_pauses_may_still_become_idle() -> None:
    async with stuck(1, 1, 1, 1, 1, 0, state=answer_json({"detail": "no"}, 404)) as server:
        async with VLLM.client(server.url) as client:
            assert await client.abort_engines() is True
        assert steps_of(server) == ["/is_paused"], "it is asked once"


@pytest.mark.parametrize("pause", [answer_json({"error": "x"}, 500), [RST], [HANG]], ids=["500", "reset", "silent"])
async def test_after_a_pause_that_may_have_failed_the_engine_is_resumed_all_the_same(pause: Steps) -> None:
    async with stuck(1, 1, 1, 0, pause=pause) as server, VLLM.client(server.url) as client:
        assert await client.abort_engines() is True
        steps = steps_of(server)
        assert list(dict.fromkeys(steps)) == ["/is_paused", PAUSE, RESUME], "a reset one is repeated"
        assert steps[-1] == RESUME


@pytest.mark.parametrize("how", ["cancel", "cancel twice", "aclose", "time"])
async def test_whatever_ends_the_abort_during_a_pause_the_engine_is_resumed(how: str) -> None:
    async with stuck(1, pause=[HANG]) as server, VLLM.client(server.url) as client:
        aborting = asyncio.ensure_future(client.abort_engines(0.3 if how == "time" else 30))
        await until(lambda: server.at("/pause"))
        if how.startswith("cancel"):
            aborting.cancel()
            if how == "cancel twice":
                await asyncio.sleep(0)
                aborting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(aborting, 20)
        else:
            if how == "aclose":
                await asyncio.wait_for(client.aclose(), 20)
            assert await asyncio.wait_for(aborting, 20) is False
        await until(lambda: server.at(RESUME))
        assert steps_of(server) == ["/is_paused", PAUSE, RESUME]


def test_an_event_loop_that_is_torn_down_during_a_pause_resumes_the_engine() -> None:
    async def torn(url: str) -> None:
        client = VLLM.client(url)
        aborting = asyncio.ensure_future(client.abort_engines())
        for _ in range(500):
            if PAUSE in controls(engine):
                break
            await asyncio.sleep(0.01)
        assert not aborting.done()

    with busy_box(api_servers=2) as engine, httpx.Client(base_url=engine.url, trust_env=False, timeout=30) as plain:
        body = {"token_ids": PROMPT, "stream": True, "sampling_params": {"max_tokens": 20_000, "ignore_eos": True}}
        with plain.stream("POST", VLLM.path, json=body), plain.stream("POST", VLLM.path, json=body):
            asyncio.run(torn(engine.url))
            assert plain.get("/is_paused").json() == {"is_paused": False}


async def test_a_resume_that_fails_is_repeated() -> None:
    server = stuck(1, 1, 1, 0)
    server.routes[RESUME] = in_turn(server, answer_json({"error": "x"}, 500), [RST], TAKEN, path=RESUME)
    async with server, VLLM.client(server.url) as client:
        assert await client.abort_engines() is True
        assert steps_of(server) == ["/is_paused", PAUSE, RESUME, RESUME, RESUME]


async def test_an_engine_that_cannot_be_resumed_is_not_idle_and_the_log_says_what_to_post(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stuck(1, 1, 1, 0, resume=answer_json({"error": "x"}, 500)) as server, VLLM.client(server.url) as client:
        assert await client.abort_engines() is False
    assert any("could not be resumed: POST /resume" in said for said in warnings(caplog))


async def test_an_engine_of_another_kind_is_never_paused() -> None:
    async with SGLANG.replay(routes={"/v1/loads": SGLANG.load(1)}) as server, SGLANG.client(server.url) as client:
        assert await client.abort_engines(0.5) is False
        assert steps_of(server) == []
