"""Pauses around new weights: what each mode keeps, and the version of each token of a response that spans them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.hf_generating import PROMPTS, client, experts, logprobs, serve
from support.loopback_http import OpenStream, get, load, opened, post, until

if TYPE_CHECKING:
    from streamfold import Generation
    from streamfold.loopback import Loopback
    from support.hf_reference import Reference

pytestmark = pytest.mark.torch

EXACT = 1e-5
PARAMS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 5}


def pause(engine: Loopback, mode: str) -> None:
    assert post(engine, "pause_generation", {"mode": mode}).status_code == 200


def resume(engine: Loopback) -> None:
    assert post(engine, "continue_generation").status_code == 200


def cached_tokens(engine: Loopback) -> int:
    """The tokens in the KV cache, as the engine counts them."""
    (reported,) = get(engine, "v1/loads?include=core").json()["loads"]
    found: int = reported["num_used_tokens"]
    return found


def update(engine: Loopback, trained: Reference, **body: Any) -> None:
    answer = post(engine, "update_weights_from_disk", {"model_path": str(trained.path), "weight_version": "1", **body})
    assert answer.json()["success"], answer.json()


async def across_an_update(
    moe: Reference, trained: Reference, mode: str, incremental: bool
) -> tuple[list[int], Generation, int]:
    """A response with new weights after about ten tokens: its prompt, itself, and the cached tokens meanwhile."""
    prompt = PROMPTS[0]
    with serve(moe, batch_invariant=True, incremental=incremental, token_rate=100) as engine:
        async with client(engine) as asking:
            call = asking.start(prompt, PARAMS)
            await call.wait_tokens(10)
            await asyncio.to_thread(pause, engine, mode)
            cached = await asyncio.to_thread(cached_tokens, engine)
            await asyncio.to_thread(update, engine, trained, flush_cache=mode != "in_place")
            await asyncio.to_thread(resume, engine)
            return prompt, await call, cached


@pytest.mark.parametrize("incremental", [False, True])
async def test_after_retract_each_span_scores_as_its_version_says(
    moe: Reference, trained: Reference, incremental: bool
) -> None:
    prompt, generation, cached = await across_an_update(moe, trained, "retract", incremental)
    assert cached == 0
    (first, _, cut), (second, start, end) = generation.version_spans
    assert (first, second, start, end) == ("default", "1", cut, 40)
    tokens = generation.token_ids
    assert np.abs(logprobs(generation)[:cut] - moe.logprobs(prompt, tokens)[:cut]).max() < EXACT
    # What was computed anew was routed anew, so the rows are those of the new weights from the first position on.
    anew = trained.logprobs(prompt, tokens, experts(generation))
    assert np.abs(logprobs(generation)[cut:] - anew[cut:]).max() < EXACT


@pytest.mark.parametrize("incremental", [False, True])
async def test_in_place_keeps_the_kv_cache_of_the_old_weights(
    moe: Reference, trained: Reference, incremental: bool
) -> None:
    prompt, generation, cached = await across_an_update(moe, trained, "in_place", incremental)
    (first, _, cut), (second, _, end) = generation.version_spans
    assert (first, second, end) == ("default", "1", 40)
    assert cached == len(prompt) + cut - 1
    tokens, rows = generation.token_ids, experts(generation)
    assert np.abs(logprobs(generation)[:cut] - moe.logprobs(prompt, tokens, rows)[:cut]).max() < EXACT
    assert np.abs(logprobs(generation)[cut:] - trained.logprobs(prompt, tokens, rows)[cut:]).max() > 0.01


async def test_an_abort_ends_it_and_resumed_it_goes_on_with_the_new_weights(moe: Reference, trained: Reference) -> None:
    prompt = PROMPTS[0]
    with serve(moe, batch_invariant=True, token_rate=100) as engine:
        async with client(engine) as asking:
            call = asking.start(prompt, PARAMS)
            await call.wait_tokens(10)
            await asyncio.to_thread(pause, engine, "abort")
            first = await call
            assert await asyncio.to_thread(cached_tokens, engine) == 0
            await asyncio.to_thread(update, engine, trained)
            await asyncio.to_thread(resume, engine)
            longer = [*prompt, *first.token_ids.tolist()]
            second = await asking.generate(longer, PARAMS)
    assert first.finish_reason == "abort"
    assert [span[0] for span in (*first.version_spans, *second.version_spans)] == ["default", "1"]
    anew = moe.logprobs(prompt, first.token_ids, experts(first))
    assert np.abs(logprobs(first) - anew).max() < EXACT
    anew = trained.logprobs(longer, second.token_ids, experts(second))
    assert np.abs(logprobs(second) - anew).max() < EXACT


def test_a_paused_engine_computes_nothing_and_sends_nothing(moe: Reference) -> None:
    with (
        serve(moe, token_rate=100, incremental=True) as engine,
        opened(engine, input_ids=PROMPTS[0], params={"max_new_tokens": 400}) as stream,
    ):
        stream.frame()
        pause(engine, "in_place")
        before = engine.stats().tokens, cached_tokens(engine)
        # Each of these requests is a turn of the loop in which the batch could be stepped.
        assert all(load(engine) == (1, 0) for _ in range(30))
        assert (engine.stats().tokens, cached_tokens(engine)) == before
        resume(engine)
        frames = [stream.frame() for _ in range(before[0] + 5)]
        assert len(frames[-1]["output_ids"]) == 1


def test_a_flush_is_refused_while_requests_keep_their_cache(moe: Reference, trained: Reference) -> None:
    with serve(moe, token_rate=100) as engine, opened(engine, params={"max_new_tokens": 400}) as stream:
        stream.frame()
        pause(engine, "in_place")
        answer = post(engine, "update_weights_from_disk", {"model_path": str(trained.path), "weight_version": "1"})
        assert answer.status_code == 400
        assert "flush_cache=false" in answer.json()["message"]
        assert get(engine, "model_info").json()["weight_version"] == "default"
        resume(engine)
        assert_goes_on(stream)


def assert_goes_on(stream: OpenStream) -> None:
    before = len(stream.frame()["output_ids"])
    assert len(stream.frame()["output_ids"]) > before


async def test_an_aborted_request_frees_its_cache_at_once(moe: Reference) -> None:
    with serve(moe, token_rate=100) as engine:
        async with client(engine) as asking:
            calls = [asking.start(prompt, {**PARAMS, "max_new_tokens": 400}) for prompt in PROMPTS[:2]]
            await asyncio.gather(*(call.wait_tokens(20) for call in calls))
            both = await asyncio.to_thread(cached_tokens, engine)
            await calls[0].abort()
            one = await asyncio.to_thread(cached_tokens, engine)
            await calls[1].abort()
            none = await asyncio.to_thread(cached_tokens, engine)
    assert both > 40
    assert 20 < one < both
    assert none == 0


def test_a_client_that_leaves_frees_the_cache_too(moe: Reference) -> None:

    with serve(moe, token_rate=100) as engine:
        with opened(engine, params={"max_new_tokens": 400}) as stream:
            stream.frame()
            assert cached_tokens(engine) > 0
        until(lambda: cached_tokens(engine) == 0)
