"""Against a real server, if one is named: STREAMFOLD_SGLANG_URL, STREAMFOLD_VLLM_URL. No other client may use it.

Only what holds for any model and any seed is asserted: real engines do not repeat themselves to the bit. That these
tests themselves are sound is shown on the loopback engines.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any, Literal, cast

import httpx
import numpy as np
import pytest

from streamfold import Client, Sample, complete
from streamfold.loopback import Loopback
from support.calls import has_ended
from support.replay import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PROMPT = list(range(100, 116))  # in every vocabulary
ENGINES = ("sglang", "vllm")
KEY = os.environ.get("STREAMFOLD_API_KEY")


def servers() -> Iterator[Any]:
    for engine in ENGINES:
        variable = f"STREAMFOLD_{engine.upper()}_URL"
        url = os.environ.get(variable)
        unless = pytest.mark.skipif(not url, reason=f"{variable} names no running server")
        yield pytest.param((engine, url), id=engine, marks=unless)
        yield pytest.param((engine, None), id=f"{engine}-loopback")


GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SECONDS = 30.0  # for a server to come to rest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=servers())
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """An engine's name and the URL of one that runs."""
    engine, url = request.param
    if url is not None:
        yield engine, url
        return
    with Loopback(engine=engine, token_rate=500) as loopback:
        yield engine, loopback.url


@pytest.fixture
async def client(server: tuple[str, str]) -> AsyncIterator[Client]:
    kind = cast("Literal['sglang', 'vllm']", server[0])
    async with Client(server[1], engine=kind, api_key=KEY) as running:
        yield running


async def at_rest(client: Client) -> None:
    for _ in range(round(SECONDS / 0.1)):
        if await client.load() == 0:
            return
        await asyncio.sleep(0.1)
    pytest.fail("the server does not come to rest: does another client use it?")


async def test_the_server_is_what_it_is_said_to_be(server: tuple[str, str]) -> None:
    async with Client(server[1], engine="auto", api_key=KEY) as client:
        assert client.engine == server[0]


async def test_one_token_is_one_token(client: Client) -> None:
    generation = await client.generate(PROMPT, {**GREEDY, "max_new_tokens": 1})
    assert len(generation.token_ids) == 1
    assert generation.finish_reason == "length"
    assert generation.prompt_tokens == len(PROMPT)


async def test_a_budget_is_used_up_and_every_token_has_its_logprob(client: Client) -> None:
    generation = await client.generate(PROMPT, {**GREEDY, "max_new_tokens": 64})
    assert (len(generation.token_ids), generation.finish_reason) == (64, "length")
    assert generation.logprobs is not None
    assert len(generation.logprobs) == 64
    assert np.isfinite(generation.logprobs).all()
    assert (generation.logprobs <= 1e-6).all()


async def test_without_logprobs_there_are_none(client: Client) -> None:
    generation = await client.generate(PROMPT, {**GREEDY, "max_new_tokens": 8}, logprobs=False)
    assert (len(generation.token_ids), generation.logprobs) == (8, None)


async def test_a_stop_token_ends_the_response_and_is_its_last(client: Client) -> None:
    whole = await client.generate(PROMPT, {**GREEDY, "max_new_tokens": 32})
    stop = int(whole.token_ids[8])
    generation = await client.generate(PROMPT, {**GREEDY, "max_new_tokens": 32, "stop_token_ids": [stop]})
    if generation.finish_reason == "stop":  # else the greedy path was another one this time
        assert generation.token_ids[-1] == stop
        assert stop not in generation.token_ids[:-1]


async def test_an_abort_keeps_what_has_come_and_ends_the_request(client: Client) -> None:
    call = client.start(PROMPT, {**GREEDY, "max_new_tokens": 4000})
    await until(lambda: call.token_count >= 8)
    generation = await call.abort()
    assert 8 <= len(generation.token_ids) < 4000
    assert generation.finish_reason in (None, "abort")
    assert generation.logprobs is not None
    assert len(generation.logprobs) == len(generation.token_ids)
    await at_rest(client)


async def test_after_aborts_at_any_moment_the_server_comes_to_rest(client: Client) -> None:
    for round_ in range(20):
        calls = [client.start(PROMPT, {**GREEDY, "max_new_tokens": 2000}) for _ in range(4)]
        await asyncio.sleep(0.01 * round_)
        await client.abort_all()
        assert all(has_ended(call) for call in calls)
    await at_rest(client)
    assert (await client.generate(PROMPT, {**GREEDY, "max_new_tokens": 4})).finish_reason == "length"


async def test_a_client_that_just_goes_away_does_not_harm_the_next_one(client: Client, server: tuple[str, str]) -> None:
    engine, url = server
    path = "/generate" if engine == "sglang" else "/inference/v1/generate"
    key = "input_ids" if engine == "sglang" else "token_ids"
    limit = "max_new_tokens" if engine == "sglang" else "max_tokens"
    body = {key: PROMPT, "sampling_params": {"temperature": 0.0, "ignore_eos": True, limit: 500}, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
    async with (
        httpx.AsyncClient(trust_env=False) as plain,
        plain.stream("POST", url + path, json=body, headers=headers) as response,
    ):
        async for _ in response.aiter_raw():
            break
    assert (await client.generate(PROMPT, {**GREEDY, "max_new_tokens": 4})).finish_reason == "length"
    await at_rest(client)  # at the latest when the 500 tokens are through


async def test_a_sample_that_is_aborted_many_times_gets_its_budget_and_no_more(client: Client) -> None:
    sample, params = Sample(tokens=list(PROMPT)), {**GREEDY, "max_new_tokens": 256}
    parts: list[list[int]] = []
    while sample.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        task = asyncio.ensure_future(complete(client, sample, params))
        if len(parts) < 3:
            await asyncio.wait({task}, timeout=0.15)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        parts.append(list(sample.tokens))
    assert (sample.response_length, sample.status) == (256, Sample.Status.TRUNCATED)
    assert sample.rollout_log_probs is not None
    assert len(sample.rollout_log_probs) == 256
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(parts))
    await at_rest(client)
