"""Rollouts by several processes on a real Ray: what one process would give, whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Buffer, Client, Rollout, StreamfoldError, Trace
from streamfold.loopback import Loopback
from streamfold.ray import RolloutWorkers
from streamfold.ray.worker import Failure, pack_group, unpack_group
from support.ray_jobs import Awkward, Make, Noting, TwoTurns, actors, config, failing, length, open_workers
from support.rollouts import bounded, groups_of, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from streamfold import Group

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("_ray")]

GROUPS = 8


def workers(
    engine: Loopback, config: Any, groups: int = GROUPS, **options: Any
) -> contextlib.AbstractAsyncContextManager[RolloutWorkers]:
    return open_workers(engine, config, groups, **options)


async def until(holds: Callable[[], Any]) -> None:
    """Wait until something holds; the test's own time limit ends this."""
    while True:
        held = holds()
        if await held if asyncio.iscoroutine(held) else held:
            return
        await asyncio.sleep(0.02)


def comparable(group: Group) -> list[dict[str, Any]]:
    """All that the samples of a group are, without what differs from run to run."""
    fields = [snapshot(sample) for sample in group]
    for each in fields:
        del each["session_id"]
    return fields


def assert_undisturbed(engine: Loopback, groups: list[Group], count: int = GROUPS) -> None:
    """Each group came once, and its samples are what the engine gives to one that nobody disturbs."""
    assert sorted(group[0].group_index or 0 for group in groups) == list(range(count))
    for sample in (sample for group in groups for sample in group):
        prompt = sample.tokens[: -sample.response_length]
        wanted = engine.undisturbed(
            prompt, dict(config(1).sampling_params), return_logprob=True, return_routed_experts=True
        )
        assert sample.tokens == [*prompt, *wanted.token_ids]
        assert sample.rollout_log_probs == wanted.logprobs
        assert sample.loss_mask == [1] * 16
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, 4, 2)
        sample.check()


async def test_the_samples_are_those_of_a_rollout_in_one_process() -> None:
    with Loopback() as engine:
        make, settings = Make(engine.url, GROUPS), config(GROUPS, seed=3)
        async with make.client() as client:
            alone = await Rollout(client, settings, reward=length).run(make.buffer())
        async with workers(engine, settings, reward=length) as shared:
            result = await bounded(shared.run())
    assert_undisturbed(engine, result.groups)
    assert not result.is_short
    for one, other in zip(alone.groups, result.groups, strict=True):
        for mine, its in zip(comparable(one), comparable(other), strict=True):
            experts, its_experts = mine.pop("rollout_routed_experts"), its.pop("rollout_routed_experts")
            assert mine == its
            assert experts.dtype == its_experts.dtype
            np.testing.assert_array_equal(experts, its_experts)
    same = ("tokens/generated", "samples/started", "groups/done", "groups/drawn", "rewards")
    assert {name: result.metrics[f"streamfold/{name}"] for name in same} == {
        name: alone.metrics[f"streamfold/{name}"] for name in same
    }


async def test_a_rollout_aborts_the_rest_and_the_next_one_resumes_it() -> None:
    with Loopback(token_rate=100, max_running_requests=6) as engine:
        async with workers(engine, config(2, over_sampling=6), groups=6) as shared:
            results = [await bounded(shared.run(step)) for step in range(3)]
        assert engine.stats().running == 0
    assert_undisturbed(engine, [group for result in results for group in result.groups], 6)
    assert results[0].metrics["streamfold/groups/aborted"] > 0
    assert sum(result.metrics["streamfold/samples/resumed"] for result in results) > 0


async def test_a_worker_killed_in_the_middle_loses_and_doubles_nothing() -> None:
    with Loopback(token_rate=40) as engine:
        async with workers(engine, config(GROUPS), in_flight=6, reward=length) as shared:
            first = asyncio.create_task(shared.next(2))
            await until(lambda: engine.stats().tokens > 60)
            os.kill(shared.pids[0], signal.SIGKILL)
            groups = await bounded(first)
            groups += await bounded(shared.next(GROUPS - 2))
            assert await bounded(shared.next(1)) == []
    assert_undisturbed(engine, groups)
    assert all(sample.reward == 20.0 for group in groups for sample in group)


