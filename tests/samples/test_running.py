"""The state of a sample whose call runs: what an abort at this moment would leave, without disturbing anything."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Experts, Generation, Timeouts, append_observation
from streamfold.samples.running import running_tokens, snapshot_of
from streamfold.samples.sample import Sample
from streamfold.samples.staleness import call_version
from support.completing import ENDED, SOON, completed, differs, sample_of
from support.replay import HANG, PROMPT, chunk, event, head, until
from support.speaking import SGLANG

if TYPE_CHECKING:
    from streamfold import Client
    from support.replay import Request, Step
    from support.speaking import Speech

AT_ONCE = Timeouts(drain=0)
SHAPE = Experts(2, 1)


def state(sample: Sample) -> dict[str, Any]:
    """All that a sample is, but for the name of its session."""
    return {**vars(sample), "session_id": None}


async def looked_at_and_aborted(
    client: Client, sample: Sample, tokens: int, **options: Any
) -> tuple[Sample, Sample, Sample]:
    """The sample before a call, a snapshot when the call had so many tokens, and what an abort at once left."""
    before = copy.deepcopy(sample)
    task = asyncio.ensure_future(completed(client, sample, **options))
    await until(lambda: running_tokens(sample) == tokens)
    untouched = copy.deepcopy(state(sample))
    seen = snapshot_of(sample)
    assert state(sample) == untouched
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return before, seen, sample


@pytest.mark.parametrize("with_version", [False, True])
async def test_a_snapshot_is_what_an_abort_at_this_moment_leaves(speech: Speech, with_version: bool) -> None:
    def reply(request: Request) -> list[Step]:
        return [head(), chunk(speech.event([1, 2], 2, prompt=len(speech.ids(request)))), HANG]

    call_version.set((lambda: 7) if with_version else None)
    async with (
        speech.replay(reply) as server,
        speech.client(server.url, timeouts=AT_ONCE, retries=SOON) as client,
    ):
        sample = sample_of(max_new_tokens=20)
        before, seen, aborted = await looked_at_and_aborted(client, sample, 2)
        assert seen.tokens == [*before.tokens, 1, 2]
        assert seen.status == Sample.Status.ABORTED
        assert state(seen) == state(aborted)
        assert ("streamfold_call_versions" in seen.metadata) is with_version
        before, seen, aborted = await looked_at_and_aborted(client, aborted, 2)  # a resumed one
        assert seen.tokens == [*before.tokens, 1, 2] == [*PROMPT, 1, 2, 1, 2]
        assert state(seen) == state(aborted)
        aborted.status = Sample.Status.COMPLETED
        append_observation(aborted, [9, 9], "xx")  # a later turn
        before, seen, aborted = await looked_at_and_aborted(client, aborted, 2)
        assert seen.loss_mask == [1, 1, 1, 1, 0, 0, 1, 1]
        assert state(seen) == state(aborted)


async def test_side_data_that_has_not_come_is_missing_as_after_an_abort() -> None:
    running: list[Step] = [head(), chunk(event([1, 2], 2)), HANG]
    async with SGLANG.replay(running) as server:
        async with SGLANG.client(server.url, timeouts=AT_ONCE, experts=SHAPE) as client:
            _, seen, aborted = await looked_at_and_aborted(client, sample_of(max_new_tokens=20), 2)
            assert seen.tokens == [*PROMPT, 1, 2], "the next call brings their rows"
            assert seen.rollout_routed_experts is None
            assert state(seen) == state(aborted)
        async with SGLANG.client(server.url, timeouts=AT_ONCE) as client:
            params: dict[str, Any] = {"custom_params": {"return_top_p_token_ids": True}, "top_p": 0.9}
            sample = sample_of(max_new_tokens=20, **params)
            _, seen, aborted = await looked_at_and_aborted(client, sample, 2)
            assert state(seen) == state(aborted)
            assert seen.tokens == PROMPT, "without top-p ids they are of no use"
            assert seen.metadata["streamfold_lost_side_data"] == 2


async def test_before_the_first_token_nothing_but_the_status_differs(speech: Speech) -> None:
    async with speech.replay([head(), HANG]) as server, speech.client(server.url, timeouts=AT_ONCE) as client:
        before, seen, aborted = await looked_at_and_aborted(client, sample_of(), 0)
        assert (seen.tokens, seen.response_length) == (before.tokens, 0)
        assert state(seen) == state(aborted)


async def test_a_sample_that_was_looked_at_all_the_time_equals_one_undisturbed_generation(speech: Speech) -> None:
    told: list[Generation] = []
    with speech.loopback(token_rate=400) as engine:
        async with speech.client(engine.url, retries=SOON, tokenizer=speech.tokenizer_of(engine)) as client:
            sample = sample_of(max_new_tokens=48, sampling_seed=3)
            task = asyncio.ensure_future(completed(client, sample, on_generation=told.append))
            looks: list[Sample] = []
            while not task.done():
                looks.append(snapshot_of(sample))
                await asyncio.sleep(0.003)
            assert (await task).status in ENDED
            assert differs(speech, sample, engine) == {}
    lengths = [seen.response_length for seen in looks]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3
    for seen in looks:
        assert seen.tokens == sample.tokens[: len(seen.tokens)]
        assert (seen.rollout_log_probs or []) == (sample.rollout_log_probs or [])[: seen.response_length]
        seen.check()
    assert len(told) == 1, "on_generation hears of calls, not of looks"


async def test_a_look_that_another_process_resumes_from_ends_as_one_undisturbed_generation(speech: Speech) -> None:
    with speech.loopback(token_rate=400) as engine:
        async with speech.client(engine.url, retries=SOON, tokenizer=speech.tokenizer_of(engine)) as client:
            sample = sample_of(max_new_tokens=48, sampling_seed=5)
            task = asyncio.ensure_future(completed(client, sample))
            await until(lambda: running_tokens(sample) > 5)
            seen = copy.deepcopy(snapshot_of(sample))
            task.cancel()
            await asyncio.wait({task})
            kept = seen.response_length
            assert differs(speech, await completed(client, seen), engine) == {}
            assert kept > 5


async def test_a_prompt_that_the_engine_counts_otherwise_is_dropped_in_the_copy_as_after_an_abort() -> None:
    def reply(request: Request) -> list[Step]:
        counted = 7 if len(SGLANG.ids(request)) == len(PROMPT) else 10  # 9 would be right
        return [head(), chunk(event([1, 2], 2, prompt_tokens=counted)), HANG]

    async with SGLANG.replay(reply) as server, SGLANG.client(server.url, timeouts=AT_ONCE) as client:
        sample = sample_of(max_new_tokens=20)
        sample.multimodal_inputs = {"images": ["http://there/a.png"]}
        _, seen, aborted = await looked_at_and_aborted(client, sample, 2)
        assert seen.metadata["streamfold_prompt_tokens"] == 7
        assert state(seen) == state(aborted)
        _, seen, aborted = await looked_at_and_aborted(client, sample, 2)
        assert seen.tokens == [*PROMPT, 1, 2]
        assert seen.metadata["streamfold_restarted_tokens"] == 2
        assert state(seen) == state(aborted)


async def test_what_runs_for_no_sample_is_seen_in_none(speech: Speech) -> None:
    async with speech.replay(speech.running) as server, speech.client(server.url, timeouts=AT_ONCE) as client:
        sample = sample_of()
        call = client.start(sample.tokens, {"max_new_tokens": 8})
        await call.wait_tokens(2)
        assert running_tokens(sample) == 0
        assert state(snapshot_of(sample)) == state(sample)
        await call.abort()


async def test_nothing_is_kept_of_samples_that_have_ended(speech: Speech) -> None:
    async with speech.replay(speech.whole) as server, speech.client(server.url, timeouts=AT_ONCE) as client:
        sample = await completed(client, sample_of())
        assert sample.status in ENDED
        assert running_tokens(sample) == 0
        assert state(snapshot_of(sample)) == state(sample)
