"""What requests carry besides prompt and sampling parameters: a LoRA adapter, priority, a cache's salt, headers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import (
    Buffer,
    Client,
    CompletionOptions,
    EngineTimeout,
    Retries,
    Rollout,
    RolloutConfig,
    Sample,
    Timeouts,
    complete,
)
from streamfold.loopback import Loopback
from support.replay import ASKED, HANG, PROMPT, WHOLE, Replay, Step, chunk, event, head

if TYPE_CHECKING:
    from collections.abc import Mapping

BOTH_LOOPS = True

PARAMS = {"max_new_tokens": 4, "ignore_eos": True}
LORA = {"sglang": {"lora_path": "math"}, "vllm": {"model": "math"}, "vllm-completions": {"model": "math"}}
ENGINES = pytest.mark.parametrize("engine", LORA)


async def by_client(url: str, engine: Any, extra: Mapping[str, Any]) -> None:
    async with Client(url, engine=engine, extra=extra) as client:
        await client.generate(PROMPT, PARAMS)


async def by_call(url: str, engine: Any, extra: Mapping[str, Any]) -> None:
    async with Client(url, engine=engine) as client:
        await client.start(PROMPT, PARAMS, extra=extra)


async def by_sample(url: str, engine: Any, extra: Mapping[str, Any]) -> None:
    async with Client(url, engine=engine) as client:
        await complete(client, Sample(tokens=PROMPT), PARAMS, options=CompletionOptions(extra=extra))


async def by_rollout(url: str, engine: Any, extra: Mapping[str, Any]) -> None:
    config = RolloutConfig(groups=1, sampling_params=PARAMS, extra=extra, progress=False)
    async with Client(url, engine=engine) as client:
        await Rollout(client, config).run(Buffer([[Sample(tokens=PROMPT)]]))


async def by_rollout_with_ranks(url: str, engine: Any, extra: Mapping[str, Any]) -> None:
    config = RolloutConfig(groups=1, sampling_params=PARAMS, extra=extra, dp_size=2, progress=False)
    async with Client(url, engine=engine) as client:
        await Rollout(client, config).run(Buffer([[Sample(tokens=PROMPT)]]))


@ENGINES
@pytest.mark.parametrize("way", [by_client, by_call, by_sample, by_rollout, by_rollout_with_ranks])
async def test_the_engine_gets_an_adapter_a_priority_and_a_salt_by_each_way(engine: str, way: Any) -> None:
    extra = {**LORA[engine], "priority": 3, "cache_salt": "mine"}
    given = dict(extra)
    with Loopback(engine="sglang" if engine == "sglang" else "vllm", model_name="math", dp_size=2) as server:
        await way(server.url, engine, extra)
        request = next(request for request in server.seen() if request.method == "POST")
    body = request.json()
    assert {key: body.get(key) for key in extra} == extra == given


async def test_what_a_call_says_comes_before_what_its_client_says_and_a_config_is_a_call() -> None:
    async with Replay(WHOLE) as server:
        async with Client(
            server.url, extra={"lora_path": "base", "priority": 1}, headers={"X-Mine": "client"}
        ) as client:
            await client.generate(PROMPT, ASKED, extra={"lora_path": "mine"})
            await client.generate(PROMPT, ASKED)
            config = RolloutConfig(
                groups=1, sampling_params=ASKED, extra={"priority": 9}, headers={"x-mine": "config"}, progress=False
            )
            await Rollout(client, config).run(Buffer([[Sample(tokens=PROMPT)]]))
        sent = [
            (request.json["lora_path"], request.json["priority"], request.headers["x-mine"])
            for request in server.generates
        ]
    assert sent == [("mine", 1, "client"), ("base", 1, "client"), ("base", 9, "config")]


@pytest.mark.parametrize("key", ["text", "input_ids", "token_ids", "prompt"])
def test_a_prompt_for_all_requests_is_refused_by_its_key(key: str) -> None:
    for make in (lambda extra: Client("engine:1", extra=extra), lambda extra: RolloutConfig(groups=1, extra=extra)):
        with pytest.raises(ValueError, match=f"extra must not hold {key}: every request would get the same prompt"):
            make({key: [1], "priority": 3})


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        ("sglang", ["rid", "sampling_params", "stream", "return_logprob"]),
        ("vllm", ["request_id", "sampling_params", "stream", "stream_options"]),
        ("vllm-completions", ["request_id", "max_tokens", "n", "return_token_ids", "stream"]),
    ],
)
async def test_a_key_that_the_client_sets_itself_is_refused_by_its_name(engine: Any, keys: list[str]) -> None:
    for key in keys:
        with pytest.raises(ValueError, match=f"extra must not hold {key}: use the argument that sets it"):
            Client("engine:1", engine=engine, extra={key: 1, "priority": 3})
        async with Client("engine:1", engine=engine) as client:
            with pytest.raises(ValueError, match=f"extra must not hold {key}: use the argument that sets it"):
                client.start(PROMPT, ASKED, extra={key: 1})
            assert client.running == []


async def test_an_engine_that_is_found_out_later_refuses_its_keys_then() -> None:
    with Loopback() as server:
        async with Client(server.url, engine="auto", extra={"rid": "x"}) as client:
            assert client.engine == "sglang"
            with pytest.raises(ValueError, match="extra must not hold rid"):
                client.start(PROMPT, ASKED)


@pytest.mark.parametrize("extra", [{"priority": object()}, {1: "x"}, [1]])
def test_what_json_cannot_write_is_refused_at_once(extra: Any) -> None:
    for make in (lambda: Client("engine:1", extra=extra), lambda: RolloutConfig(groups=1, extra=extra)):
        with pytest.raises(TypeError):
            make()


async def test_what_is_given_is_neither_changed_nor_kept() -> None:
    extra: dict[str, Any] = {"lora_path": "a", "bias": np.arange(2)}
    async with Replay(WHOLE) as server, Client(server.url, extra=extra) as client:
        extra["lora_path"] = "b"
        await client.generate(PROMPT, ASKED)
        (request,) = server.generates
    assert (request.json["lora_path"], request.json["bias"]) == ("a", [0, 1])
    assert list(extra) == ["lora_path", "bias"]


# Timeouts of one call.


@pytest.mark.parametrize("own", ["first_token", "next_token"])
async def test_a_call_may_have_timeouts_of_its_own(own: str) -> None:
    steps: list[Step] = [head(), HANG] if own == "first_token" else [head(), chunk(event([1], 1)), HANG]
    short: Any = Timeouts(**{own: 0.05})
    async with Replay(steps) as server, Client(server.url, retries=Retries(tries=1)) as client:
        other = client.start(PROMPT, ASKED)
        call = client.start(PROMPT, ASKED, timeouts=short)
        for waiting in (call, client.generate(PROMPT, ASKED, timeouts=short)):
            with pytest.raises(EngineTimeout, match=f"within 0.05 s .Timeouts.{own}") as caught:
                await asyncio.wait_for(asyncio.ensure_future(_result(waiting)), 30)
            assert caught.value.phase == own
        assert other.error is None, "the others have the client's"
        await other.abort()


async def _result(waiting: Any) -> Any:
    return await waiting
