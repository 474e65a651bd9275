"""The resume policy after a failed stream: what is resumed, restarted, raised, and kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import EngineError, Experts, Generation, StreamTruncated
from streamfold.client.limits import Retries
from streamfold.samples.merging import merge
from streamfold.samples.sample import Sample
from support.completing import SOON, answers, completed, sample_of, truncated
from support.replay import DONE, HANG, PROMPT, Request, chunk, head, stream, until
from support.speaking import SGLANG

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamfold.loopback import Loopback
    from streamfold.samples.options import Resume
    from support.replay import Step
    from support.speaking import Speech


@pytest.fixture
def engine(speech: Speech) -> Iterator[Loopback]:
    with speech.loopback(token_rate=400, prefill_delay=0.005, stop_probability=1 / 60) as running:
        yield running


# The policy.


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("resume", ["continue", "restart"])
async def test_a_stream_reset_after_k_events_gives_what_an_uninterrupted_one_gives(
    speech: Speech, resume: Resume, k: int
) -> None:
    """The tokens of a failed call must neither be doubled nor stay beside those of the next one."""
    ids = [10, 11, 12, 13, 14]

    def serve(request: Request) -> Sequence[Step]:
        kept = speech.ids(request)[3:]
        rest, n = ids[len(kept) :], len(speech.ids(request))
        if len(server.generates) == 1 and k:
            # SGLang may repeat all tokens in each event.
            events = [ids[0 if speech is SGLANG else i : i + 1] for i in range(k)]
            return truncated(*[speech.event(new, i + 1, prompt=n) for i, new in enumerate(events)])
        return stream(speech.part(rest, prompt=n, finish="stop"), DONE)

    async with speech.replay(serve) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of(), resume=resume)
    assert sample.tokens == [*PROMPT, *ids]
    assert sample.rollout_log_probs == [-token / 8 for token in ids]
    assert (sample.loss_mask, sample.response_length) == ([1] * 5, 5)
    assert sample.response == "".join(chr(97 + token % 26) for token in ids)
    if k:
        again = server.generates[1]
        assert speech.ids(again) == (PROMPT if resume == "restart" else [*PROMPT, *ids[:k]])
        assert speech.params(again)["max_new_tokens"] == (8 if resume == "restart" else 8 - k)
        assert sample.metadata["streamfold_resumed"] == 1
        assert sample.metadata.get("streamfold_restarted_tokens", 0) == (k if resume == "restart" else 0)


async def test_resume_raise_keeps_the_received_tokens_and_sends_no_other_request(speech: Speech) -> None:
    aborted = stream(speech.part([10, 11], finish="abort"), DONE)
    async with (
        speech.replay(answers(truncated(speech.part([10, 11])), aborted)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        for error in (StreamTruncated, EngineError):
            sample = sample_of()
            with pytest.raises(error) as raised:
                await completed(client, sample, resume="raise")
            assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11], Sample.Status.ABORTED)
            assert raised.value.partial is not None
            assert raised.value.partial.token_ids.tolist() == [10, 11]
    assert len(engine.generates) == 2


async def test_without_resume_aborts_an_abort_event_is_written_and_not_resumed(speech: Speech) -> None:
    async with (
        speech.replay(stream(speech.part([10, 11], finish="abort"), DONE)) as engine,
        speech.client(engine.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(), resume_aborts=False)
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11], Sample.Status.ABORTED)
    assert len(engine.generates) == 1


async def test_a_call_that_abort_all_ends_is_a_result_and_not_resumed(speech: Speech) -> None:
    running: list[Step] = [head(), chunk(speech.part([10])), HANG]
    async with speech.replay(running) as engine, speech.client(engine.url, retries=SOON) as client:
        task = asyncio.ensure_future(completed(client, sample_of()))
        await until(lambda: client.running and client.running[0].token_count)
        await client.abort_all()
        sample = await task
    assert (sample.tokens, sample.status) == ([*PROMPT, 10], Sample.Status.ABORTED)
    assert len(engine.generates) == 1


@pytest.mark.parametrize("when", ["before", "in the pause"])
async def test_no_request_leaves_while_the_host_is_aborting(speech: Speech, when: str) -> None:
    aborting = when == "before"
    async with (
        speech.replay(truncated(speech.part([10, 11]))) as engine,
        speech.client(engine.url, retries=Retries(first=30.0, longest=30.0)) as client,
    ):
        sample = sample_of()
        task = asyncio.ensure_future(completed(client, sample, aborted=lambda: aborting))
        if not aborting:
            await until(lambda: sample.response_length == 2)
            aborting = True
            # The backoff before the next request ends at once.
            await asyncio.wait_for(task, 20)
            assert sample.tokens == [*PROMPT, 10, 11]
        await task
        assert sample.status is Sample.Status.ABORTED
        assert len(engine.generates) == (0 if when == "before" else 1)


async def test_a_cancel_in_the_backoff_is_raised_and_no_request_is_sent_afterwards(speech: Speech) -> None:
    async with (
        speech.replay(truncated(speech.part([10, 11]))) as engine,
        speech.client(engine.url, retries=Retries(first=30.0, longest=30.0)) as client,
    ):
        sample = sample_of()
        task = asyncio.ensure_future(completed(client, sample))
        await until(lambda: sample.response_length == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)
        assert len(engine.generates) == 1
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11], Sample.Status.ABORTED)


# Text and side data of several calls.


@pytest.mark.parametrize("border", range(1, 4))
async def test_with_a_tokenizer_a_character_split_between_calls_is_whole(
    speech: Speech, engine: Loopback, border: int
) -> None:
    """The engine's texts of the two calls lack it: one part is held back, the other taken for a part of the prompt."""
    params: dict[str, Any] = {"max_new_tokens": 48, "ignore_eos": True}
    seed, at, expected = next(
        (seed, at, expected)
        for seed in range(1000)
        for expected in [speech.undisturbed(engine, PROMPT, {**params, "sampling_seed": seed})]
        for at, token in enumerate(expected.token_ids[:40])
        if token == 0xF0 and at > 2
    )
    params["sampling_seed"] = seed
    samples = []
    for tokenizer in (engine.tokenizer, None):
        async with speech.client(engine.url, tokenizer=tokenizer, retries=SOON) as client:
            sample = sample_of(**params)
            merge(sample, await client.generate(PROMPT, {**params, "max_new_tokens": at + border}))
            sample.status = Sample.Status.ABORTED
            samples.append(await completed(client, sample))
    decoded, joined = samples
    assert decoded.tokens == joined.tokens == [*PROMPT, *expected.token_ids]
    assert decoded.response == engine.tokenizer.decode(expected.token_ids)
    assert "streamfold_text_joined" not in decoded.metadata
    assert joined.response != decoded.response
    assert joined.metadata.get("streamfold_text_joined", False) is (speech.tokenizer is None), (
        "one engine sends no text at all"
    )


