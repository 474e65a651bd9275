"""Streams that vLLM ends without a finish reason because somebody has aborted them.

``/inference/v1/generate`` up to 0.31 sends ``[DONE]`` alone, as does ``/v1/completions`` up to 0.32 before the first
token; the Rust frontend sends an error that has a name in place of a number.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold import Client, EngineError, Retries, StreamTruncated
from streamfold.loopback import Loopback
from support.completing import completed, sample_of
from support.replay import ASKED, DONE, FIN, PROMPT, chunk, head, stream, until
from support.speaking import VLLM
from support.tries import SOON

if TYPE_CHECKING:
    from support.replay import Step

EACH_DRIVER = True

PARAMS = {"max_new_tokens": 4000, "ignore_eos": True}
RUNNING, QUEUED = 2, 4
ONCE = Retries(tries=1)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "0.28": ("vllm", {"version": "0.28.0"}),
    "0.31 completions": ("vllm-completions", {"version": "0.31.0"}),
    "0.32 completions": ("vllm-completions", {"version": "0.32.0"}),
    "rust": ("vllm", {"frontend": "rust"}),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    return KINDS[request.param]


def slow(options: dict[str, Any]) -> Loopback:
    return Loopback(engine="vllm", token_rate=200, leave_delay=None, max_running_requests=RUNNING, **options)


async def running_and_queued(client: Client, box: Loopback, **options: Any) -> list[Any]:
    calls = [client.start(PROMPT, PARAMS, **options) for _ in range(RUNNING + QUEUED)]
    await until(lambda: box.stats().waiting == QUEUED and sum(call.token_count > 2 for call in calls) == RUNNING)
    return calls


async def aborted(calls: list[Any]) -> bool:
    """Whether all calls were aborted, in their first try, and those that had tokens kept them."""
    ends = await asyncio.wait_for(asyncio.gather(*calls), 20)
    assert {call.tries for call in calls} == {1}
    assert sum(len(end.token_ids) > 2 for end in ends) == RUNNING
    assert all(end.version_spans in ([], [(None, 0, len(end.token_ids))]) for end in ends)
    return {end.finish_reason for end in ends} == {"abort"}


async def test_what_abort_engines_ends_is_aborted_with_tokens_and_in_the_queue(kind: tuple[Any, Any]) -> None:
    engine, options = kind
    with slow(options) as box:
        async with Client(box.url, engine=engine, retries=SOON) as client:
            calls = await running_and_queued(client, box)
            assert await client.abort_engines() is True
            assert await aborted(calls)
            assert box.stats().requests == RUNNING + QUEUED, "one of them was sent again"


async def test_what_a_host_ends_while_its_flag_is_set_is_aborted_too(kind: tuple[Any, Any]) -> None:
    engine, options = kind
    is_aborting = False
    with slow(options) as box:
        async with Client(box.url, engine=engine, retries=SOON) as client, httpx.AsyncClient() as host:
            calls = await running_and_queued(client, box, aborted=lambda: is_aborting)
            is_aborting = True
            await host.post(f"{box.url}/abort_requests", json={})
            assert await aborted(calls)


async def test_what_nobody_here_has_aborted_is_a_failure(kind: tuple[Any, Any]) -> None:
    engine, options = kind
    with slow(options) as box:
        async with Client(box.url, engine=engine, retries=ONCE) as client, httpx.AsyncClient() as stranger:
            calls = await running_and_queued(client, box, aborted=lambda: False)
            await stranger.post(f"{box.url}/abort_requests", json={})
            ends = await asyncio.gather(*calls, return_exceptions=True)
    failed = [end for end in ends if isinstance(end, StreamTruncated | EngineError)]
    assert len(failed) >= QUEUED, "those in the queue at least; completions with tokens get a terminal event"
    for error in failed:
        assert getattr(error, "done", True)
        assert getattr(error, "retryable", True)


async def test_an_abort_that_is_over_explains_nothing_that_was_sent_later() -> None:
    async with VLLM.replay(stream(DONE)) as server:
        server.routes[VLLM.load_path] = VLLM.load(0)
        async with VLLM.client(server.url, retries=ONCE) as client:
            assert await client.abort_engines() is True
            with pytest.raises(StreamTruncated):
                await client.generate(PROMPT, ASKED)


@pytest.mark.parametrize("cut", [[FIN], stream()[1:]], ids=["a lost connection", "no [DONE]"])
async def test_a_stream_that_the_engine_has_not_ended_itself_is_no_abort(cut: list[Step]) -> None:
    is_aborting = False
    async with (
        VLLM.replay([head(), *map(chunk, VLLM.events(2, finish=None)), 0.2, *cut]) as server,
        VLLM.client(server.url, retries=ONCE) as client,
    ):
        call = client.start(PROMPT, ASKED, aborted=lambda: is_aborting)
        await until(lambda: call.token_count)
        is_aborting = True
        with pytest.raises(StreamTruncated):
            await call


async def test_a_sample_that_the_host_has_aborted_is_not_resumed() -> None:
    is_aborting = False
    async with (
        VLLM.replay([*VLLM.two, 0.2, *stream(DONE)[1:]]) as server,
        VLLM.client(server.url, retries=SOON) as client,
    ):
        work = asyncio.ensure_future(completed(client, sample_of(), aborted=lambda: is_aborting))
        await until(lambda: client.running and client.running[0].token_count == 2)
        is_aborting = True
        sample = await work
    assert (sample.tokens, sample.status.value) == ([*PROMPT, 1, 2], "aborted")
    assert len(server.generates) == 1
