"""The end of a rollout, early or not: bounded, exact, and nothing is left or lost, whoever began it."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any

import pytest

from conftest import LOOPS
from streamfold import StreamfoldError
from streamfold.rollout import scheduler as flight
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.metrics import RolloutStats
from streamfold.rollout.rollout import parts_of
from streamfold.samples.sample import Sample
from support.rollouts import (
    Counted,
    HostSource,
    NoEngine,
    Scripted,
    append,
    bounded,
    endless,
    everywhere,
    groups_of,
    nothing_left,
    rollout,
)

if TYPE_CHECKING:
    from collections.abc import Callable


BOTH_LOOPS = True

Status = Sample.Status
HANGING: dict[int, Any] = dict.fromkeys(range(1000), (1, "hang"))


async def until(true: Callable[[], object]) -> None:
    async def poll() -> None:
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    await bounded(poll())


# Who is cut, and how.


async def test_generators_that_end_by_request_are_cancelled_and_the_engines_left_alone() -> None:
    """THUDM/slime#2272."""
    client, told = NoEngine(), []
    script = Scripted({0: (2, "hang"), 1: (0, Status.COMPLETED)}, wait=0.01)
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "client": client}
    await bounded(rollout(script, on_abort=lambda: told.append(script.running), **options).run(Buffer(endless())))
    assert client.sweeps == 0
    assert told == [1], "a host learns of the abort before anything is cut"


async def test_engines_are_aborted_only_while_a_generator_runs_that_ends_in_no_other_way() -> None:
    """And of those beside it exactly the ones that end by request are cancelled."""
    cancelled: list[int] = []
    swept = asyncio.Event()

    class Both:
        @staticmethod
        def abort_mode(sample: Sample) -> str:
            return "request" if sample.index % 2 else "server"  # type: ignore[operator]

        async def __call__(self, sample: Sample, _params: Any, *, aborted: Callable[[], bool]) -> Sample:
            if sample.group_index == 3:
                await asyncio.sleep(0.01)
                sample.status = Status.COMPLETED
                return sample
            append(sample, 2)
            try:
                await swept.wait()
            except asyncio.CancelledError:
                cancelled.append(sample.index or 0)
                raise
            assert aborted()
            sample.status = Status.ABORTED
            return sample

    client = NoEngine()
    client.on_sweep = lambda: swept.set() if client.sweeps == 3 else None
    source = Buffer(groups_of(4))
    options: dict[str, Any] = {"groups": 1, "over_sampling": 4, "partial_rollout": True, "client": client}
    async with nothing_left():
        result = await bounded(rollout(Both(), **options).run(source))
    assert sorted(cancelled) == [1, 3, 5]
    assert client.sweeps == 3, "what slipped in is swept again"
    assert result.metrics["streamfold/tokens/kept"] == 12