async def test_all_workers_killed_are_started_again() -> None:
    with Loopback(token_rate=40) as engine:
        async with workers(engine, config(GROUPS)) as shared:
            first = asyncio.create_task(shared.next(GROUPS))
            await until(lambda: engine.stats().tokens > 60)
            for pid in shared.pids:
                os.kill(pid, signal.SIGKILL)
            groups = await bounded(first)
    assert_undisturbed(engine, groups)


async def test_what_a_killed_worker_has_reported_is_not_generated_again(tmp_path: Path) -> None:
    saved = tmp_path / "buffer"
    with Loopback() as engine:
        async with workers(engine, config(2), groups=2, generate=TwoTurns(tmp_path)) as shared:
            first = asyncio.create_task(shared.next(2))

            async def all_reported() -> bool:
                await shared.save(saved)
                buffer = Buffer()
                buffer.load(saved)
                return [s.response_length for group in buffer.take(len(buffer)) for s in group] == [3] * 4

            await until(all_reported)
            os.kill(shared.pids[0], signal.SIGKILL)
            await until(lambda: not is_running(shared.pids[0]))
            (tmp_path / "go").touch()
            groups = await bounded(first)
    samples = [sample for group in groups for sample in group]
    assert [sample.tokens[-5:] for sample in samples] == [[1, 2, 3, 4, 5]] * 4
    pids = [sample.metadata["pids"] for sample in samples]
    assert any(len(set(each)) == 2 for each in pids), "one worker has begun a sample, another has ended it"


async def test_a_group_with_which_workers_die_fails() -> None:
    with Loopback() as engine:
        settings = config(1, max_failures=0, group_tries=2)
        async with workers(engine, settings, generate=failing(os.abort)) as shared:
            with pytest.raises(StreamfoldError, match="2 workers have died with group"):
                await bounded(shared.run())


async def test_the_weight_version_arrives_at_all_workers(tmp_path: Path) -> None:
    with Loopback() as engine:
        settings = config(4, max_staleness=100)
        async with workers(engine, settings, groups=100, generate=Noting(tmp_path)) as shared:
            (tmp_path / "go").touch()
            await bounded(shared.next(4))
            await shared.pause()
            await bounded(shared.set_version(7))
            await shared.resume()
            groups = [*await bounded(shared.next(4)), *await bounded(shared.next(8))]
    begun = [s for group in groups for s in group if s.metadata["start_rollout_id"] == 7]
    assert {sample.metadata["pid"] for sample in begun} == set(shared.pids)
    assert all(sample.metadata["streamfold_call_versions"] == [[7, 0, 2]] for sample in begun)


async def test_a_pause_stops_all_workers_and_a_resume_goes_on() -> None:
    with Loopback(token_rate=40) as engine:
        async with workers(engine, config(GROUPS)) as shared:
            first = asyncio.create_task(shared.next(GROUPS))
            await until(lambda: engine.stats().tokens > 60)
            await bounded(shared.pause())
            requests, tokens = engine.stats().requests, engine.stats().tokens
            assert engine.stats().running == 0
            await asyncio.sleep(0.2)
            assert (engine.stats().requests, engine.stats().tokens) == (requests, tokens)
            await shared.resume()
            groups = await bounded(first)
            metrics = await shared.metrics()
    assert_undisturbed(engine, groups)
    assert metrics["streamfold/samples/resumed"] > 0
    assert metrics["streamfold/tokens/kept"] > 0


@pytest.mark.parametrize("kind", ["plain", "awkward"])
async def test_an_exception_of_a_generate_function_is_told_with_its_words(kind: str) -> None:
    def error() -> Exception:
        return Awkward("calculator", "no battery") if kind == "awkward" else ValueError("calculator: no battery")

    with Loopback() as engine:
        async with workers(engine, config(1, max_failures=0), generate=failing(error)) as shared:
            with pytest.raises(StreamfoldError, match="calculator: no battery"):
                await bounded(shared.run())
            with pytest.raises(StreamfoldError, match="calculator: no battery"):
                await bounded(shared.next(1))


async def test_a_call_that_is_cancelled_loses_no_group() -> None:
    groups: list[Group] = []
    with Loopback(token_rate=100) as engine:
        async with workers(engine, config(GROUPS)) as shared:
            for seconds in (0.001, 0.1, 0.12, 0.14, 0.16):  # some before the groups have come, some behind
                with contextlib.suppress(asyncio.TimeoutError):
                    groups += await asyncio.wait_for(shared.next(GROUPS), seconds)
            groups += await bounded(shared.next(GROUPS))
    assert_undisturbed(engine, groups)


