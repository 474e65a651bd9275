"""Observations: what a tool answers is appended to a sample, and the next call generates another turn behind it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Client, CompletionOptions, append_observation, complete
from streamfold.loopback import Loopback
from streamfold.samples.sample import Sample
from support.completing import SOON, answers, completed, sample_of
from support.host.slime.utils.types import Sample as HostSample
from support.replay import DONE, PROMPT, stream

if TYPE_CHECKING:
    from support.speaking import Speech

Status = Sample.Status
TOOL = [8, 9]
BOTH = pytest.mark.parametrize("kind", [Sample, HostSample], ids=["ours", "the host's"])
FINISHED = pytest.mark.parametrize("status", ["COMPLETED", "TRUNCATED", "ABORTED", "PENDING"])


def generated(kind: Any = Sample, **fields: Any) -> Any:
    """A sample with a response of two tokens, not written by a call."""
    sample = kind(tokens=list(PROMPT))
    sample.append_response_tokens(None, tokens=[0, 1], log_probs=[-0.25, -0.5], text="ab", **fields)
    return sample


@BOTH
@FINISHED
def test_an_observation_is_not_trained_on_and_the_sample_waits_for_its_next_turn(kind: Any, status: str) -> None:
    top_p = {"top_p_token_ids": [0, 5, 1], "top_p_token_offsets": [0, 2, 3]}
    sample = generated(kind, meta_info=top_p)
    sample.status = kind.Status[status]
    assert append_observation(sample, np.array(TOOL, np.int64), "ij")
    assert (sample.tokens, sample.response, sample.response_length) == ([*PROMPT, 0, 1, *TOOL], "abij", 4)
    assert sample.loss_mask == [1, 1, 0, 0]
    assert sample.rollout_log_probs == [-0.25, -0.5, 0.0, 0.0]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 3, 3]
    assert sample.status is kind.Status.PENDING


def test_no_version_span_covers_an_observation() -> None:
    sample = generated(meta_info={"finish_reason": "stop", "version_spans": [("1", 0, 2)]})
    sample.append_observation(TOOL)
    sample.append_response_tokens(
        tokens=[3], log_probs=[-1.0], meta_info={"finish_reason": "stop", "version_spans": [("2", 0, 1)]}
    )
    assert sample.version_spans == [("1", 0, 2), ("2", 4, 5)]


@BOTH
@pytest.mark.parametrize(
    ("ids", "text", "words"),
    [
        ([-1], None, "found -1"),
        ([0.5], None, "integers"),
        ([2**31], None, "found 2147483648"),
        ([], "abc", "no token_ids"),
        ([], None, "no token_ids"),
    ],
)
def test_what_is_no_observation_is_refused_and_the_sample_is_unchanged(
    kind: Any, ids: list[Any], text: str | None, words: str
) -> None:
    sample = generated(kind)
    before = copy.deepcopy(vars(sample))
    with pytest.raises(ValueError, match=words):
        append_observation(sample, ids, text)
    assert vars(sample) == before


def test_a_host_that_refuses_an_observation_keeps_its_sample() -> None:
    class Refusing(HostSample):
        def append_response_tokens(self, *args: Any, **values: Any) -> None:
            super().append_response_tokens(*args, **values)
            raise KeyError("something")

    sample = Refusing(tokens=list(PROMPT))
    before = copy.deepcopy(vars(sample))
    with pytest.raises(KeyError):
        append_observation(sample, TOOL, "ij")
    assert vars(sample) == before


@FINISHED
@BOTH
async def test_what_stands_behind_the_last_call_is_a_new_turn_whatever_the_status(
    speech: Speech, kind: Any, status: str
) -> None:
    """COMPLETED, the sample was returned at once, its turn silently missing; ABORTED, it ended without that turn."""
    replies = answers(
        stream(speech.part([0, 1], prompt=3, finish="stop"), DONE),
        stream(speech.part([10, 11], prompt=7, finish="stop"), DONE),
    )
    async with speech.replay(replies) as server, speech.client(server.url, retries=SOON) as client:
        sample = kind(index=0, tokens=list(PROMPT))
        params = {"max_new_tokens": 12}
        options = CompletionOptions(tokenizer=speech.tokenizer)
        await complete(client, sample, params, options=options)
        sample.append_response_tokens(None, tokens=TOOL, trainable=False, text="ij")  # a host's own way
        sample.status = kind.Status[status]
        await complete(client, sample, params, options=options)
        assert [speech.ids(request) for request in server.generates] == [PROMPT, [*PROMPT, 0, 1, *TOOL]]
    assert sample.tokens == [*PROMPT, 0, 1, *TOOL, 10, 11]
    assert (sample.loss_mask, sample.status) == ([1, 1, 0, 0, 1, 1], kind.Status.COMPLETED)


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_a_finished_turn_behind_which_nothing_stands_stays_finished(speech: Speech, finish: str) -> None:
    """An abort between the turn and the tool sets it to ABORTED."""
    async with (
        speech.replay(stream(speech.part([0, 1], prompt=3, finish=finish), DONE)) as server,
        speech.client(server.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of())
        status, sample.status = sample.status, Status.ABORTED
        await completed(client, sample)
        assert (sample.status, len(server.generates)) == (status, 1)


async def test_a_response_that_was_truncated_goes_on_with_a_higher_limit(speech: Speech) -> None:
    replies = answers(
        stream(speech.part([0, 1], prompt=3, finish="length"), DONE),
        stream(speech.part([2], prompt=5, finish="stop"), DONE),
    )
    async with speech.replay(replies) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of(max_new_tokens=2))
        sample.status = Status.ABORTED
        sample.metadata["sampling_params"] = {"max_new_tokens": 9}
        await completed(client, sample)
    assert sample.tokens == [*PROMPT, 0, 1, 2]


async def test_a_turn_that_was_aborted_before_its_first_token_is_still_to_be_generated(speech: Speech) -> None:
    replies = answers(
        stream(speech.part([0, 1], prompt=3, finish="stop"), DONE),
        stream(speech.part([], prompt=7, finish="abort"), DONE),
        stream(speech.part([10], prompt=7, finish="stop"), DONE),
    )
    async with speech.replay(replies) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of())
        sample.append_observation(TOOL, "ij")
        await completed(client, sample, aborted=lambda: True)
        assert sample.status is Status.ABORTED or sample.status is Status.PENDING
        await completed(client, sample, resume_aborts=False)
        assert sample.status is Status.ABORTED
        await completed(client, sample)
    assert (sample.tokens, sample.status) == ([*PROMPT, 0, 1, *TOOL, 10], Status.COMPLETED)


@BOTH
async def test_tokens_that_the_length_of_the_response_does_not_count_are_refused(speech: Speech, kind: Any) -> None:
    """All log-probabilities behind them were shifted silently."""
    async with (
        speech.replay(stream(speech.part([0, 1], prompt=3, finish="stop"), DONE)) as server,
        speech.client(server.url, retries=SOON) as client,
    ):
        sample = kind(index=0, tokens=list(PROMPT))
        options = CompletionOptions(tokenizer=speech.tokenizer)
        await complete(client, sample, {"max_new_tokens": 8}, options=options)
        sample.tokens += TOOL
        with pytest.raises(ValueError, match=r"leaves 5 for the prompt, but the prompt had 3 .* append_observation"):
            await complete(client, sample, {"max_new_tokens": 8}, options=options)
        assert len(server.generates) == 1


async def test_tokens_added_to_the_response_of_a_text_prompt_without_ids_are_refused() -> None:
    """Nothing told them from the ids of a prompt."""
    with Loopback(incremental=True) as engine:
        async with Client(engine.url) as client:
            sample = Sample(prompt="tell me a story")
            await complete(client, sample, {"max_new_tokens": 4})
            assert len(sample.tokens) == sample.response_length
            sample.tokens += TOOL
            sample.status = Status.PENDING
            with pytest.raises(ValueError, match=r"leaves 2 for the prompt, but the prompt had 0"):
                await complete(client, sample, {"max_new_tokens": 8})
            assert client.running == []


async def test_an_observation_before_the_first_call_is_a_part_of_the_response(speech: Speech) -> None:
    async with (
        speech.replay(stream(speech.part([10], prompt=5, finish="stop"), DONE)) as server,
        speech.client(server.url, retries=SOON) as client,
    ):
        sample = sample_of()
        sample.append_observation(TOOL, "ij")
        assert sample.rollout_log_probs is None
        await completed(client, sample)
    assert (sample.loss_mask, sample.response) == ([0, 0, 1], "ijk")
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs[:2] == [0.0, 0.0]


@pytest.mark.parametrize("moment", ["before the call", "in the call"])
async def test_an_observation_before_the_first_call_is_no_generated_token_though_the_sample_was_aborted(
    speech: Speech, moment: str
) -> None:
    """It counted against the turn's limit, and what ended it was taken for the end of the turn."""
    replies = answers(
        *([stream(speech.part([], prompt=5, finish="abort"), DONE)] if moment == "in the call" else []),
        stream(speech.part([10, 11], prompt=5, finish="length"), DONE),
    )
    async with speech.replay(replies) as server, speech.client(server.url, retries=SOON) as client:
        sample = sample_of()
        sample.append_observation(TOOL, "ij")
        options = CompletionOptions(tokenizer=speech.tokenizer, stop_ids={TOOL[-1]}, resume_aborts=False)
        if moment == "in the call":
            await complete(client, sample, {"max_new_tokens": 9}, options=options, max_new_tokens_per_turn=2)
        sample.status = Status.ABORTED
        await complete(client, sample, {"max_new_tokens": 9}, options=options, max_new_tokens_per_turn=2)
        assert [speech.params(request)["max_new_tokens"] for request in server.generates][-1:] == [2]
    assert (sample.loss_mask, sample.status) == ([0, 0, 1, 1], Status.TRUNCATED)