@pytest.mark.parametrize("kind", ["whole", "new"])
async def test_routed_experts_of_two_calls_become_one_array_from_whole_or_from_new_rows(
    speech: Speech, kind: str
) -> None:
    """verl-project/verl#6029: whole arrays were appended, and new rows replaced those before them."""
    shape = Experts(1, 1, 256, "uint8")

    def rows(first: int, count: int) -> np.ndarray[Any, Any]:
        return np.arange(first, first + count, dtype=np.uint8).reshape(count, 1, 1)

    start = 4 if kind == "new" else 0
    replies = [
        stream(speech.part([10, 11], finish="abort", experts=rows(0, 4)), DONE),
        stream(speech.part([12, 13, 14], prompt=5, finish="stop", experts=rows(start, 7 - start)), DONE),
    ]
    async with (
        speech.replay(answers(*replies)) as engine,
        speech.client(engine.url, experts=shape, retries=SOON) as client,
    ):
        sample = sample_of()
        await completed(client, sample, resume_aborts=False)
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.shape == (4, 1, 1)
        merge(sample, await client.generate(sample.tokens, {"max_new_tokens": 6}, experts_start=start))
    assert sample.rollout_routed_experts.ravel().tolist() == list(range(7))


async def test_routed_experts_that_are_neither_all_rows_nor_the_new_ones_are_refused_with_both_numbers() -> None:
    sample = sample_of()
    experts = np.zeros((3, 1, 1), np.int32)
    with pytest.raises(ValueError, match=r"shape \(3, 1, 1\), but 4 rows"):
        merge(sample, Generation([10, 11], [-1.0, -1.0], routed_experts=experts, finish_reason="stop"))
    assert sample.tokens == PROMPT


