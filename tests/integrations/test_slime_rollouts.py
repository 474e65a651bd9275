"""slime's own rollouts with our generate function: groups are aborted, returned and resumed, and nothing leaks."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from conftest import LOOPS
from streamfold import Client, slime
from streamfold.integrations.clients import _handles
from streamfold.loopback import Loopback
from support.host import installed
from support.host.helpers import LIMIT, Rewards
from support.host.slime.rollout.data_source import RolloutDataSourceWithBuffer
from support.host.slime.rollout.sglang_rollout import (
    GenerateState,
    abort,
    generate_and_rm,
    generate_rollout,
    generate_rollout_async,
)
from support.host.slime.utils.types import Sample
from support.host_calls import TOP_P, Status, arrived, assert_undisturbed, response_of, snapshot, streaming
from support.replay import DONE, HANG, Replay, chunk, event, head, stream, until

if TYPE_CHECKING:
    from support.replay import Request

WORDS = ("the", "of", "and", "to", "in", "is", "that")


@pytest.mark.parametrize(
    ("incremental", "masked"), [(True, False), (False, True)], ids=["incremental", "cumulative and masked"]
)
@pytest.mark.parametrize("new", [True, False], ids=["newer", "older"])
def test_groups_that_are_aborted_and_resumed_finish_as_if_undisturbed(
    new: bool, incremental: bool, masked: bool
) -> None:
    """THUDM/slime#2272, radixark/miles#2589. Each rollout in an event loop of its own."""
    rewards = Rewards()
    options: dict[str, Any] = {"token_rate": 400, "stop_probability": 1 / 40, "seed": 3, "incremental": incremental}
    with installed(new=new), Loopback(**options) as engine:
        args = streaming(
            engine,
            partial_rollout=True,
            mask_offpolicy_in_partial_rollout=masked,
            sglang_enable_deterministic_inference=True,  # a seed for each sibling
            use_rollout_routing_replay=True,
            custom_rm_path=rewards,
            rollout_top_p=0.9,
            rollout_batch_size=3,
            over_sampling_batch_size=6,
            rollout_max_response_len=100,
            prompt_data=[f" {word} story" for word in WORDS],
        )
        state = GenerateState(args)
        source = RolloutDataSourceWithBuffer(args)
        groups: list[list[Sample]] = []
        resumed = mixed = 0
        for rollout_id in range(4):
            before = [snapshot(s) for group in source.buffer for s in group if s.status is not Status.ABORTED]
            finished = [s for group in source.buffer for s in group if s.status is not Status.ABORTED]
            groups += (got := generate_rollout(args, rollout_id, source))
            assert len(got) == 3
            assert [field for s in finished for field in without_mask(s)] == [
                field for fields in before for field in without_mask_of(fields)
            ], "siblings that had finished come back as they were"
            resumed += sum("start_rollout_id" in s.metadata for group in got for s in group)
            for group in source.buffer:
                assert all((s.reward is None) == (s.status is Status.ABORTED) for s in group)
                mixed += any(s.status is not Status.ABORTED for s in group)
        for sample, i in ((sample, i) for group in groups for i, sample in enumerate(group)):
            params = {**state.sampling_params, "sampling_seed": args.rollout_seed + i}
            assert_undisturbed(engine, args, sample, params)
            assert sum(call is sample for call in rewards.calls) == 1
            mask = sample.loss_mask or []
            assert mask == sorted(mask), "what an earlier rollout gave stands first"
            assert masked or 0 not in mask
    assert resumed
    assert mixed
    assert _handles == {}


def without_mask(sample: Sample) -> list[tuple[str, Any]]:
    return without_mask_of(vars(sample))


