"""The slime adapter asks again while the host is not aborting: by itself, within bounds, and off by one setting."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from completing import answers, cut, part
from host import installed
from host.slime.rollout.sglang_rollout import GenerateState
from host.slime.utils.types import Sample
from replay import DONE, HANG, PROMPT, Replay, answer_json, event, head, stream, until
from slime_calls import Status, aligned, ask, response_of, sample_of, streaming
from streamfold import Retries, StreamTruncated, hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replay import Step

BOTH_LOOPS = True

BUSY = answer_json({"error": "busy"}, status=503)
AGAIN: dict[str, Any] = {"streamfold_tries": 5}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of milliseconds."""
    monkeypatch.setattr(hosts, "Retries", lambda tries: Retries(tries=tries, first=0.001))


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    with installed():
        yield


class Written(Sample):
    """A sample that counts how often it was written to."""

    writes = 0

    def append_response_tokens(self, *args: Any, **told: Any) -> None:
        self.writes += 1
        super().append_response_tokens(*args, **told)


async def test_a_stream_that_breaks_off_is_gone_on_with_and_written_once_for_each_request() -> None:
    last = stream(part([3], prompt=5, finish="stop"), DONE)
    async with Replay(answers(BUSY, BUSY, cut(part([1, 2])), BUSY, last)) as server:
        sample = Written(prompt="x", tokens=list(PROMPT))
        params = {"max_new_tokens": 8}
        await ask(streaming(server, **AGAIN), sample, params)
        asked = [request.json for request in server.generates]
    assert (response_of(sample), sample.status) == ([1, 2, 3], Status.COMPLETED)
    assert sample.writes == 2, "those that brought something"
    assert [len(body["input_ids"]) for body in asked] == [3, 3, 3, 5, 5]
    assert [body["sampling_params"]["max_new_tokens"] for body in asked] == [8, 8, 8, 6, 6]
    assert len({body["rid"] for body in asked}) == 5
    assert params == {"max_new_tokens": 8}
    assert sample.metadata["resumed"] == 1
    assert aligned(sample)


async def test_a_restart_goes_back_to_the_state_before_the_request() -> None:
    whole = stream(part([1, 2, 3], finish="stop"), DONE)
    async with Replay(answers(cut(part([1, 2])), whole)) as server:
        sample = sample_of()
        await ask(streaming(server, streamfold_resume="restart", **AGAIN), sample, {"max_new_tokens": 8})
        assert [request.json["input_ids"] for request in server.generates] == [PROMPT, PROMPT]
    assert (response_of(sample), sample.status) == ([1, 2, 3], Status.COMPLETED)
    assert sample.metadata["restarted_tokens"] == 2


async def test_one_setting_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Replay(cut(part([1, 2]))) as server:
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


async def test_it_does_not_go_on_without_end() -> None:
    def one_more(request: Any) -> list[Step]:
        return cut(event([9], 1, prompt_tokens=len(request.json["input_ids"])))

    async with Replay(one_more) as server:
        sample = sample_of()
        with pytest.raises(StreamTruncated):
            await ask(streaming(server, **AGAIN), sample, {"max_new_tokens": 99})
        assert len(server.generates) == 5
    assert response_of(sample) == [9] * 5


@pytest.mark.parametrize("reply", [BUSY, cut(part([1, 2]))], ids=["before a token", "after two"])
async def test_no_try_starts_while_the_host_is_aborting(monkeypatch: pytest.MonkeyPatch, reply: list[Step]) -> None:
    monkeypatch.setattr(hosts, "Retries", lambda tries: Retries(tries=tries, first=30.0, longest=30.0))
    async with Replay(reply) as server:
        args = streaming(server, **AGAIN)
        state = GenerateState(args)
        sample = sample_of()
        asking = asyncio.ensure_future(ask(args, sample, {"max_new_tokens": 8}))
        await until(lambda: len(server.generates) == 1)
        await asyncio.sleep(0.05)  # it is in the pause by now
        state.aborted = True
        await asking  # an abort is a result, whatever had gone wrong before
        assert len(server.generates) == 1
    assert sample.status is Status.ABORTED
    assert response_of(sample) == ([] if reply is BUSY else [1, 2])


async def test_a_request_that_reached_its_engine_after_the_hosts_sweep_does_not_hold_up_the_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm-project/vime#294: it was parked, and the host waited for it for ever."""
    monkeypatch.setattr(hosts, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(hosts, "_GRACE_SECONDS", 0.1)
    parked: list[Step] = [head(), HANG]
    async with Replay(parked) as server:
        args = streaming(server, streamfold_drain=0.0)
        sample = sample_of()
        asking = asyncio.ensure_future(ask(args, sample, {"max_new_tokens": 8}))
        await until(lambda: len(server.generates) == 1)
        GenerateState(args).aborted = True
        await asyncio.wait_for(asking, 10)
        assert server.aborts
    assert (response_of(sample), sample.status) == ([], Status.ABORTED)
