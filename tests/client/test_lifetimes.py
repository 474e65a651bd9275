"""Cancelled tasks, event loops that are torn down, and connections that another request reuses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold import Client, EngineError, Limits
from support.calls import abort_soon, has_ended
from support.leftovers import open_files
from support.replay import (
    END,
    HANG,
    LAST_CHUNK,
    PROMPT,
    RUNNING,
    WHOLE,
    Replay,
    Request,
    Step,
    answer_json,
    begun,
    chunk,
    event,
    events,
    head,
    until,
)
from support.unreachable import closed_port

if TYPE_CHECKING:
    from collections.abc import Iterator

BOTH_LOOPS = True

UNLIMITED = httpx.Limits(max_connections=None)


async def test_an_abort_never_closes_a_connection_that_another_call_has_taken_over() -> None:
    async with Replay() as server:

        def ends_at_once(request: Request) -> Iterator[Step]:
            yield head()
            yield from map(chunk, events(2, finish=None))
            yield server.aborted[request.json["rid"]]
            yield chunk(event([], 2, "abort"))
            yield LAST_CHUNK
            yield END

        server.routes["/generate"] = ends_at_once
        server.routes["/abort_request"] = [0.2, *answer_json(None)]  # after the stream has ended
        async with Client(server.url, transport=httpx.AsyncHTTPTransport(limits=UNLIMITED)) as client:
            first = await begun(client)
            abort = asyncio.ensure_future(first.abort())
            await asyncio.sleep(0.05)
            second = await begun(client)
            assert (await abort).token_ids.tolist() == [1, 2]
            await asyncio.sleep(0.05)
            assert not has_ended(second)
            assert (await second.abort()).token_ids.tolist() == [1, 2]


# anyio connects in tasks of its own, which are cancelled here before they begin.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <coroutine object connect_tcp:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.filterwarnings("ignore:coroutine 'connect_tcp:RuntimeWarning")
@pytest.mark.parametrize("steps", range(6))
async def test_cancelling_every_task_at_any_step_leaves_no_task_hanging(steps: int) -> None:
    await cancel_every_task(steps)
    await asyncio.sleep(0)
    gc.collect()  # the coroutines that anyio never awaited are reported here, not in a later test


def is_of_server(task: asyncio.Task[Any]) -> bool:
    """Whether it accepts or serves a connection: asyncio itself leaves the socket open if that is cancelled."""
    name = getattr(task.get_coro(), "__qualname__", "")
    return name.startswith(("BaseSelectorEventLoop._accept", "Replay.", "StreamReader."))


async def cancel_every_task(steps: int) -> None:
    async with Replay(RUNNING) as server:
        client = Client(server.url, limits=Limits(calls=2))
        before = asyncio.all_tasks()
        waiting = [asyncio.ensure_future(client.generate(PROMPT, {}, top_p=True)) for _ in range(3)]
        for _ in range(steps):
            await asyncio.sleep(0)
        others = {task for task in asyncio.all_tasks() - before if not is_of_server(task)}
        for task in others:
            task.cancel()
        _, hanging = await asyncio.wait(others, timeout=5)
        assert hanging == set()
        assert all(task.cancelled() for task in waiting)
        assert client.running == []
        server.routes["/generate"] = WHOLE
        assert (await client.generate(PROMPT, {})).finish_reason == "stop"
        await client.aclose()


def test_a_program_that_fails_right_after_a_start_ends() -> None:
    script = """
import asyncio
from streamfold import Client
async def main():
    client = Client("http://127.0.0.1:9")
    call = asyncio.ensure_future(client.generate([1], {"max_new_tokens": 5}))
    raise RuntimeError("config error")
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "config error" in ended.stderr


async def test_a_cancelled_load_request_leaves_no_socket() -> None:
    async with Replay() as server:
        server.routes["/v1/loads"] = [HANG]
        async with Client(server.url) as client:
            first = asyncio.ensure_future(client.load())
            await until(lambda: server.at("/v1/loads"))
            first.cancel()
            before = open_files()
            for number in range(40):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(client.load(), number % 4 / 1000)
        await until(lambda: server.open == 0)
        assert open_files() <= before


async def test_a_cancelled_abort_task_still_closes_the_socket() -> None:
    async with Replay(RUNNING) as server, Client(server.url) as client:
        call = await begun(client)
        before = asyncio.all_tasks()
        abort_soon(call)
        (abort_task,) = asyncio.all_tasks() - before
        abort_task.cancel()
        assert (await asyncio.wait_for(call.abort(), 20)).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("most", [1, 64, 100])
def test_a_pool_in_which_calls_would_wait_for_their_aborts_is_refused(most: int) -> None:
    transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=most))
    with pytest.raises(ValueError, match="max_connections=None"):
        Client("http://engine", transport=transport, limits=Limits(calls=100))
    if most > 32:
        Client("http://engine", transport=transport, limits=Limits(calls=32))


@pytest.mark.parametrize(
    "reply", [answer_json({"workers": []}), answer_json({"detail": "busy"}, 503), answer_json({}, 429)]
)
async def test_workers_that_a_router_forgets_for_a_moment_still_get_aborts(
    reply: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfold.client.control._WORKERS_TTL", 0.0)
    monkeypatch.setattr("streamfold.client.control._FAILED_WORKERS_TTL", 0.0)
    async with Replay(RUNNING) as worker, Replay(RUNNING) as router:
        router.routes["/workers"] = answer_json({"workers": [{"url": worker.url}]})
        async with Client(router.url) as client:
            await (await begun(client)).abort()
            router.routes["/workers"] = reply
            call = await begun(client)
            await call.abort()
            await until(lambda: call.rid in worker.aborts)
            assert router.aborts == []


async def test_an_engine_that_cannot_be_reached_is_an_error_of_the_load() -> None:
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(EngineError):
            await client.load()


@pytest.mark.parametrize("ends", ["refused", "cancelled"])
def test_a_client_that_could_not_be_entered_can_be_entered_on_another_loop(ends: str) -> None:
    """It stayed bound to the first loop: the second entry asked to close a client that was never entered."""

    async def enter(client: Client) -> None:
        entry = asyncio.ensure_future(client.__aenter__())
        if ends == "cancelled":
            await asyncio.sleep(0)
            entry.cancel()
        try:
            await entry
        finally:
            assert len(asyncio.all_tasks()) == 1, "nothing is left"

    error = asyncio.CancelledError if ends == "cancelled" else EngineError
    with closed_port() as (_, url):
        client = Client(url, engine="auto")
        for _ in range(2):
            with pytest.raises(error):
                asyncio.run(enter(client))