def without_mask_of(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    """The fields that can be compared; the trainer may change the loss mask."""
    plain = ("tokens", "response", "response_length", "rollout_log_probs", "status", "reward", "weight_versions")
    return [(name, fields[name]) for name in plain]


@pytest.mark.parametrize("new", [True, False], ids=["newer", "older"])
async def test_a_mixed_group_goes_back_as_one_and_only_its_unfinished_samples_are_resumed(new: bool) -> None:
    """THUDM/slime#200: complete, truncated, aborted after one token, aborted before the first."""
    gate = asyncio.Event()
    script: dict[int, list[Any]] = {
        10: stream(event([1, 2], 2, "stop", prompt_tokens=1), DONE),
        11: stream(event([3, 4], 2, "length", prompt_tokens=1), DONE),
        12: [head(), chunk(event([5], 1, prompt_tokens=1)), gate],
        13: [head(), gate],
    }
    counts = {12: 1, 13: 0}

    def reply(request: Request) -> list[Any]:
        ids = request.json["input_ids"]
        if len(ids) > 1 or gate.is_set():
            return stream(event([7], 1, "stop", prompt_tokens=len(ids)), DONE)
        steps = script[ids[0]]
        if ids[0] in counts:
            last = [chunk(event([], counts[ids[0]], "abort", prompt_tokens=1)), chunk(DONE), b"0\r\n\r\n", "END"]
            return [*steps, *(last if not new else [HANG])]
        return steps

    def all_aborted(request: Request) -> list[Any]:
        gate.set()
        return [b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n", "END"]

    rewards = Rewards()
    idle = b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}'
    async with Replay(reply) as server:
        server.routes["/v1/loads"] = [head(200, "application/json", len(idle)) + idle, "END"]
        workers = b'{"workers": [{"url": "%b"}]}' % server.url.encode()
        server.routes["/workers"] = [head(200, "application/json", len(workers)) + workers, "END"]
        if not new:
            server.routes["/abort_request"] = all_aborted
        with installed(new=new):
            args = streaming(server, partial_rollout=True, custom_rm_path=rewards, n_samples_per_prompt=4)
            state = GenerateState(args)
            group = [Sample(prompt="x", tokens=[10 + i]) for i in range(4)]
            state.submit_generate_tasks([group])
            await until(lambda: len(server.generates) == 4 and len(rewards.calls) == 2 and arrived() == 1)
            (back,) = await asyncio.wait_for(abort(args, 5), LIMIT)
            state.reset()
            gate.set()
            assert [s.status.name for s in back] == ["COMPLETED", "TRUNCATED", "ABORTED", "ABORTED"]
            assert [s.tokens for s in back] == [[10, 1, 2], [11, 3, 4], [12, 5], [13]]
            assert [s.metadata.get("start_rollout_id") for s in back] == [5, 5, 5, None]
            finished = [snapshot(sample) for sample in back[:2]]
            before = len(server.generates)
            state.submit_generate_tasks([back])
            (task,) = state.pendings
            again = await asyncio.wait_for(task, LIMIT)
            assert [vars(sample) for sample in again[:2]] == finished
            assert [s.tokens for s in again[2:]] == [[12, 5, 7], [13, 7]]
            assert [s.rollout_log_probs for s in again[2:]] == [[-5 / 8, -7 / 8], [-7 / 8]]
            assert [s.status for s in again[2:]] == [Status.COMPLETED] * 2
            assert len(server.generates) == before + 2
            assert sorted(sum(a is s for a in rewards.calls) for s in again) == [1, 1, 1, 1]


async def test_without_partial_rollouts_a_restarted_sample_is_clean() -> None:
    """THUDM/slime#2092: a restarted sample keeps nothing of its first response."""
    with installed(), Loopback(token_rate=400, stop_probability=0) as engine:
        args = streaming(engine, rollout_max_response_len=40, rollout_batch_size=1, n_samples_per_prompt=1)
        args.over_sampling_batch_size = 4
        args.prompt_data = [f" {word}" for word in WORDS]
        source = RolloutDataSourceWithBuffer(args)
        for rollout_id in range(2):
            ((sample,),) = await generate_rollout_async(args, rollout_id, source)
            assert source.buffer == []
            assert_undisturbed(engine, args, sample, {"max_new_tokens": 40})
            assert sample.weight_versions == ["default"]


@pytest.mark.parametrize("loop", LOOPS)
def test_each_event_loop_has_its_own_clients_which_close_with_it(loop: str) -> None:
    clients: list[Client] = []
    with installed(), Loopback(stop_probability=0) as engine:

        async def use() -> None:
            args = streaming(engine)
            samples = [Sample(prompt=" the story") for _ in range(4)]
            await asyncio.gather(*(generate_and_rm(args, sample, {"max_new_tokens": 3}) for sample in samples))
            await generate_and_rm(streaming(engine, streamfold_drain=1), Sample(prompt="x"), {"max_new_tokens": 3})
            handles = _handles[asyncio.get_running_loop()].values()
            assert len(handles) == 2, "one for each router and its settings"
            clients[:] = [handle.client for handle in handles]
            assert all(client._session is not None for client in clients)
            GenerateState(args).reset()

        run(loop, use())
        before = settled_files()
        for _ in range(3):
            run(loop, use())
            assert _handles == {}
            assert all(client._session is None for client in clients), "they were closed"
        assert settled_files() <= before
        assert engine.stats().running == 0


def settled_files() -> int:
    """Open files, once the engine, which lives in this process, has closed its ends of the connections too."""
    count = -1
    for _ in range(100):
        last, count = count, len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a Path would open one more
        if last == count:
            break
        time.sleep(0.05)
    return count


def test_a_loop_that_ends_during_a_call_leaves_its_prefix_in_the_sample() -> None:
    """jd/tenacity#529: the end of a loop cancels every task, that of the request too."""
    sample = Sample(prompt="x")

    async def leave() -> None:
        task = asyncio.create_task(slime.generate_streaming(streaming(engine), sample, {"max_new_tokens": 9_000}))
        await until(lambda: arrived() > 3)
        assert not task.done()

    with installed(), Loopback(token_rate=400, stop_probability=0) as engine:
        asyncio.run(leave())
        wanted = engine.undisturbed(
            sample.tokens[: -sample.response_length], {"max_new_tokens": sample.response_length}
        )
    assert sample.status is Status.ABORTED
    assert sample.response_length > 3
    assert response_of(sample) == wanted.token_ids
    assert _handles == {}


def test_a_loop_that_was_closed_abruptly_is_forgotten_by_the_next() -> None:
    with installed(), Loopback(stop_probability=0) as engine:

        async def use() -> None:
            args = streaming(engine)
            await generate_and_rm(args, Sample(prompt="x"), {"max_new_tokens": 3})
            GenerateState(args).reset()

        rude = asyncio.new_event_loop()
        rude.run_until_complete(use())
        rude.close()
        assert list(_handles) == [rude]
        asyncio.run(use())
        assert _handles == {}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("new", [True, False], ids=["newer", "older"])
def test_aborts_at_any_moment_lose_and_double_nothing(new: bool, loop: str, soak: bool) -> None:
    dice = random.Random(7)
    options: dict[str, Any] = {
        "token_rate": 1500,
        "stop_probability": 1 / 60,
        "incremental": True,
        "prefill_delay": 0.002,
    }
    with installed(new=new), Loopback(**options) as engine:

        async def rounds() -> None:
            rewards = Rewards()
            args = streaming(engine, partial_rollout=True, custom_rm_path=rewards, use_rollout_routing_replay=True)
            state = GenerateState(args)
            params = {"max_new_tokens": 60, **TOP_P}
            state.sampling_params = params
            open_groups = [[Sample(prompt=f" {word}", index=i) for i in range(3)] for word in WORDS]
            every = [sample for group in open_groups for sample in group]
            tasks = len(asyncio.all_tasks())
            for _ in range(300 if soak else 8):
                state.submit_generate_tasks(open_groups)
                await asyncio.sleep(dice.uniform(0, 0.02))
                await asyncio.wait_for(abort(args, 0), LIMIT)
                state.reset()
            await asyncio.wait_for(asyncio.gather(*(generate_and_rm(args, s, params) for s in every)), LIMIT)
            for sample in every:
                assert_undisturbed(engine, args, sample, params)
                assert sum(call is sample for call in rewards.calls) == 1
                assert "streamfold_lost_side_data" not in sample.metadata
            await until(lambda: len(asyncio.all_tasks()) == tasks)
            await until(lambda: engine.stats().running == 0)

        run(loop, rounds())


def run(loop: str, work: Any) -> None:
    """Do what ``asyncio.run`` does, on either loop."""
    running = LOOPS[loop]()
    try:
        running.run_until_complete(work)
    finally:
        running.run_until_complete(running.shutdown_asyncgens())
        running.close()