async def test_engines_are_aborted_again_although_one_of_them_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that reaches another engine just after its abort would run to its length."""
    monkeypatch.setattr("streamfold.rollout.scheduler._ABORT_SECONDS", 0.01)
    swept = asyncio.Event()

    class OneIsDead(NoEngine):
        async def abort_engines(self, seconds: float = 30.0) -> bool:
            await super().abort_engines(seconds)
            await asyncio.sleep(seconds)
            return False

    async def generate(sample: Sample, _params: Any, *, aborted: Callable[[], bool]) -> Sample:
        append(sample, 2)
        if sample.group_index:
            await swept.wait()
            assert aborted()
            sample.status = Status.ABORTED
        else:
            sample.status = Status.COMPLETED
        return sample

    generate.__dict__["abort_mode"] = "server"
    client = OneIsDead()
    client.on_sweep = lambda: swept.set() if client.sweeps == 3 else None
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "client": client}
    async with nothing_left():
        await bounded(rollout(generate, **options).run(Buffer(groups_of(2))))
    assert client.sweeps == 3


async def test_engines_that_cannot_be_aborted_do_not_end_the_rollout(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(NoEngine):
        async def abort_engines(self, seconds: float = 30.0) -> bool:
            await super().abort_engines(seconds)
            raise OSError("no route")

    script = Scripted({0: (2, "hang")}, wait=0.01)
    script.abort_mode = "server"
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "abort_seconds": 0.1, "client": Broken()}
    source = Buffer(endless())
    async with nothing_left():
        await bounded(rollout(script, partial_rollout=True, **options).run(source))
    assert "no route" in caplog.text
    assert "did not end within 0.1 s" in caplog.text
    assert source.take(1)[0][0].response_length == 2


async def test_a_sample_that_the_engine_finished_faster_than_the_abort_is_finished() -> None:
    class Faster(Scripted):
        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            if sample.group_index:
                return await super().__call__(sample, params, aborted=aborted)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                append(sample, 4)
                sample.status = Status.TRUNCATED
                raise

    source, rewards = Buffer(endless()), Counted()
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "reward": rewards}
    result = await bounded(rollout(Faster(wait=0.01), **options).run(source))
    assert result.metrics["streamfold/groups/kept"] == 1
    assert [(s.status, s.reward) for s in source.take(1)[0]] == [(Status.TRUNCATED, 4.0)] * 2


async def test_a_generator_that_takes_no_notice_of_its_end_is_left_alone_and_its_prompt_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flight, "_GRACE_SECONDS", 0.05)
    free = asyncio.Event()

    class Stubborn(Scripted):
        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            if sample.group_index is not None:
                return await super().__call__(sample, params, aborted=aborted)
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:  # noqa: PERF203
                    append(sample, 1)
            return sample

    (stubborn,) = groups_of(1, 1)
    stubborn[0].group_index = None  # so that the source knows the group by its list alone
    source = Buffer([stubborn, *groups_of(1, 1, first=1)])
    async with nothing_left():
        options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "abort_seconds": 0.05}
        await bounded(rollout(Stubborn(wait=0.01), **options).run(source))
        ((copy,),) = source.take(1)
        free.set()
        await asyncio.sleep(0.01)
        append(stubborn[0], 5)
        assert "ignores being cancelled" in caplog.text
        assert source.in_flight == 1, "the copy that has just been taken"
        assert copy is not stubborn[0]
        assert (copy.status, copy.response_length, copy.tokens) == (Status.PENDING, 0, [5, 6, 7, 100])


# Nothing is begun any more.


async def test_an_abort_in_a_burst_of_starts_leaves_no_task_and_begins_nothing(soak: bool) -> None:
    """PrimeIntellect-ai/prime-rl#1939: tasks were made while others were being cancelled."""
    dice = random.Random(5)
    for _ in range(100 if soak else 6):
        source = Buffer(groups_of(250, 4))
        script = Scripted(dict(HANGING), wait=dice.choice([0, 0.001]))
        options: dict[str, Any] = {"groups": 250, "concurrency": dice.choice([100, 2000]), "partial_rollout": True}
        async with nothing_left():
            running = asyncio.ensure_future(rollout(script, starts_per_ms=dice.choice([8, 64]), **options).run(source))
            await asyncio.sleep(dice.uniform(0, 0.02))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await bounded(running)
            asked = len(script.asked)
            await asyncio.sleep(0.003)
        assert (len(script.asked), script.running) == (asked, 0)
        assert everywhere(source) == list(range(len(source)))
        assert source.in_flight == 0
        partial = sum(s.response_length for group in source.take(len(source)) for s in group)
        assert partial == asked, "whoever was asked has kept its token"


async def test_what_waits_for_a_slot_or_for_its_turn_when_the_abort_comes_never_starts() -> None:
    script = Scripted({0: (2, Status.COMPLETED), 1: (1, "hang")}, wait=0.01)
    source = Buffer(groups_of(50, 1))
    options: dict[str, Any] = {"groups": 1, "over_sampling": 50, "concurrency": 2, "starts_per_ms": 1}
    async with nothing_left():
        await bounded(rollout(script, partial_rollout=True, **options).run(source))
        await asyncio.sleep(0.01)
    assert sorted(script.asked) == [0, 1, 2][: len(script.asked)]
    assert everywhere(source) == list(range(1, 50))


async def test_what_waits_for_a_slot_does_not_wait_for_one_that_is_not_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, hanging, *others = groups_of(6, 1)
    append(kept[0], 2)
    kept[0].status = Status.COMPLETED
    script = Scripted(dict(HANGING))
    script.abort_mode = "server"
    options: dict[str, Any] = {"groups": 1, "over_sampling": 6, "concurrency": 1, "abort_seconds": 0.05}
    async with nothing_left():
        await bounded(rollout(script, partial_rollout=True, **options).run(Buffer([hanging, *others, kept])))
    assert script.asked == [1]
    assert "1 groups did not end within 0.05 s" in caplog.text


async def test_what_a_generator_raises_when_it_is_cut_is_not_held_against_its_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Clumsy(Scripted):
        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            try:
                return await super().__call__(sample, params, aborted=aborted)
            except asyncio.CancelledError:
                raise OSError("the tool was closed") from None

    source = Buffer(endless())
    script = Clumsy({0: (1, "hang"), 1: (1, "hang")}, wait=0.01)
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "group_tries": 1}
    for rollout_id in range(3):
        result = await bounded(rollout(script, **options).run(source, rollout_id))
        assert (result.metrics["streamfold/groups/failed"], result.metrics["streamfold/groups/dropped"]) == (0, 0)
    assert "the tool was closed" in caplog.text
    assert [s.response_length for s in source.take(1)[0]] == [3, 3]


# A cancel from outside.