async def test_tokens_added_behind_a_first_observation_are_refused(speech: Speech) -> None:
    async with speech.replay(speech.whole) as server, speech.client(server.url, retries=SOON) as client:
        sample = sample_of()
        sample.append_observation(TOOL, "ij")
        sample.tokens += TOOL
        with pytest.raises(ValueError, match="leaves 5 for the prompt"):
            await completed(client, sample)
        with pytest.raises(ValueError, match="leaves 5 for the prompt"):
            sample.append_observation(TOOL)
        assert server.generates == []


# Budgets.


async def test_each_turn_has_a_limit_and_the_response_has_another(speech: Speech) -> None:
    def reply(request: Any) -> Any:
        sent = speech.ids(request)
        return stream(
            speech.part([10] * speech.params(request)["max_new_tokens"], prompt=len(sent), finish="length"), DONE
        )

    async with speech.replay(reply) as server, speech.client(server.url, retries=SOON) as client:
        sample = sample_of()
        options = CompletionOptions(tokenizer=speech.tokenizer)
        while True:
            await complete(client, sample, {}, options=options, max_new_tokens_per_turn=3, max_response_len=9)
            assert sample.status is Status.TRUNCATED
            if not sample.append_observation(TOOL, "ij"):
                break
        assert [speech.params(request)["max_new_tokens"] for request in server.generates] == [3, 3]
    assert sample.loss_mask == [1, 1, 1, 0, 0, 1, 1, 1]
    assert sample.status is Status.TRUNCATED


