"""Streams that all break in the same way after a few tokens: sgl-project/sglang#14046, logprobs stuck at the first."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import DecodeError, Retries
from streamfold.client.limits import Timeouts
from streamfold.samples.sample import Sample
from support.completing import completed, sample_of, truncated
from support.replay import DONE, HANG, PROMPT, chunk, head, stream
from support.speaking import SGLANG, VLLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamfold.samples.options import Resume
    from support.replay import Request, Step
    from support.speaking import Speech

OFTEN = Retries(tries=60, first=0.001, longest=0.001)


def prompt_of(request: Request, speech: Speech) -> int:
    return len(speech.ids(request))


def broken(speech: Speech, request: Request, tokens: int = 1, bad: bytes = b"data: {damage\n\n") -> Sequence[Step]:
    """A reply that breaks after so many tokens."""
    n = prompt_of(request, speech)
    return stream(*[speech.event([10 + i], i + 1, prompt=n) for i in range(tokens)], bad)


def without_logprob(speech: Speech, request: Request, tokens: int) -> Sequence[Step]:
    """A reply whose next token has no logprob, so that the path of the error differs with the tokens before it."""
    ids = list(range(10, 10 + tokens))
    told = speech.event(ids, tokens, prompt=prompt_of(request, speech))
    frame = json.loads(told.removeprefix(b"data: "))
    if speech is SGLANG:
        frame["meta_info"]["output_token_logprobs"][-1][0] = None
    else:
        frame["choices"][0]["logprobs"]["content"][-1]["logprob"] = None
    first = speech.event([9], 1, prompt=prompt_of(request, speech))
    frame_total = tokens + 1
    if speech is SGLANG:
        frame["meta_info"]["completion_tokens"] = frame["meta_info"]["output_token_logprobs_length"] = frame_total
    else:
        frame.pop("usage", None)
    return stream(first, b"data: " + json.dumps(frame).encode() + b"\n\n")


@pytest.mark.parametrize("resume", ["continue", "restart"])
async def test_the_third_call_in_a_row_that_breaks_alike_after_a_few_tokens_is_the_last(
    speech: Speech, resume: Resume, caplog: pytest.LogCaptureFixture
) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=OFTEN) as client:
        server.routes[speech.path] = lambda request: broken(speech, request)
        sample = sample_of(max_new_tokens=240)
        with caplog.at_level(logging.WARNING), pytest.raises(DecodeError, match="3 calls in a row") as raised:
            await completed(client, sample, resume=resume)
    assert len(server.generates) == 3
    assert raised.value.kind == "json"
    kept = [10] * (3 if resume == "continue" else 1)
    assert sample.tokens == [*PROMPT, *kept], "nothing is lost that the policy keeps"
    assert sample.rollout_log_probs == [-10 / 8] * len(kept)
    assert sample.status is Sample.Status.ABORTED
    (warning,) = [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]
    assert warning.startswith("sample 0: 2 calls in a row")


async def test_damage_of_one_field_is_the_same_at_any_place_of_a_list(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=OFTEN) as client:
        server.routes[speech.path] = lambda request: without_logprob(speech, request, len(server.generates))
        with pytest.raises(DecodeError, match="3 calls in a row") as raised:
            await completed(client, sample_of(max_new_tokens=240))
    assert len(server.generates) == 3
    assert raised.value.kind == "logprob"


@pytest.mark.parametrize("between", ["tokens", "another fault", "a truncation"])
async def test_what_stands_between_such_calls_starts_the_count_anew(speech: Speech, between: str) -> None:
    def serve(request: Request) -> Sequence[Step]:
        n, count = prompt_of(request, speech), len(server.generates)
        if count == 7:
            return stream(speech.event([99], 1, "stop", prompt=n), DONE)
        if count % 3:
            return broken(speech, request)
        return {
            "tokens": broken(speech, request, tokens=16),
            "another fault": broken(speech, request, bad=b"data: \xff\n\n"),
            "a truncation": truncated(speech.event([10], 1, prompt=n)),
        }[between]

    async with speech.replay(serve) as server, speech.client(server.url, retries=OFTEN) as client:
        sample = await completed(client, sample_of(max_new_tokens=240))
    assert sample.status is Sample.Status.COMPLETED
    assert len(server.generates) == 7


async def test_truncations_and_timeouts_keep_their_retries(speech: Speech) -> None:
    def serve(request: Request) -> Sequence[Step]:
        event = speech.event([10], 1, prompt=prompt_of(request, speech))
        count = len(server.generates)
        if count == 9:
            return stream(speech.event([11], 1, "stop", prompt=prompt_of(request, speech)), DONE)
        return truncated(event) if count % 4 else [head(), chunk(event), HANG]

    timeouts = Timeouts(next_token=0.05)
    async with speech.replay(serve) as server, speech.client(server.url, retries=OFTEN, timeouts=timeouts) as client:
        sample = await completed(client, sample_of(max_new_tokens=240))
    assert sample.tokens == [*PROMPT, *[10] * 8, 11]


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=str)
async def test_an_engine_that_computes_no_logprob_at_a_place_is_asked_three_times(engine: Speech) -> None:
    keys: dict[str, Any] = {"null_logprobs_at": [2]}
    params: dict[str, Any] = {"custom_params": keys} if engine is SGLANG else {"extra_args": keys}
    version = {} if engine is SGLANG else {"version": "0.28.0"}
    with engine.loopback(**version) as box:
        async with engine.client(box.url, retries=OFTEN, tokenizer=box.tokenizer) as client:
            sample = sample_of(max_new_tokens=100, ignore_eos=True, **params)
            with pytest.raises(DecodeError, match="3 calls in a row"):
                await completed(client, sample)
            assert box.stats().requests == 3
    assert sample.response_length >= 3


async def test_a_recorded_stream_of_stuck_logprobs_is_asked_for_three_times() -> None:
    def stuck(request: Request) -> Sequence[Step]:
        first = SGLANG.event([11], 1, prompt=prompt_of(request, SGLANG))
        frame = json.loads(first.removeprefix(b"data: "))
        frame["output_ids"] = [11, 12, 13]
        frame["meta_info"]["completion_tokens"] = 3
        return stream(first, b"data: " + json.dumps(frame).encode() + b"\n\n", DONE)

    async with SGLANG.replay(stuck) as server, SGLANG.client(server.url, retries=OFTEN) as client:
        sample = sample_of(max_new_tokens=240)
        with pytest.raises(DecodeError, match=r"length.*3 calls in a row"):
            await completed(client, sample)
    assert (len(server.generates), sample.tokens) == (3, [*PROMPT, 11, 11, 11])