async def test_version_spans_cover_an_aborted_call_and_the_next_one(
    speech: Speech,
) -> None:
    first = stream(speech.part([10, 11], finish="abort", version="3"), DONE)
    second = stream(speech.part([12], prompt=5, finish="stop", version="4"), DONE)
    async with speech.replay(answers(first, second)) as engine, speech.client(engine.url, retries=SOON) as client:
        sample = await completed(client, sample_of())
    assert sample.version_spans == [("3", 0, 2), ("4", 2, 3)]
    assert sample.weight_versions == ["3", "4"]


@pytest.mark.parametrize("speech", [SGLANG], ids=repr)  # which sends them with each event
async def test_version_spans_cover_a_truncated_call_and_the_next_one(speech: Speech) -> None:
    first = truncated(speech.event([10], 1, version="3"), speech.event([10, 11], 2, version="4"))
    second = stream(speech.part([12, 13], prompt=5, finish="stop", version="4"), DONE)
    async with speech.replay(answers(first, second)) as engine, speech.client(engine.url, retries=SOON) as client:
        sample = await completed(client, sample_of())
    assert sample.version_spans == [("3", 0, 1), ("4", 1, 4)]
    assert sample.weight_versions == ["4"]


@pytest.mark.parametrize("then", ["raise", "cancel", "abort"])
@pytest.mark.parametrize("kept", [[], [20, 21]], ids=["first turn", "later turn"])
async def test_a_sample_to_be_restarted_keeps_its_tokens_until_the_next_request(
    speech: Speech, kept: list[int], then: str
) -> None:
    """The caller that catches the error has a partial sample, not a pending one without its tokens."""
    first = truncated(speech.part([10, 11], prompt=3 + len(kept)))
    last = stream(speech.part([12], prompt=3 + len(kept), finish="stop"), DONE)
    async with (
        speech.replay(answers(first, last)) as server,
        speech.client(server.url, retries=Retries(first=30.0, longest=30.0)) as client,
    ):
        sample = sample_of(stop=["lx"])
        if kept:
            sample.append_response_tokens(tokens=kept, log_probs=[-1.0, -1.0], text="uv")
        task = asyncio.ensure_future(completed(client, sample, resume="raise" if then == "raise" else "continue"))
        if then == "raise":
            with pytest.raises(StreamTruncated):
                await task
        else:
            await until(lambda: sample.response_length > len(kept))
            await asyncio.sleep(0)
            if then == "cancel":
                task.cancel()
            else:
                await client.abort_all()
            await asyncio.wait({task}, timeout=5)
            assert task.cancelled() == (then == "cancel")
        assert (sample.tokens, sample.status) == ([*PROMPT, *kept, 10, 11], Sample.Status.ABORTED)
        assert "streamfold_restarted_tokens" not in sample.metadata
        await completed(client, sample)
    assert (sample.tokens, sample.status) == ([*PROMPT, *kept, 12], Sample.Status.COMPLETED)
    assert sample.metadata["streamfold_restarted_tokens"] == 2


async def test_a_response_that_stopped_without_its_routed_experts_is_restarted_by_a_later_complete_too(
    speech: Speech,
) -> None:
    """If its text ended before the stop string already, the later call would not find it, and resume."""
    rows = np.ones((3 + 4 - 1, 3, 2), np.uint8)
    whole = stream(speech.part([0, 1, 2], finish="stop", matched="bc", experts=rows[:5]), DONE)
    async with (
        speech.replay(answers(truncated(speech.part([0, 1, 2, 3])), whole)) as server,  # abcd
        speech.client(server.url, experts=Experts(3, 2, 8, "uint8"), retries=SOON) as client,
    ):
        sample = sample_of(stop=["bc"])
        with pytest.raises(StreamTruncated):
            await completed(client, sample, resume="raise")
        assert (sample.response, sample.response_length) == ("abcd", 4)
        await completed(client, sample)
    assert [speech.ids(request) for request in server.generates] == [PROMPT, PROMPT]
    assert (sample.tokens, sample.status) == ([*PROMPT, 0, 1, 2], Sample.Status.COMPLETED)


async def test_a_sample_to_be_restarted_keeps_its_tokens_while_the_host_is_aborting(speech: Speech) -> None:
    """No request is sent then that would replace them."""
    async with speech.replay(answers(truncated(speech.part([10, 11])))) as server, speech.client(server.url) as client:
        sample = sample_of(stop=["lx"])
        with pytest.raises(StreamTruncated):
            await completed(client, sample, resume="raise")
        await completed(client, sample, aborted=lambda: True)
    assert len(server.generates) == 1
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11], Sample.Status.ABORTED)
    assert "streamfold_restarted_tokens" not in sample.metadata
