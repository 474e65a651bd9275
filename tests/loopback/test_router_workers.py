"""The loopback router's workers: load balancing, headers that are not forwarded, no leaked connections or tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamfold import Client, EngineError
from streamfold.client.limits import Retries
from streamfold.loopback import Loopback, Router
from support.descriptors import room_for
from support.loopback_http import LIMIT, PLAIN, opened, payload, post, undisturbed
from support.loopback_http import until as until_true
from support.replay import DONE, PROMPT, until
from support.router_http import ask, generate, get, reported

DESCRIPTORS = Path("/proc/self/fd")
NOBODY = "http://127.0.0.1:1"
ONCE = Retries(tries=1)


# Which worker.


def test_round_robin_takes_one_worker_after_the_other() -> None:
    with Loopback() as one, Loopback() as two, Loopback() as three, Router([one, two, three]) as router:
        for _ in range(7):
            generate(router)
        assert router.stats() == {one.url: 3, two.url: 2, three.url: 2}
        assert [engine.stats().requests for engine in (one, two, three)] == [3, 2, 2]
    assert router.stats() == {one.url: 3, two.url: 2, three.url: 2}, "and can be asked after the end"


def test_least_load_takes_a_worker_with_nothing_under_way() -> None:
    body = payload(params={"max_new_tokens": 20_000})
    with Loopback(token_rate=50) as one, Loopback(token_rate=50) as two, Router([one, two], "least_load") as router:
        with httpx.stream("POST", f"{router.url}/generate", json=body, **PLAIN):
            (busy,) = [url for url, requests in router.stats().items() if requests]
            for _ in range(4):
                generate(router, params={"max_new_tokens": 1})
            assert sorted(router.stats().values()) == [1, 4]
            assert router.stats()[busy] == 1
        until_true(lambda: reported(router, "load") == [0, 0])


def test_a_routing_key_sticks_to_one_worker_and_many_keys_use_all() -> None:
    with Loopback() as one, Loopback() as two, Loopback() as three:
        engines = [one, two, three]
        with Router(engines, policy="hash") as router:
            homes = {}
            for key in map(str, range(24)):
                before = router.stats()
                for _ in range(2):
                    generate(router, key=key, params={"max_new_tokens": 1})
                (home,) = [url for url, count in router.stats().items() if count - before[url] == 2]
                homes[key] = home
        assert set(homes.values()) == {engine.url for engine in engines}
        with Router([one, NOBODY, three], policy="hash", down_seconds=60) as router:
            for key, home in homes.items():
                before = router.stats()
                generate(router, key=key, params={"max_new_tokens": 1})
                (now,) = [url for url, count in router.stats().items() if count > before[url]]
                assert home in {now, two.url}, "only the keys of the worker that is gone have moved"


def test_without_a_key_hash_is_round_robin() -> None:
    with Loopback() as one, Loopback() as two, Router([one, two], policy="hash") as router:
        for _ in range(4):
            generate(router, params={"max_new_tokens": 1})
        assert router.stats() == {one.url: 2, two.url: 2}


# Workers that are not there.


def test_a_worker_that_refuses_connections_is_left_alone_and_another_one_answers() -> None:
    with Loopback() as engine, Router([NOBODY, engine], down_seconds=60) as router:
        assert reported(router, "is_healthy") == [True, True]
        for _ in range(4):
            assert generate(router).content.endswith(DONE)
        assert reported(router, "is_healthy") == [False, True]
        assert router.stats() == {NOBODY: 0, engine.url: 4}


def test_a_worker_that_is_back_is_asked_again() -> None:
    with Loopback() as engine:
        port = httpx.URL(engine.url).port
    assert port is not None
    with Router([engine], down_seconds=0.05) as router:
        assert generate(router).status_code == 503
        with Loopback(port=port):
            until_true(lambda: generate(router).status_code == 200)
            assert reported(router, "is_healthy") == [True]


@pytest.mark.parametrize("workers", [[], [NOBODY], [NOBODY, "http://127.0.0.1:2"]])
async def test_without_a_worker_there_is_a_503_at_once(workers: list[str]) -> None:
    with Router(workers, down_seconds=60) as router:
        response = await ask(router)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_available_workers"
        ready = await asyncio.to_thread(get, router, "readiness")
        assert ready.status_code == 503
        async with Client(router.url, retries=ONCE) as client:
            with pytest.raises(EngineError, match="no worker takes connections") as caught:
                await client.generate(PROMPT, {})
        assert (caught.value.status, caught.value.retryable) == (503, True)


# The other routes.


def test_it_lists_its_workers() -> None:
    with Loopback(base_path="/api") as one, Loopback(host="::1") as two, Router([one, f"{two.url}/"]) as router:
        reply = get(router, "workers").json()
        assert [worker["url"] for worker in reply["workers"]] == [one.url, two.url]
        assert reply["total"] == 2
        for _ in range(2):
            assert generate(router).status_code == 200
        assert router.stats() == {one.url: 1, two.url: 1}


@pytest.mark.parametrize("path", ["abort_request", "pause_generation", "continue_generation", "update_weight_version"])
def test_what_is_for_the_workers_themselves_is_not_forwarded(path: str) -> None:
    with Loopback() as engine, Router([engine]) as router:
        assert httpx.post(f"{router.url}/{path}", json={"rid": "r"}, **PLAIN).status_code == 404
        assert engine.seen() == []


def test_it_is_healthy_whatever_its_workers_are() -> None:
    with Loopback() as engine, Router([engine]) as router:
        assert [get(router, path).status_code for path in ("health", "liveness", "readiness", "health_generate")] == [
            200
        ] * 4
    with Router([NOBODY]) as router:
        assert [get(router, path).status_code for path in ("health", "health_generate")] == [200, 500]
        assert [get(router, path).status_code for path in ("health", "health_generate")] == [200, 503]


@pytest.mark.parametrize("path", ["server_info", "get_server_info", "model_info", "get_model_info"])
def test_the_first_worker_answers_for_all_of_them(path: str) -> None:
    with Loopback(incremental=True) as one, Loopback() as two, Router([one, two]) as router:
        for _ in range(2):
            assert get(router, path).json() == httpx.get(f"{one.url}/{path}", **PLAIN).json()
        assert router.stats()[two.url] == 0


async def test_an_abort_of_the_client_finds_the_worker_behind_the_router() -> None:
    with Loopback(token_rate=50) as one, Loopback(token_rate=50) as two, Router([one, two]) as router:
        async with Client(router.url) as client:
            call = client.start(PROMPT, {"max_new_tokens": 20_000, "temperature": 0, "ignore_eos": True})
            await until(lambda: call.token_count > 2)
            generation = await call.abort()
            assert generation.token_ids.tolist()[:3] == undisturbed(one, input_ids=PROMPT).token_ids[:3]
            await until(lambda: one.stats().running + two.stats().running == 0)
            assert all(call.rid in engine.stats().aborts for engine in (one, two))


# The whole of it.


async def test_512_streams_at_once_all_come_whole() -> None:
    options: dict[str, Any] = {"incremental": True, "max_running_requests": 256}
    with (
        room_for(4 * 512),  # both ends of each, before the router and behind it
        Loopback(**options) as one,
        Loopback(**options) as two,
        Router([one, two], "least_load") as router,
    ):
        for engine in (one, two):
            post(engine, "pause_generation", {"mode": "retract"})
        params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        async with Client(router.url) as client:
            calls = [client.start([300, i], params) for i in range(512)]
            await until(lambda: one.stats().open_connections >= 256 and two.stats().open_connections >= 256, LIMIT)
            assert await asyncio.to_thread(reported, router, "load") == [256, 256]
            for engine in (one, two):
                post(engine, "continue_generation")
            generations = await asyncio.gather(*calls)
        for i, generation in enumerate(generations):
            wanted = undisturbed(one, input_ids=[300, i], params=params).token_ids
            assert generation.token_ids.tolist() == wanted
        assert router.stats() == {one.url: 256, two.url: 256}
        await until(lambda: one.stats().open_connections + two.stats().open_connections == 0)
        assert await asyncio.to_thread(reported, router, "load") == [0, 0]


def left_behind() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(list(DESCRIPTORS.iterdir()))


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="descriptors are counted through /proc")
def test_it_leaves_no_thread_and_no_descriptor_whatever_was_under_way() -> None:
    long: dict[str, Any] = {"json": payload(params={"max_new_tokens": 20_000}), **PLAIN}
    with Loopback(token_rate=50, incremental=True) as engine, Loopback() as paused:
        post(paused, "pause_generation", {"mode": "retract"})
        until_true(lambda: engine.stats().open_connections + paused.stats().open_connections == 0)
        before = left_behind()
        with Router([engine, paused]) as router, contextlib.ExitStack() as stack:
            url = f"{router.url}/generate"
            streams = [stack.enter_context(httpx.stream("POST", url, **long)) for _ in range(8)]
            router.__exit__()
            for response in streams:
                with pytest.raises(httpx.RemoteProtocolError):
                    response.read()
        until_true(lambda: engine.stats().open_connections + paused.stats().open_connections == 0)
        assert left_behind() == before
        assert engine.stats().running == 0


def test_a_stream_that_is_open_at_the_end_is_a_leaver_to_its_worker() -> None:
    with Loopback(token_rate=50) as engine, opened(engine, rid="stays", params={"max_new_tokens": 20_000}):
        with Router([engine]) as router:
            body = payload(rid="leaves", params={"max_new_tokens": 20_000})
            with httpx.stream("POST", f"{router.url}/generate", json=body, **PLAIN):
                until_true(lambda: engine.stats().running == 2)
                router.__exit__()
        until_true(lambda: engine.stats().leavers == ("leaves",))


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "https://127.0.0.1", "http://", "http://u@h:1", "http://h:1/?a=b"])
def test_an_address_that_is_no_worker_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        Router([url])


def test_what_makes_no_sense_is_refused_before_the_start() -> None:
    policy: Any = "random"
    with pytest.raises(ValueError, match="round_robin, least_load, hash"):
        Router([], policy)
    with pytest.raises(ValueError, match="1 or more"):
        Router([], tries=0)
    with pytest.raises(RuntimeError, match="inside the with block"):
        Router([]).stats()
    with Router([]) as router, pytest.raises(OSError, match="in use"):
        Router([], port=httpx.URL(router.url).port or 0).__enter__()
