"""A sample of several turns: a tool's answer follows what was generated, and the sample is PENDING again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold.loopback import Loopback
from streamfold.samples.reset import restart, rewind
from streamfold.samples.sample import Sample
from support.completing import SOON, answers, completed, sample_of, truncated
from support.replay import DONE, PROMPT, stream
from support.speaking import SGLANG, VLLM

if TYPE_CHECKING:
    from support.speaking import Speech

Status = Sample.Status
TOOL = [8, 9]  # ij
SPANS: list[tuple[str | None, int, int]] = [("1", 0, 1), ("2", 1, 3), ("3", 3, 4)]
sglang_alone = pytest.mark.parametrize("speech", [SGLANG], ids=repr)  # prompts as text


def after_a_turn(**params: Any) -> Sample:
    """Its first turn ended at b, which may be a stop string; the tool's answer ends in what may be a stop token."""
    sample = sample_of(**{"max_new_tokens": 12, **params})
    one = {"finish_reason": {"type": "stop"}}
    sample.append_response_tokens(tokens=[0, 1], log_probs=[0.0, -1 / 8], meta_info=one, text="ab")
    sample.append_response_tokens(tokens=TOOL, trainable=False, text="ij")
    sample.status = Status.PENDING
    return sample


ENDS = [{"stop": ["b"]}, {"stop": "b", "no_stop_trim": True}, {"stop": ["jx"]}, {"stop_token_ids": [9]}]


@pytest.mark.parametrize("params", ENDS, ids=["trimmed", "kept", "partial", "token"])
async def test_what_stopped_an_earlier_turn_does_not_stop_the_next_one(speech: Speech, params: dict[str, Any]) -> None:
    """vllm-project/vllm#47616, sgl-project/sglang#33151: the text ended at the first occurrence, not the match."""
    whole = stream(speech.part([10, 11], prompt=7, finish="stop"), DONE)
    async with speech.replay(whole) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, after_a_turn(**params), stop_ids={9})
        assert [speech.ids(request) for request in server.generates] == [[*PROMPT, 0, 1, *TOOL]]
    assert (sample.tokens, sample.response) == ([*PROMPT, 0, 1, *TOOL, 10, 11], "abijkl")
    assert (sample.loss_mask, sample.status) == ([1, 1, 0, 0, 1, 1], Status.COMPLETED)


@pytest.mark.parametrize(
    ("params", "shown"),
    [({"stop": ["b"]}, [""]), ({"stop": "b", "no_stop_trim": True}, ["b"]), ({"stop_token_ids": [9]}, ["bmj", "bm"])],
    ids=["trimmed", "kept", "token"],
)
@pytest.mark.parametrize("received", [[], [10]], ids=["before a token", "after one"])
async def test_a_later_turn_that_was_aborted_is_resumed_to_its_own_stop(
    speech: Speech, received: list[int], params: dict[str, Any], shown: list[str]
) -> None:
    kept = [*PROMPT, 0, 1, *TOOL, *received]
    replies = answers(
        stream(speech.part(received, prompt=7, finish="abort"), DONE),
        stream(speech.part([1, 12, 9], prompt=len(kept), finish="abort"), DONE),
    )
    async with speech.replay(replies) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, after_a_turn(**params), resume_aborts=False)
        assert (sample.status, sample.tokens) == (Status.ABORTED, kept)
        await completed(client, sample)
        assert [speech.ids(request) for request in server.generates] == [kept[:7], kept]
    assert (sample.tokens, sample.status) == ([*kept, 1, 12, 9], Status.COMPLETED)
    assert sample.response.removeprefix("abij" + "k" * len(received)) in shown


async def test_a_later_turn_has_the_remaining_budget(speech: Speech) -> None:
    whole = stream(speech.part([10], prompt=7, finish="length"), DONE)
    async with speech.replay(whole) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, after_a_turn(max_new_tokens=5, stop=["b"]))
        assert [speech.params(request)["max_new_tokens"] for request in server.generates] == [1]
        assert (sample.status, sample.response) == (Status.TRUNCATED, "abijk")
        full = await completed(client, after_a_turn(max_new_tokens=4, stop=["b"]))
        assert len(server.generates) == 1
    assert (full.status, full.response) == (Status.TRUNCATED, "abij")


async def test_a_restarted_sample_has_no_earlier_turn(speech: Speech) -> None:
    aborted = stream(speech.part([10, 1, 11], finish="abort"), DONE)
    async with speech.replay(aborted) as server, speech.client(server.url, retries=SOON) as client:
        sample = after_a_turn(stop=["b"])
        sample.metadata["streamfold_turn"] = [4, 4]
        restart(sample)
        await completed(client, sample)
    assert (sample.response, sample.status) == ("k", Status.COMPLETED)


