"""The payload and headers of a request, and what is refused before it is sent."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal

import numpy as np
import pytest

from streamfold import Client, DecodeError, Experts, Retries
from support.replay import (
    DONE,
    PROMPT,
    WHOLE,
    Replay,
    Request,
    answer_json,
    event,
    stream,
)

BOTH_LOOPS = True


def payload_of(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = request.json
    return body


# Requests.


async def test_a_request_is_a_post_of_json_that_refuses_compression() -> None:
    async with Replay(WHOLE) as server, Client(server.url, api_key="s3cret") as client:
        call = client.start(PROMPT, {"max_new_tokens": 8, "temperature": 0.5}, extra={"priority": 3})
        await call
        (request,) = server.generates
    assert (request.method, request.target) == ("POST", "/generate")
    assert request.headers["content-type"] == "application/json"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["authorization"] == "Bearer s3cret"
    assert request.headers["user-agent"].startswith("streamfold/")
    assert payload_of(request) == {
        "rid": call.rid,
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 8, "temperature": 0.5},
        "stream": True,
        "return_logprob": True,
        "priority": 3,
    }


async def test_headers_of_the_call_come_before_those_of_the_client_and_none_turns_compression_on() -> None:
    mine = {"X-SMG-Routing-Key": "a", "X-Mine": "1", "Accept-Encoding": "gzip"}
    async with Replay(WHOLE) as server, Client(server.url, headers=mine) as client:
        await client.generate(PROMPT, {}, headers={"x-smg-routing-key": "b", "accept-encoding": "gzip"})
        (request,) = server.generates
    assert request.headers["x-smg-routing-key"] == "b"
    assert request.headers["x-mine"] == "1"
    assert request.headers["accept-encoding"] == "identity"


async def test_side_data_is_asked_for_and_the_callers_parameters_stay_as_they_were() -> None:
    params: dict[str, Any] = {"max_new_tokens": 8, "custom_params": {"mine": True}}
    async with (
        Replay(WHOLE) as server,
        Client(server.url, experts=Experts(2, 1, dtype="uint16")) as client,
    ):
        await client.start(PROMPT, params, top_p=True, experts_start=1)
        body = payload_of(server.generates[0])
    assert body["return_routed_experts"] is True
    assert body["routed_experts_dtype"] == "uint16"
    assert body["routed_experts_start_len"] == 1
    assert body["sampling_params"]["custom_params"] == {"mine": True, "return_top_p_token_ids": True}
    assert params == {"max_new_tokens": 8, "custom_params": {"mine": True}}


async def test_what_a_request_holds_is_settled_when_it_is_started() -> None:
    params: dict[str, Any] = {"max_new_tokens": 8, "stop": ["x"]}
    prompt = list(PROMPT)
    async with Replay(WHOLE) as server, Client(server.url) as client:
        call = client.start(prompt, params)
        params["stop"].append("y")
        prompt.append(99)
        await call
        body = payload_of(server.generates[0])
    assert body["sampling_params"]["stop"] == ["x"]
    assert body["input_ids"] == PROMPT


@pytest.mark.parametrize("prompt", [PROMPT, tuple(PROMPT), np.array(PROMPT, np.int64), np.array(PROMPT, np.int32)])
async def test_a_prompt_is_sent_the_same_from_any_container(prompt: Any) -> None:
    async with Replay(WHOLE) as server, Client(server.url) as client:
        await client.generate(prompt, {})
        assert payload_of(server.generates[0])["input_ids"] == PROMPT


async def test_without_input_ids_the_prompt_is_in_extra_and_its_length_is_the_engines_word() -> None:
    async with Replay(WHOLE) as server, Client(server.url) as client:
        generation = await client.generate(None, {}, extra={"text": "tell me"})
        body = payload_of(server.generates[0])
    assert body["text"] == "tell me"
    assert "input_ids" not in body
    assert generation.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("engine", ["sglang", "vllm", "vllm-completions"])
async def test_a_call_without_a_prompt_is_refused_before_anything_is_sent(engine: Any) -> None:
    async with Replay(WHOLE) as server, Client(server.url, engine=engine, extra={"priority": 1}) as client:
        with pytest.raises(ValueError, match=r"pass input_ids, or .* in extra"):
            await client.generate(None, {"max_new_tokens": 4})
        assert not server.requests


async def test_without_logprobs_none_are_asked_for_and_none_come() -> None:
    steps = stream(event([1], 1, logprobs=False), event([2], 2, "length", logprobs=False), DONE)
    async with Replay(steps) as server, Client(server.url) as client:
        generation = await client.generate(PROMPT, {}, logprobs=False)
        assert payload_of(server.generates[0])["return_logprob"] is False
    assert generation.logprobs is None
    assert generation.token_ids.tolist() == [1, 2]


async def test_ids_of_requests_are_of_one_length_and_never_repeat(soak: bool) -> None:
    count = 1000 if soak else 100
    async with Replay(WHOLE) as server, Client(server.url) as client:
        await asyncio.gather(*[client.generate(PROMPT, {}) for _ in range(count)])
        rids = {payload_of(request)["rid"] for request in server.generates}
    assert len(rids) == count
    assert all(re.fullmatch("[0-9a-f]{32}", rid) for rid in rids)


async def test_a_request_id_of_ones_own_is_used_once_at_a_time_and_never_empty() -> None:
    async with Replay(WHOLE) as server, Client(server.url) as client:
        call = client.start(PROMPT, {}, rid="mine-0001")
        assert call.rid == "mine-0001"
        with pytest.raises(ValueError, match="in use"):
            client.start(PROMPT, {}, rid="mine-0001")
        await call
        await client.start(PROMPT, {}, rid="mine-0001")
        with pytest.raises(ValueError, match="empty"):
            client.start(PROMPT, {}, rid="")
        assert [payload_of(request)["rid"] for request in server.generates] == ["mine-0001"] * 2


async def test_a_budget_of_nothing_gives_an_empty_generation_without_a_request() -> None:
    async with Replay(WHOLE) as server, Client(server.url) as client:
        call = client.start(PROMPT, {"max_new_tokens": 0})
        generation = await call
        assert await call.abort() is generation
        without = await client.generate(PROMPT, {"max_new_tokens": 0}, logprobs=False)
        assert server.accepted == 0
        assert client.running == []
    assert generation.finish_reason == "length"
    assert generation.token_ids.dtype == np.int32
    assert len(generation.token_ids) == 0
    assert generation.logprobs is not None
    assert len(generation.logprobs) == 0
    assert without.logprobs is None
    assert (call.token_count, call.age, call.tokens_per_second) == (0, 0, 0)


@pytest.mark.parametrize(
    ("prompt", "params", "more"),
    [
        (PROMPT, {"max_new_tokens": -1}, {}),
        (PROMPT, {"n": 4}, {}),
        ([-1], {}, {}),
        ([2**31], {}, {}),
        (["a"], {}, {}),
        (PROMPT, {}, {"experts_start": -1}),
        (PROMPT, {}, {"experts_start": 4}),
        (PROMPT, {}, {"extra": {"stream": False}}),
    ],
)
async def test_what_makes_no_sense_is_a_value_error_at_the_start_and_sends_nothing(
    prompt: list[Any], params: dict[str, Any], more: dict[str, Any]
) -> None:
    async with Replay(WHOLE) as server, Client(server.url) as client:
        with pytest.raises(ValueError, match=r"\w"):
            client.start(prompt, params, **more)
        assert client.running == []
        assert server.accepted == 0


async def test_a_value_that_is_no_json_is_a_type_error_at_the_start() -> None:
    async with Replay(WHOLE) as server, Client(server.url) as client:
        with pytest.raises(TypeError, match="not JSON serializable"):
            client.start(PROMPT, {"stop": object()})
        assert client.running == []


@pytest.mark.parametrize("path", ["", "/", "//", "/api", "/api/", "/v1//x/"])
async def test_the_path_of_the_base_url_comes_before_each_request_once(path: str) -> None:
    base = "/".join(["", *filter(None, path.split("/"))])
    routes = {f"{base}/generate": WHOLE, f"{base}/v1/loads": answer_json({"loads": []})}
    async with Replay(routes=routes) as server, Client(f" {server.url}{path}\n") as client:
        await client.generate(PROMPT, {})
        assert await client.load() == 0
        assert [request.target for request in server.requests] == [
            f"{base}/generate",
            f"{base}/workers",
            f"{base}/v1/loads?include=core",
        ]


@pytest.mark.parametrize("clamped", ["raise", "keep"])
async def test_a_clamped_logprob_is_an_error_or_kept_and_counted_as_clamped_says(
    clamped: Literal["raise", "keep"],
) -> None:
    whole = event([1], 1, "stop").replace(b"-0.125", b"-9999.0")
    async with Replay(stream(whole, DONE)) as server, Client(server.url, clamped=clamped) as client:
        if clamped == "keep":
            generation = await client.generate(PROMPT, {})
            assert generation.clamped_logprobs == 1
            assert generation.logprobs is not None
            assert generation.logprobs.tolist() == [-9999.0]
        else:
            with pytest.raises(DecodeError) as damaged:
                await client.generate(PROMPT, {})
            assert damaged.value.kind == "logprob"
        assert len(server.generates) == 1


def test_what_a_client_was_made_with_can_be_read_and_not_changed() -> None:
    class Words:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return f"{ids} {skip_special_tokens}"

    words, policy = Words(), Retries(tries=3)
    client = Client("engine:1/", tokenizer=words, retries=policy)
    assert client.tokenizer is words
    assert client.retries is policy
    assert client.base_url == "http://engine:1"
    for name in ("tokenizer", "retries", "base_url", "running"):
        with pytest.raises(AttributeError):
            setattr(client, name, None)
    usual = Client("engine:1")
    assert usual.tokenizer is None
    assert usual.retries == Retries() == Retries(tries=60, first=0.5, longest=10.0, jitter=0.5)


def test_an_unknown_way_to_treat_clamped_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"raise.*keep"):
        Client("engine:1", clamped="drop")  # type: ignore[arg-type]
