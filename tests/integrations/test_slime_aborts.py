"""Aborts of the integrations' calls: by the trainer, which ends one request or whole servers, or by another task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.loopback import Loopback
from support.host import installed
from support.host.helpers import LIMIT, Rewards
from support.host.slime.rollout.sglang_rollout import GenerateState, abort, generate_and_rm
from support.host.slime.utils.types import Sample
from support.host_calls import (
    HOSTS,
    PARAMS,
    TOP_P,
    Server,
    Status,
    aligned,
    arrived,
    ask,
    assert_undisturbed,
    entry_module,
    event,
    events,
    partial,
    response_of,
    running,
    sample_of,
    sent_request,
    streaming,
    text_of,
)
from support.replay import DONE, HANG, LAST_CHUNK, PROMPT, chunk, head, stream, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import SimpleNamespace

    from support.replay import Request

BOTH_LOOPS = True

pytestmark = pytest.mark.usefixtures("kept_briefly")


@pytest.fixture(params=HOSTS)
def newer(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param):
        yield


@pytest.fixture(params=HOSTS)
def older(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param, new=False):
        yield


@pytest.fixture
def slime() -> Iterator[None]:
    with installed("slime"):
        yield


async def host_aborts(args: SimpleNamespace, *samples: Sample, params: dict[str, Any], when: Any) -> list[Sample]:
    """Give a group to the trainer, and let it abort the group when ``when()`` is true."""
    state = GenerateState(args)
    state.sampling_params = params
    state.submit_generate_tasks([list(samples)])
    (task,) = state.pendings
    await until(when)
    await asyncio.wait_for(abort(args, 0), LIMIT)
    state.reset()
    found: list[Sample] = task.result()
    return found


# By the trainer.


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("new", [True, False], ids=["newer", "older"])
async def test_the_trainers_abort_keeps_every_token_and_the_next_call_resumes(new: bool, incremental: bool) -> None:
    with installed(new=new), Loopback(token_rate=400, stop_probability=0, incremental=incremental) as engine:
        rewards = Rewards()
        args = streaming(engine, custom_rm_path=rewards, use_rollout_routing_replay=True)
        params = {"max_new_tokens": 60, **TOP_P}
        group = [Sample(prompt=f" {word}") for word in ("the", "of")]
        aborted = await host_aborts(args, *group, params=params, when=lambda: engine.stats().tokens > 10)
        assert [sample.status for sample in aborted] == [Status.ABORTED] * 2
        assert all(0 < sample.response_length < 60 and aligned(sample) for sample in aborted)
        assert all(sample.rollout_top_p_token_offsets is not None for sample in aborted), "the abort was waited out"
        assert [sample.metadata.get("streamfold_lost_side_data") for sample in aborted] == [None, None]
        assert rewards.calls == []
        aborts = [request.json() for request in engine.seen() if request.path == "/abort_request"]
        assert ({"abort_all": True} in aborts) is not new
        for sample in aborted:
            await generate_and_rm(args, sample, params)
            assert_undisturbed(engine, args, sample, params)
        assert len(rewards.calls) == 2
        assert engine.stats().leavers == ()


async def test_the_trainers_cancel_keeps_the_prefix_and_closes_the_request(newer: None) -> None:
    async with Server(running()) as server:
        sample = sample_of()
        (found,) = await host_aborts(
            streaming(server), sample, params={"max_new_tokens": 9}, when=lambda: arrived() == 2
        )
        assert found is sample
        await until(server.generates[0].peer_closed.is_set)
        assert set(server.aborts) == {sent_request(server.generates[0]).rid}
    assert (sample.status, response_of(sample)) == (Status.ABORTED, [1, 2])


async def test_a_retracted_request_that_a_server_abort_ends_keeps_the_last_prefix(older: None) -> None:
    async with Server(stream(event([1], 1), event([2], 2, "abort"), DONE)) as server:
        sample = await ask(streaming(server), sample_of())
    assert (response_of(sample), sample.status) == ([1, 2], Status.ABORTED)


async def test_what_finished_during_the_abort_does_not_grow_when_it_is_resumed(slime: None) -> None:
    """The trainer takes every sample that it cancels for partial; a finished one stays finished."""
    rewards = Rewards()

    def reply(request: Request) -> list[Any]:
        rid = sent_request(request).rid
        return [
            head(),
            *map(chunk, [event([1], 1), event([2], 2)]),
            server.aborted[rid],
            chunk(event([3], 3, "stop")),
            LAST_CHUNK,
        ]

    async with Server(reply) as server:
        args = streaming(server, custom_rm_path=rewards, streamfold_drain=5)
        sample = sample_of()
        params = {"max_new_tokens": 9, "custom_params": {"return_top_p_token_ids": True}}  # so that it is waited for
        await host_aborts(args, sample, params=params, when=lambda: arrived() == 2)
        assert (response_of(sample), sample.status, sample.reward) == ([1, 2, 3], Status.ABORTED, None)
        await generate_and_rm(args, sample, params)
        assert (response_of(sample), sample.status, sample.reward) == ([1, 2, 3], Status.COMPLETED, 1.0)
        assert len(server.generates) == 1
    assert len(rewards.calls) == 1


@pytest.mark.parametrize(
    ("params", "ends_for"),
    [
        ({}, HOSTS),
        ({"ignore_eos": True, "stop_token_ids": [2]}, ["vime"]),  # SGLang ignores those as well
        ({"stop_token_ids": [2]}, HOSTS),
        ({"stop": [(2,)]}, HOSTS),
        ({"stop": [(1, 2)]}, HOSTS),
        ({"stop": [(3,)]}, []),
    ],
)
async def test_a_response_whose_last_token_is_a_stop_token_is_finished_even_if_aborted(
    newer: None, request: pytest.FixtureRequest, params: dict[str, Any], ends_for: Sequence[str]
) -> None:
    """An engine that aborts a request does not check whether its last token is a stop token; resumed it would grow."""

    ends = request.node.callspec.params["newer"] in ends_for
    given = {**PARAMS, **params, "stop": [text_of(*ids) for ids in params.get("stop", ())]}
    async with Server() as server:
        args = streaming(server)
        last = 2 if params else GenerateState(args).tokenizer.eos_token_id
        server.reply(stream(event([1], 1), event([last], 2, "abort"), DONE))
        sample = await ask(args, sample_of(), given)
        assert (response_of(sample), sample.status) == ([1, last], Status.ABORTED)
        server.reply(stream(event([9], 1, "stop", prompt_tokens=5), DONE))
        await ask(args, sample, given)
        assert len(server.generates) == (1 if ends else 2)
    assert (response_of(sample), sample.status) == ([1, last] if ends else [1, last, 9], Status.COMPLETED)


async def test_the_noted_status_of_a_response_that_was_shortened_since_is_not_used(newer: None) -> None:
    sample = partial(1, 2, metadata={"streamfold_written": [3, 3, 3, "COMPLETED", 64], "mine": 1})
    async with Server(stream(event([3], 1, "abort", prompt_tokens=5), DONE)) as server:
        await ask(streaming(server), sample)
        assert len(server.generates) == 1
    assert (response_of(sample), sample.status) == ([1, 2, 3], Status.ABORTED)
    assert sample.metadata["mine"] == 1


# By other tasks (jd/tenacity#529, THUDM/slime#2272).


@pytest.mark.parametrize("through_host", [True, False], ids=["through the host", "directly"])
@pytest.mark.parametrize("moment", ["before headers", "between events"])
async def test_a_cancel_by_another_task_propagates_and_keeps_what_was_received(
    newer: None, moment: str, through_host: bool
) -> None:
    steps = [HANG] if moment == "before headers" else running()
    async with Server(steps) as server:
        sample, args = sample_of(), streaming(server)
        generate = generate_and_rm if through_host else entry_module().generate_streaming
        task: asyncio.Task[Any] = asyncio.create_task(generate(args, sample, PARAMS))
        await until(lambda: server.generates and (moment == "before headers" or arrived() == 2))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT)
        assert task.cancelled()
        await until(server.generates[0].peer_closed.is_set)
        await until(lambda: server.open == 0)
        assert len(server.generates) == 1
        assert set(server.aborts) == {sent_request(server.generates[0]).rid}
    assert response_of(sample) == ([] if moment == "before headers" else [1, 2])
    assert (sample.status, sample.reward) == (Status.ABORTED, None)


async def test_a_timeout_of_the_caller_raises_the_callers_error(newer: None) -> None:
    async with Server(running()) as server:
        sample = sample_of()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(entry_module().generate_streaming(streaming(server), sample, PARAMS), 0.1)
    assert (response_of(sample), sample.status) == ([1, 2], Status.ABORTED)


async def test_a_call_that_is_cancelled_while_it_waits_for_a_slot_sends_nothing(newer: None) -> None:
    async with Server(running()) as server:
        args = streaming(server, streamfold_concurrency=1)
        samples = [sample_of(), sample_of()]
        tasks = [asyncio.create_task(entry_module().generate_streaming(args, sample, PARAMS)) for sample in samples]
        await until(lambda: arrived() == 2)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.wait(tasks, timeout=LIMIT)
        assert all(task.cancelled() for task in tasks)
        assert len(server.generates) == 1
    assert [sample.status for sample in samples] == [Status.ABORTED] * 2
    assert samples[1].tokens == PROMPT


async def test_a_second_cancel_ends_the_wait_for_side_data(slime: None) -> None:
    async with Server(running()) as server:
        sample = sample_of()
        args = streaming(server, streamfold_drain=60, use_rollout_routing_replay=True)
        task = asyncio.create_task(entry_module().generate_streaming(args, sample, PARAMS))
        await until(lambda: arrived() == 2)
        task.cancel()
        await until(lambda: server.aborts)
        await asyncio.sleep(0.03)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT)
    assert (response_of(sample), sample.status) == ([1, 2], Status.ABORTED)


async def test_tokens_without_their_top_p_ids_are_counted_as_lost(slime: None) -> None:
    async with Server(running()) as server:
        sample = sample_of()
        args = streaming(server, streamfold_drain=0.1)
        await host_aborts(args, sample, params={**PARAMS, **TOP_P}, when=lambda: arrived() == 2)
        await until(lambda: server.open == 0)
    assert (sample.tokens, sample.status) == (PROMPT, Status.ABORTED)
    assert sample.metadata == {"streamfold_lost_side_data": 2}


async def test_a_finished_call_is_not_disturbed_by_a_later_abort(newer: None) -> None:
    async with Server(stream(*events(3), DONE)) as server:
        sample = await ask(streaming(server), sample_of())
        await until(lambda: server.open == 0)
        assert server.aborts == []
    assert sample.status is Status.COMPLETED