@pytest.mark.parametrize("source_kind", ["account", "host"])
async def test_a_cancel_of_the_rollout_gives_everything_back_and_comes_out(source_kind: str) -> None:
    groups = groups_of(4)
    source: Any = Buffer(groups) if source_kind == "account" else HostSource(groups)
    script = Scripted(dict.fromkeys(range(2, 6), (2, "hang")), wait=0.001)
    script.script |= {6: (0, "hang"), 7: (0, "hang")}
    rewards = Counted()
    async with nothing_left():
        options: dict[str, Any] = {"groups": 4, "partial_rollout": True, "reward": rewards}
        running = asyncio.ensure_future(rollout(script, **options).run(source, 3))
        await until(lambda: len(rewards.asked) == 2 and len(script.asked) == 8)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded(running)
    back = source.take(4) if source_kind == "account" else source.back
    assert back == groups
    assert [[s.response_length for s in group] for group in back] == [[2, 2]] * 3 + [[0, 0]]
    assert [[s.reward for s in group] for group in back] == [[2.0, 2.0]] + [[None, None]] * 3
    assert [s.status for s in groups[3]] == [Status.PENDING] * 2
    assert len(rewards.asked) == 2


async def test_a_cancel_does_not_wait_for_rewards() -> None:
    begun = asyncio.Event()

    async def reward(_sample: Any) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    source = Buffer(endless())
    async with nothing_left():
        running = asyncio.ensure_future(rollout(Scripted(), groups=1, reward=reward).run(source))
        await bounded(begun.wait())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)
    assert everywhere(source) == [0]


async def test_a_cancel_begins_no_more_rewards() -> None:
    client, rewards = NoEngine(), Counted()
    swept = asyncio.Event()
    client.on_sweep = swept.set

    class Ending(Scripted):
        abort_mode = "server"

        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            await swept.wait()
            return await super().__call__(sample, params, aborted=lambda: False)

    source = Buffer(endless())
    async with nothing_left():
        running = asyncio.ensure_future(rollout(Ending(), groups=1, reward=rewards, client=client).run(source))
        await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded(running)
    assert [s.status for s in source.take(1)[0]] == [Status.COMPLETED] * 2
    assert rewards.asked == []


@pytest.mark.parametrize("when", ["the rollout was cancelled", "there were enough groups"])
async def test_a_further_cancel_ends_drains(when: str) -> None:
    draining = asyncio.Event()

    class Draining(Scripted):
        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            if sample.group_index:
                return await super().__call__(sample, params, aborted=aborted)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                draining.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    append(sample, 1)
                raise

    source = Buffer(endless(1))
    options: dict[str, Any] = {"over_sampling": 2, "partial_rollout": True, "abort_seconds": 60}
    groups = 1 if when == "there were enough groups" else 2
    async with nothing_left():
        running = asyncio.ensure_future(rollout(Draining(wait=0.005), groups=groups, **options).run(source))
        if groups == 2:
            await asyncio.sleep(0.02)
            running.cancel()
        await bounded(draining.wait())
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)
    assert everywhere(source) == [0, 1]
    assert source.take(1)[0][0].response_length == 1


async def test_a_cancel_that_nobody_here_made_comes_out_as_such() -> None:
    """jd/tenacity#529: it is not to be taken for an abort."""

    class Cancelled(Scripted):
        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            if sample.index == 2:
                raise asyncio.CancelledError
            return await super().__call__(sample, params, aborted=aborted)

    source = Buffer(endless())
    async with nothing_left():
        with pytest.raises(asyncio.CancelledError):
            await bounded(rollout(Cancelled(), groups=3).run(source))
    assert everywhere(source) == [0, 1, 2]


@pytest.mark.parametrize("loop", LOOPS)
def test_an_event_loop_that_ends_under_a_rollout_loses_no_group(loop: str) -> None:
    """It cancels every task at once, those of the rollout, its groups and its generators."""
    source = Buffer(groups_of(3))

    async def leave() -> None:
        asyncio.ensure_future(rollout(Scripted(dict(HANGING)), groups=3, partial_rollout=True).run(source))  # noqa: RUF006
        await asyncio.sleep(0.02)

    running = LOOPS[loop]()
    try:
        running.run_until_complete(leave())
        left = asyncio.all_tasks(running)
        for task in left:
            task.cancel()
        running.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        running.close()
    assert everywhere(source) == [0, 1, 2]
    assert [s.response_length for group in source.take(3) for s in group] == [1] * 6


async def test_a_time_limit_around_a_rollout_works_as_around_anything() -> None:
    source = Buffer(groups_of(2))
    async with nothing_left():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(rollout(Scripted(dict(HANGING)), groups=2, partial_rollout=True).run(source), 0.05)
    assert everywhere(source) == [0, 1]


async def test_a_flight_that_is_over_takes_no_more_groups() -> None:
    over = parts_of(rollout(Scripted(), groups=1)).scheduler(RolloutStats(), None, 1)
    await over.abort()
    with pytest.raises(RuntimeError, match="a new one"):
        over.start(groups_of(1)[0], 0)


def test_what_is_logged_names_the_package(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(StreamfoldError):
        asyncio.run(rollout(Scripted({0: (0, LookupError())}), groups=1, max_failures=0).run(Buffer(endless())))
    assert {record.name for record in caplog.records if "group" in record.message} == {"streamfold"}
