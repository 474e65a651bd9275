"""Samples completed over real HTTP: truncated, refused, resumed, and always what one uninterrupted call gives."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from streamfold import DecodeError, EngineError, Experts, Generation, StreamTruncated
from streamfold.client.limits import Retries
from streamfold.samples.completion import complete
from streamfold.samples.sample import Sample
from support import bodies_vllm
from support.completing import ENDED, SOON, answers, completed, differs, sample_of, truncated
from support.replay import DONE, HANG, PROMPT, Request, answer_json, chunk, event, head, stream, until
from support.speaking import SGLANG, VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamfold.loopback import Loopback
    from support.replay import Step
    from support.speaking import Speech

# For what vLLM's token endpoint does not have: prompts as text, no max_new_tokens, top-p ids in the terminal event.
sglang_alone = pytest.mark.parametrize("speech", [SGLANG], ids=repr)


@pytest.fixture
def engine(speech: Speech) -> Iterator[Loopback]:
    with speech.loopback(token_rate=400, prefill_delay=0.005, stop_probability=1 / 60) as running:
        yield running


# One sample.


async def test_a_completed_sample_equals_one_uninterrupted_generation(speech: Speech, engine: Loopback) -> None:
    async with speech.client(engine.url, retries=SOON, tokenizer=speech.tokenizer_of(engine)) as client:
        for seed in range(4):
            sample = await completed(client, sample_of(max_new_tokens=64, sampling_seed=seed))
            assert differs(speech, sample, engine) == {}


async def test_a_sample_that_is_cancelled_repeatedly_equals_one_uninterrupted_generation(
    speech: Speech, engine: Loopback
) -> None:
    chance = random.Random(7)
    cancelled = 0
    async with speech.client(engine.url, retries=SOON, tokenizer=speech.tokenizer_of(engine)) as client:
        for seed in range(8):
            sample = sample_of(max_new_tokens=48, sampling_seed=seed)
            while sample.status not in ENDED:
                before = sample.response_length
                task = asyncio.ensure_future(completed(client, sample, stop_ids={engine.tokenizer.eos_token_id}))
                await asyncio.wait({task}, timeout=chance.uniform(0, 0.08))
                task.cancel()
                cancelled += (await asyncio.gather(task, return_exceptions=True))[0] is not sample
                assert sample.response_length >= before
            assert differs(speech, sample, engine) == {}
        assert await client.load() == 0
    assert cancelled > 8


async def test_a_truncated_stream_is_resumed_from_its_tokens_with_the_remaining_budget(speech: Speech) -> None:
    second = stream(speech.part([12, 13], prompt=5, finish="stop"), DONE)
    async with (
        speech.replay(answers(truncated(speech.part([10, 11])), second)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(min_new_tokens=3))
    first, then = engine.generates
    assert (speech.ids(first), speech.ids(then)) == (PROMPT, [*PROMPT, 10, 11])
    assert speech.params(then) == {"max_new_tokens": 6, "min_new_tokens": 1}
    assert first.rid != then.rid
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11, 12, 13], Sample.Status.COMPLETED)
    assert sample.rollout_log_probs == [-10 / 8, -11 / 8, -12 / 8, -13 / 8]
    assert ("streamfold_text_joined" in sample.metadata) == (speech.tokenizer is None)


async def test_a_response_aborted_after_three_quarters_of_its_budget_gets_the_last_quarter(speech: Speech) -> None:
    """areal-project/AReaL#858: tokens so far were compared with a budget lowered each round; the loop ended early."""
    first, last = list(range(10, 22)), list(range(30, 34))
    async with speech.replay() as server, speech.client(server.url, retries=SOON) as client:
        server.routes[speech.path] = answers(
            stream(speech.part(first, finish="abort"), DONE),
            stream(speech.part(last, prompt=3 + len(first), finish="length"), DONE),
        )
        sample = await completed(client, sample_of(max_new_tokens=16))
        assert (sample.status, sample.tokens) == (Sample.Status.TRUNCATED, [*PROMPT, *first, *last])
        budgets = [speech.params(request)["max_new_tokens"] for request in server.generates]
        assert budgets == [16, 4]


async def test_an_abort_by_the_engine_is_resumed(speech: Speech) -> None:
    aborted = stream(speech.part([10], finish="abort"), DONE)
    queued = stream(speech.part([], prompt=4, finish="abort"), DONE)
    last = stream(speech.part([11], prompt=4, finish="length"), DONE)
    async with (
        speech.replay(answers(aborted, queued, last)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of())
    assert len(engine.generates) == 3
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11], Sample.Status.TRUNCATED)