@pytest.mark.parametrize("because_of", ["a stop string", "a grammar"])
async def test_a_later_turn_that_cannot_be_resumed_is_restarted_where_it_started(
    speech: Speech, because_of: str
) -> None:
    """Restarted from the prompt, it would silently lose the tool's answer."""
    grammar: dict[str, Any] = {"structured_outputs": {"json": "{}"}} if speech is VLLM else {"json_schema": "{}"}
    params = {"stop": ["kx"]} if because_of == "a stop string" else grammar
    replies = answers(
        stream(speech.part([10], prompt=7, finish="abort"), DONE),
        stream(speech.part([11, 12], prompt=7, finish="stop"), DONE),
    )
    async with speech.replay(replies) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, after_a_turn(**params), resume_aborts=False)
        assert (sample.status, sample.response) == (Status.ABORTED, "abijk")
        await completed(client, sample)
        assert [speech.ids(request) for request in server.generates] == [[*PROMPT, 0, 1, *TOOL]] * 2
    assert (sample.tokens, sample.status) == ([*PROMPT, 0, 1, *TOOL, 11, 12], Status.COMPLETED)
    assert sample.response == "abijlm"
    assert (sample.loss_mask, len(sample.rollout_log_probs or [])) == ([1, 1, 0, 0, 1, 1], 6)
    assert sample.metadata["streamfold_restarted_tokens"] == 1


async def test_a_turn_behind_one_that_was_aborted_twice_is_decoded_by_itself(speech: Speech) -> None:
    """The text of the turn before stays concatenated, which its metadata says."""
    smile = list("🙂".encode())
    turns = [([ord("a")], 3), ([ord("b")], 4), ([ord("c"), *smile[:2]], 7), (smile[2:], 10)]
    aborted = [stream(speech.part(ids, prompt=prompt, finish="abort"), DONE) for ids, prompt in turns]
    replies = answers(*aborted, stream(speech.part([], prompt=12, finish="stop"), DONE))
    with Loopback() as engine:
        tokenizer = engine.tokenizer
    async with (
        speech.replay(replies) as server,
        speech.client(server.url, tokenizer=tokenizer, retries=SOON) as client,
    ):
        sample = sample_of(max_new_tokens=20)
        for _ in range(2):
            await completed(client, sample, resume_aborts=False)
        sample.append_response_tokens(tokens=list(b"ij"), trainable=False, text="ij")
        sample.response, sample.status = "abij", Status.PENDING
        for _ in range(2):
            await completed(client, sample, resume_aborts=False)
        sample.response = "abijc"  # the engine has held an incomplete character back
        await completed(client, sample)
    assert (sample.response, sample.status) == ("abijc🙂", Status.COMPLETED)
    assert sample.metadata["streamfold_text_joined"] is True
    assert "streamfold_known_text" not in sample.metadata


@sglang_alone
async def test_behind_a_prompt_without_ids_no_other_turn_starts(speech: Speech) -> None:
    """It restarted from its prompt, silently without the first turn and the tool's answer."""
    async with speech.replay(speech.whole) as server, speech.client(server.url, retries=SOON) as client:
        sample = after_a_turn()
        sample.tokens = sample.tokens[len(PROMPT) :]
        with pytest.raises(ValueError, match="needs the ids of the prompt"):
            await completed(client, sample)
        assert server.generates == []
    assert (sample.tokens, sample.response, sample.status) == ([0, 1, *TOOL], "abij", Status.PENDING)


@sglang_alone
async def test_a_turn_whose_whole_context_is_sent_as_text_is_restarted_where_it_started(speech: Speech) -> None:
    replies = answers(
        truncated(speech.part([10], prompt=7)), stream(speech.part([11, 12], prompt=7, finish="stop"), DONE)
    )
    async with speech.replay(replies) as server, speech.client(server.url, retries=SOON) as client:
        sample = after_a_turn()
        sample.tokens = sample.tokens[len(PROMPT) :]
        await completed(client, sample, extra={"text": "xyzabij"})
        assert [request.json["text"] for request in server.generates] == ["xyzabij"] * 2
    assert (sample.tokens, sample.response, sample.status) == ([0, 1, *TOOL, 11, 12], "abijlm", Status.COMPLETED)


def test_a_rewound_sample_keeps_everything_beside_its_first_tokens() -> None:
    def sample_with(tokens: int) -> Sample:
        return Sample(
            tokens=list(range(3 + tokens)),
            response="abcd"[:tokens],
            response_length=tokens,
            loss_mask=[1, 0, 1, 1][:tokens],
            rollout_log_probs=[-0.5, 0.0, -0.25, -0.75][:tokens],
            rollout_top_p_token_ids=np.arange([0, 2, 2, 5, 6][tokens], dtype=np.int32),
            rollout_top_p_token_offsets=np.array([0, 2, 2, 5, 6][: tokens + 1], np.int32),
            rollout_routed_experts=np.arange(12 * 6, dtype=np.int32).reshape(6, 3, 4)[: tokens + 2],
            version_spans=[(version, start, min(end, tokens)) for version, start, end in SPANS if start < tokens],
            status=Status.ABORTED,
        )

    for kept in range(1, 5):
        sample, wanted = sample_with(4), sample_with(kept)
        shared = sample.tokens
        rewind(sample, kept, kept)
        sample.check()
        assert sample.to_dict() == {**wanted.to_dict(), "metadata": sample.metadata}
        assert sample.metadata.get("streamfold_restarted_tokens", 0) == 4 - kept
        assert len(shared) == 7
