"""Samples of text prompts, whose ids the engine sends on request: resumed from ids instead of restarted."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, CompletionOptions, Generation, Sample, complete, merge
from streamfold.loopback import Loopback
from support.completing import sample_of
from support.replay import DONE, stream, until

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
    assert "restarted_tokens" not in sample.metadata


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