@pytest.mark.parametrize("known", ["stop_token_ids", "stop_ids", "seen"])
async def test_a_response_aborted_behind_a_stop_token_is_completed(speech: Speech, known: str) -> None:
    seen = stream(speech.part([8, 9], finish="stop", matched=9), DONE)
    aborted = stream(speech.part([10, 9], finish="abort"), DONE)
    async with (
        speech.replay(answers(*[seen] * (known == "seen"), aborted)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        ends = {9} if known == "stop_ids" else set()
        if known == "seen":
            await completed(client, sample_of(), stop_ids=ends)
        params = {"stop_token_ids": [9]} if known == "stop_token_ids" else {}
        sample = await completed(client, sample_of(**params), stop_ids=ends)
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 9], Sample.Status.COMPLETED)


async def test_with_ignore_eos_a_stop_token_does_not_complete_a_response(speech: Speech) -> None:
    last = stream(speech.part([11], prompt=5, finish="length"), DONE)
    async with (
        speech.replay(answers(truncated(speech.part([10, 9])), last)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(ignore_eos=True), stop_ids={9})
    assert sample.tokens == [*PROMPT, 10, 9, 11]


async def test_a_response_aborted_behind_a_stop_string_is_completed_and_its_text_ends_there(speech: Speech) -> None:
    aborted = stream(speech.part([0, 1, 2, 3], finish="abort"), DONE)  # abcd
    async with speech.replay(aborted) as engine, speech.client(engine.url, retries=SOON) as client:
        trimmed = await completed(client, sample_of(stop="bc"))
        whole = await completed(client, sample_of(stop=["x", "bc"], no_stop_trim=True))
    assert len(engine.generates) == 2
    assert (trimmed.response, trimmed.status) == ("a", Sample.Status.COMPLETED)
    assert (whole.response, whole.response_length) == ("abc", 4)


async def test_a_response_aborted_within_a_stop_string_is_restarted(speech: Speech) -> None:
    # Resumed, the engine would see only its second half, and not stop.
    aborted = stream(speech.part([0, 1], prompt=4, finish="abort"), DONE)
    whole = stream(speech.part([20, 0, 1], finish="stop", matched="bc"), DONE)
    async with (
        speech.replay(answers(truncated(speech.part([20])), aborted, whole)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(stop=["bc"]))
    assert [speech.ids(request) for request in engine.generates] == [PROMPT, [*PROMPT, 20], PROMPT]
    assert (sample.tokens, sample.rollout_log_probs) == ([*PROMPT, 20, 0, 1], [-20 / 8, 0.0, -1 / 8])
    assert sample.metadata["streamfold_restarted_tokens"] == 3
    assert "streamfold_text_joined" not in sample.metadata  # the text is of one call


@sglang_alone
async def test_a_truncated_sample_whose_prompt_is_text_is_restarted(speech: Speech) -> None:
    whole = stream(speech.part([20, 21], finish="stop"), DONE)
    async with (
        speech.replay(answers(truncated(speech.part([10])), whole)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        sample = Sample(prompt="\u2028Hi", metadata={"sampling_params": {"max_new_tokens": 8}})
        await completed(client, sample)
    assert [request.json.get("input_ids") for request in engine.generates] == [None, None]
    assert [request.json["text"] for request in engine.generates] == ["\u2028Hi"] * 2
    assert engine.generates[1].json["sampling_params"]["max_new_tokens"] == 8
    assert (sample.tokens, sample.response_length, sample.metadata["streamfold_restarted_tokens"]) == ([20, 21], 2, 1)
    assert "streamfold_text_joined" not in sample.metadata


async def test_what_the_engine_refuses_is_not_retried(speech: Speech) -> None:
    async with (
        speech.replay(answer_json({"error": "too long"}, status=400)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        with pytest.raises(EngineError, match="too long"):
            await completed(client, sample_of())
    assert len(engine.generates) == 1


async def test_a_busy_engine_is_retried_a_limited_number_of_times(speech: Speech) -> None:
    busy = answer_json({"error": "busy"}, status=503)
    whole = stream(speech.part([10], finish="stop"), DONE)
    async with speech.replay(answers(busy, busy, whole)) as engine, speech.client(engine.url, retries=SOON) as client:
        sample = await completed(client, sample_of())
        assert sample.status is Sample.Status.COMPLETED
        engine.routes[speech.path] = busy
        refused = sample_of()
        with pytest.raises(EngineError, match="busy"):
            await completed(client, refused)
    assert len(engine.generates) == 3 + (SOON.tries or 0)


async def test_an_engine_that_keeps_aborting_is_an_error_and_the_tokens_are_kept(speech: Speech) -> None:
    def aborted(request: Request) -> list[Step]:
        known = len(speech.ids(request))
        return stream(speech.part([known], prompt=known, finish="abort"), DONE)

    async with speech.replay(aborted) as engine, speech.client(engine.url, retries=SOON) as client:
        sample = sample_of()
        with pytest.raises(EngineError, match="aborted") as caught:
            await completed(client, sample)
    assert caught.value.retryable
    assert (sample.tokens, sample.status) == ([*PROMPT, 3, 4, 5, 6], Sample.Status.ABORTED)


async def test_a_damaged_stream_is_resumed_after_good_tokens_and_an_error_before_any(speech: Speech) -> None:
    damage = b"data: {]\n\n"
    whole = stream(speech.part([11], prompt=4, finish="stop"), DONE)
    async with (
        speech.replay(answers(stream(speech.part([10]), damage), whole, stream(damage))) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        assert (await completed(client, sample_of())).tokens == [*PROMPT, 10, 11]
        with pytest.raises(DecodeError):
            await completed(client, sample_of())
    assert len(engine.generates) == 3


async def test_a_response_that_lacks_tokens_of_its_final_count_is_dropped_and_requested_again() -> None:
    """sgl-project/sglang#19977: only the usage, at the end, shows that an event was lost."""

    def lossy(prompt: int) -> list[Step]:
        """Only one of two tokens is received."""
        ending = bodies_vllm.event([12], "stop")
        return stream(ending, bodies_vllm.usage_event(2, prompt_tokens=prompt), DONE)

    whole = stream(VLLM.part([11, 12], prompt=4, finish="stop"), DONE)
    async with (
        VLLM.replay(answers(truncated(VLLM.part([10])), lossy(4), whole)) as engine,
        VLLM.client(engine.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of())
        assert [VLLM.ids(request) for request in engine.generates] == [PROMPT, [*PROMPT, 10], [*PROMPT, 10]]
        assert engine.aborts == [engine.generates[0].rid], "the others had ended"
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11, 12], Sample.Status.COMPLETED)
    assert sample.metadata["streamfold_restarted_tokens"] == 1

    async with VLLM.replay(lossy(3)) as engine, VLLM.client(engine.url, retries=Retries(tries=1)) as client:
        sample = sample_of()
        with pytest.raises(DecodeError) as caught:
            await completed(client, sample)
    assert caught.value.kind == "length"
    assert (sample.tokens, sample.status) == (PROMPT, Sample.Status.ABORTED)


async def test_the_last_failure_is_raised_and_its_tokens_are_kept(speech: Speech) -> None:
    async with (
        speech.replay(answers(truncated(speech.part([10])))) as engine,
        speech.client(engine.url, retries=Retries(tries=1)) as client,
    ):
        sample = sample_of()
        with pytest.raises(StreamTruncated):
            await completed(client, sample)
    assert (sample.tokens, sample.response, sample.status) == ([*PROMPT, 10], "k", Sample.Status.ABORTED)


async def test_a_budget_of_zero_or_a_used_up_one_truncates_without_a_request(speech: Speech) -> None:
    async with (
        speech.replay(answers(truncated(speech.part([10, 11])))) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        nothing = await completed(client, sample_of(max_new_tokens=0))
        assert len(engine.generates) == 0
        full = await completed(client, sample_of(max_new_tokens=2))
        assert len(engine.generates) == 1
    assert (nothing.status, nothing.tokens) == (Sample.Status.TRUNCATED, PROMPT)
    assert (full.status, full.tokens) == (Sample.Status.TRUNCATED, [*PROMPT, 10, 11])


@pytest.mark.parametrize("logprobs", [None, [-0.5, -0.5]])
async def test_a_full_response_that_lacks_side_data_is_truncated_all_the_same(
    speech: Speech, logprobs: list[float] | None
) -> None:
    """No request follows, so that nothing can be missing beside its tokens."""
    sample = sample_of(max_new_tokens=2, custom_params={"return_top_p_token_ids": True})
    sample.tokens, sample.response, sample.response_length = [*PROMPT, 10, 11], "kl", 2
    sample.loss_mask, sample.rollout_log_probs, sample.status = [1, 1], logprobs, Sample.Status.ABORTED
    async with speech.replay() as engine, speech.client(engine.url, retries=SOON) as client:
        await completed(client, sample)
        assert engine.requests == []
    assert (sample.status, sample.tokens, sample.rollout_log_probs) == (
        Sample.Status.TRUNCATED,
        [*PROMPT, 10, 11],
        logprobs,
    )


@sglang_alone
async def test_tokens_whose_top_p_ids_were_lost_are_dropped_and_counted(speech: Speech) -> None:
    whole = stream(event([10, 11], 2, "stop", top_p_token_ids=[10, 11, 12], top_p_token_offsets=[0, 1, 3]), DONE)
    async with (
        speech.replay(answers(truncated(speech.part([10])), whole)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(top_p=0.9, custom_params={"return_top_p_token_ids": True}))
    assert engine.generates[1].json["input_ids"] == PROMPT
    assert sample.tokens == [*PROMPT, 10, 11]
    assert sample.rollout_top_p_token_offsets is not None
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 1, 3]
    assert sample.metadata["streamfold_lost_side_data"] == 1


async def test_a_response_that_finishes_without_the_requested_routed_experts_is_an_error_and_dropped(
    speech: Speech,
) -> None:
    rows = np.ones((3 + 2 - 1, 3, 2), np.uint8)
    shape = Experts(3, 2, 8, "uint8")
    bare = stream(speech.part([10, 11], finish="stop"), DONE)
    whole = stream(speech.part([10, 11], finish="stop", experts=rows), DONE)
    async with (
        speech.replay(answers(truncated(speech.part([10, 11])), bare, bare, whole)) as engine,
        speech.client(engine.url, experts=shape, retries=SOON) as client,
    ):
        full, sample = sample_of(max_new_tokens=2), sample_of()
        with pytest.raises(EngineError, match="no routed experts"):
            await completed(client, full)  # its budget is used up, by a truncated call
        with pytest.raises(EngineError, match="no routed experts"):
            await completed(client, sample)
        assert (full.tokens, sample.tokens, sample.status) == (PROMPT, PROMPT, Sample.Status.ABORTED)
        assert sample.metadata["streamfold_lost_side_data"] == 2
        await completed(client, sample)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.shape == (4, 3, 2)


async def test_a_cancel_is_raised_even_if_the_received_tokens_do_not_fit_the_sample(
    speech: Speech,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sample = sample_of([*PROMPT, 9])
    sample.response_length, sample.status = 1, Sample.Status.ABORTED
    sample.rollout_log_probs = [-1.0]
    running: list[Step] = [head(), chunk(speech.part([10], prompt=4)), HANG]
    async with speech.replay(running) as engine, speech.client(engine.url, retries=SOON) as client:
        task = asyncio.ensure_future(completed(client, sample))
        await until(lambda: client.running and client.running[0].token_count)
        sample.rollout_log_probs = []  # another task writes to it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (sample.tokens, sample.status) == ([*PROMPT, 9], Sample.Status.ABORTED)
    assert "could not be merged" in caplog.text


async def test_routed_experts_that_were_not_requested_are_left_out() -> None:
    """In vLLM they are a server flag, not a part of a request."""
    with VLLM.loopback(return_routed_experts=True) as engine:
        async with VLLM.client(engine.url, tokenizer=engine.tokenizer) as client:
            received: list[Generation] = []
            sample = await completed(client, sample_of(max_new_tokens=20), on_generation=received.append)
            assert received[0].routed_experts is not None
            assert differs(VLLM, sample, engine) == {}
    assert sample.rollout_routed_experts is None


@sglang_alone
async def test_without_max_new_tokens_nothing_is_resumed(speech: Speech) -> None:
    whole = stream(speech.part([10], finish="stop"), DONE)
    async with (
        speech.replay(answers(whole, truncated(speech.part([10])))) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        assert (await complete(client, sample_of(), {})).status is Sample.Status.COMPLETED
        with pytest.raises(StreamTruncated):
            await complete(client, sample_of(), {})
        with pytest.raises(ValueError, match="max_new_tokens"):
            await completed(client, sample_of(max_new_tokens=-1))
    assert len(engine.generates) == 2
