"""Retries and resumes: bounded, stopped by the trainer's abort, and switched off by one setting."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Retries, StreamTruncated
from support.completing import answers
from support.host import installed
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host_calls import (
    HOSTS,
    Server,
    Status,
    Written,
    aligned,
    ask,
    broken_off,
    event,
    part,
    response_of,
    sample_of,
    sent_request,
    streaming,
)
from support.replay import DONE, HANG, PROMPT, answer_json, head, stream, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.replay import Step

BOTH_LOOPS = True

BUSY = answer_json({"error": "busy"}, status=503)
TWICE = {"before a token": lambda: BUSY, "after two": lambda: broken_off(part([1, 2]))}
AGAIN: dict[str, Any] = {"streamfold_tries": 5}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of milliseconds."""
    monkeypatch.setattr("streamfold.integrations.settings.Retries", lambda tries: Retries(tries=tries, first=0.001))


@pytest.fixture(autouse=True, params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param):
        yield


async def test_a_stream_that_breaks_off_is_resumed_and_written_once_for_each_request() -> None:
    last = stream(part([3], prompt=5, finish="stop"), DONE)
    async with Server(answers(BUSY, BUSY, broken_off(part([1, 2])), BUSY, last)) as server:
        sample = Written(prompt="x", tokens=list(PROMPT))
        params = {"max_new_tokens": 8}
        await ask(streaming(server, **AGAIN), sample, params)
        requests = [sent_request(request) for request in server.generates]
    assert (response_of(sample), sample.status) == ([1, 2, 3], Status.COMPLETED)
    assert sample.writes == 2, "those that brought something"
    assert [len(request.ids) for request in requests] == [3, 3, 3, 5, 5]
    assert [request.budget for request in requests] == [8, 8, 8, 6, 6]
    assert len({request.rid for request in requests}) == 5
    assert params == {"max_new_tokens": 8}
    assert sample.metadata["streamfold_resumed"] == 1
    assert aligned(sample)


async def test_a_restart_goes_back_to_the_state_before_the_request() -> None:
    whole = stream(part([1, 2, 3], finish="stop"), DONE)
    async with Server(answers(broken_off(part([1, 2])), whole)) as server:
        sample = sample_of()
        await ask(streaming(server, streamfold_resume="restart", **AGAIN), sample, {"max_new_tokens": 8})
        assert [sent_request(request).ids for request in server.generates] == [PROMPT, PROMPT]
    assert (response_of(sample), sample.status) == ([1, 2, 3], Status.COMPLETED)
    assert sample.metadata["streamfold_restarted_tokens"] == 2


async def test_one_setting_leaves_resuming_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(broken_off(part([1, 2]))) as server:
        for settings, variable in (({"streamfold_resume": "raise"}, None), ({}, "raise")):
            if variable:
                monkeypatch.setenv("STREAMFOLD_RESUME", variable)
            sample = sample_of()
            with pytest.raises(StreamTruncated):
                await ask(streaming(server, **settings, **AGAIN), sample, {"max_new_tokens": 8})
            assert (response_of(sample), sample.status) == ([1, 2], Status.ABORTED)
        assert len(server.generates) == 2
        with pytest.raises(ValueError, match="continue, restart, raise"):
            await ask(streaming(server, streamfold_resume="maybe"), sample_of())


async def test_resumes_are_bounded() -> None:
    def one_more(request: Any) -> list[Step]:
        return broken_off(event([9], 1, prompt_tokens=len(sent_request(request).ids)))

    async with Server(one_more) as server:
        sample = sample_of()
        with pytest.raises(StreamTruncated):
            await ask(streaming(server, **AGAIN), sample, {"max_new_tokens": 99})
        assert len(server.generates) == 5
    assert response_of(sample) == [9] * 5


@pytest.mark.parametrize("when", TWICE)
async def test_no_try_starts_while_the_trainer_is_aborting(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    monkeypatch.setattr(
        "streamfold.integrations.settings.Retries", lambda tries: Retries(tries=tries, first=30.0, longest=30.0)
    )
    async with Server(TWICE[when]()) as server:
        args = streaming(server, **AGAIN)
        state = GenerateState(args)
        sample = sample_of()
        asking = asyncio.ensure_future(ask(args, sample, {"max_new_tokens": 8}))
        await until(lambda: len(server.generates) == 1)
        await asyncio.sleep(0.05)  # it is in the pause by now
        state.aborted = True
        await asking  # an abort is a result, even after a failure
        assert len(server.generates) == 1
    assert sample.status is Status.ABORTED
    assert response_of(sample) == ([1, 2] if when == "after two" else [])


async def test_a_request_that_reached_its_engine_after_the_trainers_abort_does_not_block_the_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm-project/vime#294: the request stayed in the queue, and the trainer waited for it without end."""
    monkeypatch.setattr("streamfold.integrations.clients._GRACE_SECONDS", 0.1)
    parked: list[Step] = [head(), HANG]
    async with Server(parked) as server:
        args = streaming(server, streamfold_drain=0.0)
        sample = sample_of()
        asking = asyncio.ensure_future(ask(args, sample, {"max_new_tokens": 8}))
        await until(lambda: len(server.generates) == 1)
        GenerateState(args).aborted = True
        await asyncio.wait_for(asking, 20)
        assert server.aborts
    assert (response_of(sample), sample.status) == ([], Status.ABORTED)


@pytest.mark.parametrize("policy", ["continue", "restart"])
async def test_penalties_that_the_engine_counts_anew_are_noted_or_restarted_as_the_setting_says(policy: str) -> None:
    whole = stream(part([1, 2, 3, 4], finish="stop"), DONE)
    rest = stream(part([3, 4], prompt=5, finish="stop"), DONE)
    async with Server(answers(broken_off(part([1, 2])), rest if policy == "continue" else whole)) as server:
        sample = sample_of()
        args = streaming(server, streamfold_resume_penalties=policy, **AGAIN)
        await ask(args, sample, {"max_new_tokens": 8, "frequency_penalty": 0.5})
        resent = sent_request(server.generates[1]).ids
    assert resent == ([*PROMPT, 1, 2] if policy == "continue" else PROMPT)
    assert (response_of(sample), sample.status) == ([1, 2, 3, 4], Status.COMPLETED)
    noted = [sample.metadata.get(f"streamfold_{name}") for name in ("resumed_penalties", "restarted_tokens")]
    assert noted == ([1, None] if policy == "continue" else [None, 2])
