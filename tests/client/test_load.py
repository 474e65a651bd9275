"""The load of engines that count nothing, and of routers whose workers are gone."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import EngineError
from streamfold.loopback import Loopback
from support.replay import HANG, PROMPT, RST, Steps, answer, answer_json, until
from support.speaking import VLLM
from support.tries import in_turn
from support.unreachable import closed_port

if TYPE_CHECKING:
    from support.replay import Replay
    from support.speaking import Speech

BOTH_LOOPS = True

LONG = {"max_new_tokens": 20_000}
WITHOUT_GAUGES = answer(b"# TYPE process_open_fds gauge\nprocess_open_fds 42.0\n", kind="text/plain")
FLAGS = r"--disable-log-stats.*--enable-server-load-tracking"


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr("streamfold.client.sweep._SWEEP_SECONDS", 0.02)


def uncounted(**options: Any) -> Loopback:
    return Loopback(engine="vllm", log_stats=False, token_rate=200, stop_probability=0, leave_delay=None, **options)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def router_of(speech: Speech, *urls: str) -> Replay:
    return speech.replay(routes={"/workers": answer_json({"workers": [{"url": url} for url in urls]})})


# vLLM's flags.


async def test_an_engine_without_statistics_has_no_known_load_and_the_error_names_both_flags() -> None:
    with uncounted() as engine:
        async with VLLM.client(engine.url) as client:
            call = client.start(PROMPT, LONG)
            await until(lambda: call.token_count)
            for _ in range(2):
                with pytest.raises(EngineError, match=FLAGS):
                    await client.load()
            await call.abort()


async def test_without_statistics_an_engine_that_tracks_its_load_is_believed_once_it_has_counted() -> None:
    with uncounted(track_load=True) as engine:
        async with VLLM.client(engine.url) as client:
            with pytest.raises(EngineError, match=FLAGS):
                await client.load()
            call = client.start(PROMPT, LONG)
            await until(lambda: call.token_count)
            assert await client.load() == 1
            await call.abort()
            assert await client.load() == 0


async def test_an_engine_without_statistics_is_never_taken_for_idle(caplog: pytest.LogCaptureFixture) -> None:
    with uncounted() as engine:
        async with VLLM.client(engine.url) as client:
            call = client.start(PROMPT, LONG)
            await until(lambda: call.token_count)
            assert await client.abort_engines() is False
            assert (await call).finish_reason == "abort", "it was told all the same"
    (said,) = warnings(caplog)
    assert "--disable-log-stats" in said


async def test_an_engine_that_tracks_its_load_and_was_busy_is_seen_idle() -> None:
    with uncounted(track_load=True) as engine:
        async with VLLM.client(engine.url) as client:
            call = client.start(PROMPT, LONG)
            await until(lambda: call.token_count)
            assert await client.abort_engines() is True
            assert (await call).finish_reason == "abort"
            assert await client.abort_engines() is True


@pytest.mark.parametrize("load", [answer_json({"detail": "Not Found"}, 404), answer_json({"server_load": 0})])
async def test_a_server_of_metrics_that_has_no_count_is_an_error_that_names_the_flag(load: Steps) -> None:
    routes = {"/metrics": WITHOUT_GAUGES, "/load": load}
    async with VLLM.replay(routes=routes) as server, VLLM.client(server.url) as client:
        with pytest.raises(EngineError, match="--disable-log-stats"):
            await client.load()


# Workers that are gone.


async def test_a_dead_worker_that_the_router_still_lists_is_left_out_and_named_once(
    speech: Speech, caplog: pytest.LogCaptureFixture
) -> None:
    with closed_port() as (_, dead):
        async with speech.replay() as one, speech.replay() as two, router_of(speech, one.url, dead, two.url) as router:
            for server, load in ((one, 2), (two, 3)):
                server.routes[speech.load_path] = speech.load(load)
            async with speech.client(router.url) as client:
                assert [await client.load() for _ in range(3)] == [5, 5, 5]
        (said,) = warnings(caplog)
        assert dead in said


async def test_a_worker_that_is_back_counts_again_and_is_named_when_it_is_gone_once_more(
    speech: Speech, caplog: pytest.LogCaptureFixture
) -> None:
    with closed_port() as (_, url):
        pass
    async with (
        speech.replay() as alive,
        router_of(speech, alive.url, url) as router,
        speech.client(router.url) as client,
    ):
        alive.routes[speech.load_path] = speech.load(1)
        assert await client.load() == 1
        with speech.loopback(port=int(url.rpartition(":")[2]), token_rate=200, stop_probability=0) as box:
            async with speech.client(box.url) as other:
                call = other.start(PROMPT, LONG)
                await until(lambda: call.token_count)
                assert await client.load() == 2
                await call.abort()
        assert await client.load() == 1
    assert len([said for said in warnings(caplog) if "left out of the load" in said]) == 2


async def test_if_no_worker_can_be_reached_the_load_is_an_error(speech: Speech) -> None:
    with closed_port() as (_, one), closed_port() as (_, two):
        async with router_of(speech, one, two) as router, speech.client(router.url) as client:
            with pytest.raises(EngineError, match="no reply from"):
                await client.load()


@pytest.mark.parametrize(
    "load", [[HANG], [RST], answer_json({"detail": "broke"}, 500)], ids=["hangs", "resets", "fails"]
)
async def test_a_worker_that_takes_connections_and_does_not_tell_is_not_left_out(speech: Speech, load: Steps) -> None:
    async with speech.replay() as alive, speech.replay() as odd, router_of(speech, alive.url, odd.url) as router:
        alive.routes[speech.load_path] = speech.load(1)
        odd.routes[speech.load_path] = load
        async with speech.client(router.url) as client:
            with pytest.raises(EngineError):
                await asyncio.wait_for(client.load(), 20)


async def test_what_was_counted_at_one_worker_proves_nothing_of_another() -> None:
    async with VLLM.replay() as one, VLLM.replay() as two, router_of(VLLM, one.url, two.url) as router:
        for server in (one, two):
            server.routes["/metrics"] = WITHOUT_GAUGES
        one.routes["/load"] = in_turn(one, *[answer_json({"server_load": n}) for n in (3, 0)], path="/load")
        two.routes["/load"] = answer_json({"server_load": 0})
        async with VLLM.client(router.url) as client:
            for _ in range(2):
                with pytest.raises(EngineError, match=two.url):
                    await client.load()
