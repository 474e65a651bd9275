"""Samples of text prompts, whose ids the engine sends on request: resumed from ids instead of restarted."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, CompletionOptions, Experts, Generation, Retries, Sample, complete, merge
from streamfold.loopback import Loopback
from support.completing import answers, sample_of
from support.replay import DONE, FIN, PROMPT, event, stream, until
from support.speaking import SGLANG

if TYPE_CHECKING:
    from support.speaking import Speech


def tokenizing_engine(engine: str) -> Loopback:
    """A loopback engine that makes ids of text prompts, and sends them on request."""
    if engine == "sglang":
        return Loopback(incremental=True, stop_probability=0, token_rate=100)
    return Loopback(engine="vllm", stop_probability=0, token_rate=100)


@pytest.mark.parametrize("engine", ["sglang", "vllm-completions"])
async def test_a_sample_of_a_text_prompt_is_resumed_from_the_prompt_ids_that_the_engine_sends(engine: Any) -> None:
    options, params = CompletionOptions(prompt_token_ids=True), {"max_new_tokens": 40, "temperature": 0}
    with tokenizing_engine(engine) as loopback:
        async with Client(loopback.url, engine=engine) as client:
            sample = Sample(prompt="tell me a story")
            task = asyncio.ensure_future(complete(client, sample, params, options=options))
            await until(lambda: any(call.token_count for call in client.running))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            prompt_ids = loopback.tokenizer.encode("tell me a story")
            kept = list(sample.tokens)
            assert kept[: len(prompt_ids)] == prompt_ids
            assert 0 < sample.response_length < 40
            await complete(client, sample, params, options=options)
        bodies = [json.loads(seen.body) for seen in loopback.seen() if b"temperature" in seen.body]
        limit = "max_new_tokens" if engine == "sglang" else "max_tokens"
        expected = loopback.undisturbed(prompt_ids, {limit: 40, "temperature": 0})
    assert sample.tokens == [*prompt_ids, *expected.token_ids]
    assert bodies[-1].get("input_ids", bodies[-1].get("prompt")) == kept
    assert "streamfold_restarted_tokens" not in sample.metadata


async def test_prompt_ids_are_requested_for_text_prompts_alone(speech: Speech) -> None:
    whole = stream(speech.part([20, 21], finish="stop"), DONE)
    async with speech.replay(whole) as engine, speech.client(engine.url) as client:
        await complete(client, sample_of(), {"max_new_tokens": 8}, options=CompletionOptions(prompt_token_ids=True))
    assert "return_prompt_token_ids" not in engine.generates[0].json
    assert "return_token_ids" not in engine.generates[0].json


def test_merging_takes_the_prompt_ids_for_a_sample_that_has_none_and_leaves_others_alone() -> None:
    generation = Generation([7, 8], finish_reason="length", prompt_token_ids=[1, 2, 3])
    without, with_ids = Sample(prompt="Hi"), Sample(prompt="Hi", tokens=[4])
    for sample in (without, with_ids):
        merge(sample, generation)
    assert (without.tokens, without.response_length) == ([1, 2, 3, 7, 8], 2)
    assert (with_ids.tokens, with_ids.response_length) == ([4, 7, 8], 2)


def test_a_generation_that_does_not_fit_leaves_the_sample_without_ids() -> None:
    sample = Sample(prompt="Hi")
    generation = Generation([7], routed_experts=Generation([0] * 9).token_ids.reshape(9, 1, 1), prompt_token_ids=[1, 2])
    with pytest.raises(ValueError, match="9"):
        merge(sample, generation)
    assert (sample.tokens, sample.response_length) == ([], 0)


@pytest.mark.parametrize("tokens", [[], PROMPT], ids=["without ids", "with ids"])
async def test_a_prompt_that_is_the_same_in_each_request_is_never_continued_by_a_response(tokens: list[int]) -> None:
    def with_prompt_ids(payload: bytes) -> bytes:
        body = {**json.loads(payload.removeprefix(b"data: ")), "prompt_token_ids": PROMPT}
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    broken = stream(with_prompt_ids(event([0, 1], 2)), end=FIN)
    whole = stream(with_prompt_ids(event([0, 1, 2], 3, "stop")), DONE)
    async with (
        SGLANG.replay(answers(broken, whole)) as engine,
        SGLANG.client(engine.url, retries=Retries(tries=3, first=0.001)) as client,
    ):
        sample = Sample(prompt="Hi", tokens=list(tokens))
        options = CompletionOptions(extra={"text": "Hi"}, prompt_token_ids=True)
        await complete(client, sample, {"max_new_tokens": 8}, options=options)
    assert [request.json["sampling_params"]["max_new_tokens"] for request in engine.generates] == [8, 8]
    assert (sample.tokens[-3:], sample.response_length) == ([0, 1, 2], 3)
    assert sample.metadata["streamfold_restarted_tokens"] == 2


async def test_a_text_prompt_with_routed_experts_requests_the_ids_without_which_they_could_not_be_merged() -> None:
    with Loopback(incremental=True, num_layers=2, num_experts=8, top_k=2) as loopback:
        async with Client(loopback.url, experts=Experts(2, 2, 8)) as client:
            sample = await complete(client, Sample(prompt="tell me a story"), {"max_new_tokens": 5})
    assert sample.rollout_routed_experts is not None
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1


async def test_a_host_flag_that_raises_after_a_call_loses_none_of_its_tokens(speech: Speech) -> None:
    asked = 0

    def flag() -> bool:
        nonlocal asked
        asked += bool(engine.generates and not client.running)  # the call has ended
        if asked:
            raise RuntimeError("the host's flag is gone")
        return False

    async with (
        speech.replay(stream(speech.part([20, 21], finish="stop"), DONE)) as engine,
        speech.client(engine.url) as client,
    ):
        sample = sample_of()
        with pytest.raises(RuntimeError, match="the host's flag is gone"):
            await complete(client, sample, {"max_new_tokens": 8}, options=CompletionOptions(aborted=flag))
    assert (sample.tokens[-2:], sample.response_length) == ([20, 21], 2)
