"""The loopback engine as a server: it starts on a free port, holds many streams, and leaks nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamfold.loopback import Config, Loopback, create_app
from support.loopback_http import LIMIT, PLAIN, generate, get, load, opened, payload, post, undisturbed, unread, until

DESCRIPTORS = Path("/proc/self/fd")


def open_descriptors() -> int:
    gc.collect()
    return len(list(DESCRIPTORS.iterdir()))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
def test_it_runs_on_a_free_port_of_either_loopback_address(host: str) -> None:
    with Loopback(host=host) as one, Loopback(host=host) as two:
        assert one.url != two.url
        assert one.url.startswith("http://[::1]:" if ":" in host else "http://127.0.0.1:")
        for engine in (one, two):
            assert generate(engine).ids == undisturbed(engine).token_ids
            assert get(engine, "workers").json()["workers"][0]["url"] == engine.url


def test_a_base_path_stands_before_every_path() -> None:
    with Loopback(base_path="/api/v2") as engine:
        assert engine.url.endswith("/api/v2")
        assert generate(engine).ids == undisturbed(engine).token_ids
        assert get(engine, "workers").json()["workers"][0]["url"] == engine.url
        bare = engine.url.removesuffix("/api/v2")
        assert httpx.post(f"{bare}/generate", json=payload(), **PLAIN).status_code == 404
        assert httpx.post(f"{engine.url}//generate", json=payload(), **PLAIN).status_code == 404


@pytest.mark.parametrize("incremental", [False, True])
def test_256_streams_at_once_all_come_whole(incremental: bool) -> None:
    with Loopback(incremental=incremental, token_rate=100, max_running_requests=256) as engine:

        async def one(client: httpx.AsyncClient, prompt: list[int]) -> bytes:
            body = payload(input_ids=prompt, params={"max_new_tokens": 12})
            return (await client.post(f"{engine.url}/generate", json=body)).content

        async def run() -> list[bytes]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(**{**PLAIN, "timeout": 60}, limits=limits) as client:
                answers = asyncio.gather(*(one(client, [300, i]) for i in range(256)))
                await asyncio.to_thread(until, lambda: engine.stats().open_connections >= 256)
                await client.post(f"{engine.url}/continue_generation")
                return await answers

        post(engine, "pause_generation", {"mode": "retract"})
        for i, body in enumerate(asyncio.run(run())):
            wanted = undisturbed(engine, input_ids=[300, i], params={"max_new_tokens": 12})
            assert body.endswith(b"data: [DONE]\n\n")
            assert b'"completion_tokens":12' in body
            for token in wanted.token_ids:
                assert b",%d,null]" % token in body
        stats = engine.stats()
        assert (stats.requests, stats.tokens, stats.running, stats.waiting) == (256, 256 * 12, 0, 0)
        assert stats.connections == 256 + 2, "one for the pause, one to go on"
        until(lambda: engine.stats().open_connections == 0)


def test_it_keeps_the_token_rate_and_the_prefill_delay() -> None:
    with Loopback(token_rate=100, prefill_delay=0.1) as engine:
        answer = generate(engine, params={"max_new_tokens": 21})
        # 20 periods of 10 ms after the first token: never faster, on any machine.
        assert answer.last["meta_info"]["e2e_latency"] >= 0.1 + 20 * 0.01 - 0.005


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="descriptors are counted through /proc")
def test_it_leaves_no_thread_and_no_descriptor_whatever_was_under_way() -> None:
    with Loopback() as engine:
        generate(engine)
    threads, descriptors = threading.active_count(), open_descriptors()
    with Loopback(token_rate=50, max_running_requests=2, send_buffer=8192, incremental=True) as engine:
        long: dict[str, Any] = {"params": {"max_new_tokens": 20_000}}
        with opened(engine, **long) as one, opened(engine, **long), opened(engine, **long), unread(engine, **long):
            until(lambda: load(engine) == (2, 2))
            one.frame()
            post(engine, "pause_generation", {"mode": "in_place"})
            with opened(engine, **long):
                engine.__exit__()
    assert engine.stats().open_connections == 0
    assert threading.active_count() == threads
    assert open_descriptors() == descriptors


def test_a_stream_that_is_open_at_the_end_is_cut_without_its_last_chunk() -> None:
    with Loopback(token_rate=50) as engine, opened(engine, params={"max_new_tokens": 20_000}) as stream:
        stream.frame()
        engine.__exit__()
        with pytest.raises(httpx.RemoteProtocolError):
            stream.to_end()


def test_its_counts_can_be_read_after_the_end() -> None:
    with Loopback() as engine:
        generate(engine)
    assert engine.stats().tokens == 20
    assert engine.stats().open_connections == 0
    assert [request.path for request in engine.seen()] == ["/generate"]


def test_before_the_start_there_is_nothing_to_ask() -> None:
    with pytest.raises(RuntimeError, match="inside the with block"):
        Loopback().stats()
    with pytest.raises(TypeError, match="not both"):
        Loopback(Config(), seed=1)


def test_a_port_that_is_taken_is_told_to_the_caller() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        Loopback(port=taken.getsockname()[1]).__enter__()


def test_a_scheduler_that_dies_ends_every_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may hang because of a fault in here."""
    engine = Loopback(token_rate=50)
    engine.__enter__()
    body: dict[str, Any] = {"params": {"max_new_tokens": 20_000}}
    with opened(engine, **body) as stream, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(generate, engine, stream=False, **body)
        stream.frame()
        until(lambda: engine.stats().running == 2)
        monkeypatch.setattr("streamfold.loopback.core.request.EngineRequest.step", lambda *_: 1 // 0)
        error = stream.to_end().last["error"]
        assert (whole.result().status, whole.result().json["code"]) == (500, 500)
    assert (error["code"], "ZeroDivisionError" in error["message"]) == (500, True)
    with pytest.raises(ZeroDivisionError):
        engine.__exit__()


def test_the_application_serves_inside_any_asgi_server() -> None:
    async def run() -> httpx.Response:
        app = create_app(Config())
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return await client.post("http://x/generate", json=payload(stream=False))

    assert len(asyncio.run(run()).json()["output_ids"]) == 20


SERVE = """
import sys
from streamfold.loopback import serve
serve(port=0, token_rate=20, on_ready=lambda url: print(url, flush=True))
print("ended", flush=True)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_serve_runs_until_a_signal_and_then_returns(sign: signal.Signals) -> None:
    command = [sys.executable, "-W", "error", "-c", SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        url = process.stdout.readline().strip()
        with httpx.stream("POST", f"{url}/generate", json=payload(params={"max_new_tokens": 1000}), **PLAIN) as stream:
            next(stream.iter_raw())
            os.kill(process.pid, sign)
            assert process.wait(LIMIT) == 0
        assert process.stdout.read() == "ended\n"
        assert process.stderr.read() == ""


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_the_import_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import streamfold.loopback"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    reported = f"ImportError: the loopback engine needs {missing}: pip install 'streamfold[loopback]'"
    assert result.stderr.strip().endswith(reported)