async def test_a_response_longer_than_its_limit_is_truncated(speech: Speech) -> None:
    """It was a ValueError, which dropped the group."""
    async with speech.replay(speech.whole) as server, speech.client(server.url, retries=SOON) as client:
        sample = generated()
        sample.status = Status.ABORTED
        await complete(client, sample, {"max_new_tokens": 1})
        assert (sample.status, sample.tokens, server.generates) == (Status.TRUNCATED, [*PROMPT, 0, 1], [])


@pytest.mark.parametrize("limit", [3, 4])
async def test_a_sample_never_ends_with_an_observation(speech: Speech, limit: int) -> None:
    """Neither where it is appended nor, if the limit was not known there, where the next turn would begin."""
    whole = stream(speech.part([0, 1], prompt=3, finish="stop"), DONE)
    async with speech.replay(whole) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of(max_new_tokens=limit))
        written = copy.deepcopy(sample)
        assert not sample.append_observation(TOOL, "ij")
        sample.status, written.status = Status.PENDING, Status.PENDING
        written.append_response_tokens(tokens=TOOL, trainable=False, text="ij")
        await completed(client, written)
        assert len(server.generates) == 1
    assert (written.tokens, written.response, written.status) == ([*PROMPT, 0, 1], "ab", Status.TRUNCATED)
    assert sample.tokens == written.tokens


@pytest.mark.parametrize("aborted", [False, True], ids=["", "with an aborted call in between"])
async def test_where_the_second_observation_has_no_room_the_first_is_removed_too(
    speech: Speech, *, aborted: bool
) -> None:
    replies = answers(
        stream(speech.part([0, 1], prompt=3, finish="stop"), DONE),
        stream(speech.part([], prompt=7, finish="abort"), DONE),
    )
    async with speech.replay(replies) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of(max_new_tokens=6))
        assert sample.append_observation(TOOL, "ij")
        if aborted:
            await completed(client, sample, resume_aborts=False)
        assert not sample.append_observation(TOOL, "ij")
    assert (sample.tokens, sample.response, sample.status) == ([*PROMPT, 0, 1], "ab", Status.TRUNCATED)


async def test_an_observation_as_long_as_the_limit_before_the_first_call_is_removed(speech: Speech) -> None:
    async with speech.replay(speech.whole) as server, speech.client(server.url, retries=SOON) as client:
        sample = sample_of(max_new_tokens=2)
        sample.append_observation(TOOL, "ij")
        await completed(client, sample)
        assert (sample.tokens, sample.response, server.generates) == (PROMPT, "", [])
    assert sample.status is Status.TRUNCATED


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, "9"])
@pytest.mark.parametrize("name", ["max_new_tokens_per_turn", "max_response_len"])
async def test_a_budget_that_is_no_count_is_refused(speech: Speech, name: str, budget: Any) -> None:
    async with speech.replay(speech.whole) as server, speech.client(server.url) as client:
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1"):
            await complete(client, sample_of(), {"max_new_tokens": 4}, **{name: budget})
        assert server.generates == []