async def test_groups_that_a_cancelled_call_has_got_return(monkeypatch: pytest.MonkeyPatch) -> None:
    with Loopback() as engine:
        async with workers(engine, config(GROUPS)) as shared:
            cancelled: list[Any] = []
            monkeypatch.setattr("ray.cancel", lambda call, **_options: cancelled.append(call))  # it comes too late
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(shared.next(GROUPS), 0.001)
            assert cancelled
            groups = await bounded(shared.next(GROUPS))
    assert_undisturbed(engine, groups)


async def test_a_client_that_cannot_be_opened_is_an_error_at_the_start() -> None:
    make = Make("http://127.0.0.1:9", 1)
    wrong = RolloutWorkers(1, client=lambda: Client("http://a:b"), config=config(1), source=make.buffer)
    with pytest.raises(ValueError, match="port"):
        await bounded(wrong.__aenter__())
    await until(lambda: not actors())
    with pytest.raises(RuntimeError, match="the workers are not open"):
        await wrong.run()


async def test_no_actor_and_no_process_is_left() -> None:
    with Loopback(token_rate=20) as engine:
        async with workers(engine, config(GROUPS)) as shared:
            first = asyncio.create_task(shared.next(GROUPS))
            await until(lambda: engine.stats().running == 2 * GROUPS)
            assert len(actors()) == 3
            first.cancel()
        assert engine.stats().running == 0
        await until(lambda: engine.stats().open_connections == 0)
    await until(lambda: not actors())
    await until(lambda: not any(is_running(pid) for pid in shared.pids))
    with pytest.raises(asyncio.CancelledError):
        await first


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_group_is_packed_as_one_array() -> None:
    group = groups_of(1)[0]
    for sample in group:
        sample.tokens = [*range(1000)]
        sample.rollout_log_probs = [-0.1 * i for i in range(999)] + [float("nan")]
        sample.loss_mask, sample.response_length = [1] * 1000, 1000
        sample.rollout_routed_experts = np.arange(999 * 2, dtype=np.uint8).reshape(999, 2, 1)
        sample.metadata = {"any": {1, 2}, "nested": [{"a": (1, None), 3: "x"}]}
    packed = pack_group([group[0], [group[1]]])
    assert (packed.dtype.name, packed.ndim) == ("uint8", 1)
    assert packed.nbytes < 2 * (1000 * (4 + 8 + 1) + 999 * 2 + 2000), "numbers are as wide as their arrays, not as text"
    packed.flags.writeable = False  # as what comes out of the object store
    unpacked: list[Any] = list(unpack_group(packed))
    for mine, its in zip(group, [unpacked[0], *unpacked[1]], strict=True):
        assert str(snapshot(mine)) == str(snapshot(its))
        assert its.rollout_routed_experts.flags.writeable


def test_an_exception_arrives_with_its_traceback_and_type_where_it_can() -> None:
    for error, kind in ((KeyError("lost"), KeyError), (Awkward("a", "b"), StreamfoldError)):
        try:
            raise error
        except Exception as raised:  # noqa: BLE001
            arrived = Failure.of(0, raised).exception()
        assert type(arrived) is kind
        assert str(error) in str(arrived)
        assert "raise error" in str(arrived.__cause__)


def test_what_cannot_make_a_client_or_a_buffer_or_is_of_one_process_is_refused(tmp_path: Path) -> None:
    make = Make("http://127.0.0.1:9", 1)
    fine: dict[str, Any] = {"client": make.client, "source": make.buffer, "config": config(1)}
    with pytest.raises(TypeError, match="client must be a function that makes a Client"):
        RolloutWorkers(2, **{**fine, "client": make.client()})
    with pytest.raises(TypeError, match="source must be a function that makes a Buffer"):
        RolloutWorkers(2, **{**fine, "source": make.buffer()})
    with pytest.raises(ValueError, match="num_workers must be at least 1"):
        RolloutWorkers(0, **fine)
    with Trace(tmp_path / "trace.json") as trace, pytest.raises(ValueError, match="one for each worker: Client"):
        RolloutWorkers(2, **{**fine, "config": config(1, trace=trace)})
    assert repr(RolloutWorkers(2, **fine)).startswith("<RolloutWorkers: 2, closed")
