"""Rewards when enough groups are in: waited for only where they are of use, in a time of their own; and which count."""

from __future__ import annotations

import asyncio
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from streamfold import StreamfoldError
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.pool import Pool
from streamfold.samples.sample import Sample
from support.rollouts import HostSource, Scripted, append, bounded, endless, groups_of, nothing_left, rollout

BOTH_LOOPS = True

Status = Sample.Status
HOURS = 3600.0


class Judge:
    """Judges samples of groups in ``slow`` when it is let go, all others at once."""

    def __init__(self, *slow: int) -> None:
        self.slow = slow
        self.gate = asyncio.Event()
        self.asked: list[int] = []
        self.judged: list[int] = []

    async def __call__(self, sample: Any) -> float:
        self.asked.append(sample.index)
        if sample.group_index in self.slow:
            await self.gate.wait()
        self.judged.append(sample.index)
        return 1.0


# Of which groups.


@pytest.mark.parametrize("kind", ["surplus", "restarted as a whole", "not returned to a host's source"])
async def test_rewards_of_groups_that_will_be_dropped_are_not_waited_for(kind: str) -> None:
    """However long they may take. Samples 0 and 1 are those of group 0."""
    script = Scripted({0: (1, "hang")} if kind != "surplus" else {})
    judge = Judge(0)
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "reward": judge, "reward_seconds": HOURS}
    options["keep_finished"] = kind == "not returned to a host's source"
    source: Any = HostSource(groups_of(2)) if options["keep_finished"] else Buffer(groups_of(2))
    async with nothing_left():
        result = await bounded(rollout(script, **options).run(source))
    assert [group[0].group_index for group in result.groups] == [1]
    assert set(judge.judged) == {2, 3}
    assert 1 in judge.asked, "it was being judged when the abort came"
    dropped = result.metrics["streamfold/groups/dropped"]
    assert dropped == (kind != "restarted as a whole")


async def test_no_reward_of_such_a_group_is_begun_by_samples_that_end_in_the_abort() -> None:
    judge = Judge()

    class Ending(Scripted):
        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            if sample.group_index:
                return await super().__call__(sample, params, aborted=aborted)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                append(sample, 2)
                sample.status = Status.TRUNCATED
                raise

    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "reward": judge, "keep_finished": False}
    async with nothing_left():
        result = await bounded(rollout(Ending(wait=0.01), **options).run(Buffer(groups_of(2))))
    assert sorted(judge.asked) == [2, 3]
    assert result.metrics["streamfold/groups/dropped/surplus"] == 1


@pytest.mark.parametrize("partial", [True, False])
async def test_rewards_of_groups_that_are_kept_are_waited_for_longer_than_the_engines(partial: bool) -> None:
    judge = Judge(0)
    script = Scripted({0: (1, "hang")} if partial else {})
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "reward": judge, "partial_rollout": partial}
    source = Buffer(groups_of(2))
    trainer = rollout(script, abort_seconds=0.01, reward_seconds=HOURS, **options)
    async with nothing_left():
        running = asyncio.ensure_future(trainer.run(source))
        await asyncio.sleep(0.1)
        assert not running.done()
        judge.gate.set()
        await bounded(running)
    rewards = [s.reward for s in source.take(1)[0]]
    assert rewards == ([None, 1.0] if partial else [1.0, 1.0])


@pytest.mark.parametrize("seconds", [0, 0.03])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
async def test_rewards_that_are_cut_are_computed_in_the_next_rollout_and_the_others_are_not_again(
    seconds: float, grouped: bool, pooled: bool
) -> None:
    """While an engine, whose limit is its own, would still be waited for."""
    judge = Judge(0)

    async def judge_group(samples: list[Any]) -> list[float]:
        return [await judge(sample) for sample in samples]

    script, source = Scripted(), Buffer(groups_of(2))
    options: dict[str, Any] = {"reward": judge_group if grouped else judge, "group_reward": grouped}
    options |= {"abort_seconds": HOURS, "reward_seconds": seconds}
    async with nothing_left():
        if pooled:
            async with Pool(rollout(script, groups=1, **options), source, in_flight=2) as pool:
                first = await bounded(pool.next(1))
                await bounded(pool.pause())
                assert len(source) == 1
                judge.gate.set()
                pool.resume()
                second = await bounded(pool.next(1))
        else:
            first = (await bounded(rollout(script, groups=1, over_sampling=2, **options).run(source))).groups
            judge.gate.set()
            second = (await bounded(rollout(script, groups=1, **options).run(source, 1))).groups
    assert [group[0].group_index for group in first + second] == [1, 0]
    assert [s.reward for s in second[0]] == [1.0, 1.0]
    assert sorted(judge.judged) == [0, 1, 2, 3], "once each"
    assert script.asked == [0, 1, 2, 3]


async def test_an_engine_that_needs_long_is_cut_at_its_own_limit_though_rewards_have_more_time() -> None:
    judge = Judge(0)
    script = Scripted({2: (4, "hang"), 3: (4, "hang")})
    script.abort_mode = "server"
    options: dict[str, Any] = {"groups": 1, "over_sampling": 3, "reward": judge, "partial_rollout": True}
    source = Buffer(groups_of(3))
    trainer = rollout(script, abort_seconds=0.05, reward_seconds=HOURS, **options)
    async with nothing_left():
        running = asyncio.ensure_future(trainer.run(source))
        while len(script.asked) < 6 or script.running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert not running.done()
        judge.gate.set()
        result = await bounded(running)
    assert [group[0].group_index for group in result.groups] == [2]
    assert [[s.response_length for s in group] for group in source.take(2)] == [[2, 2], [4, 4]]


# What is a reward.

NO_REWARDS: dict[str, Any] = {
    "NaN": math.nan, "infinity": math.inf, "text": "1.0", "a list": [1.0], "an array": np.ones(2), "complex": 1j,
    "an object": object(), "NaN of numpy": np.float32("nan"), "a huge int": 10**400,
    "a dict without a number": {"answer": "4"}, "an empty dict": {}, "a dict with NaN": {"score": math.nan, "acc": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_REWARDS)
@pytest.mark.parametrize("by", ["the function", "the function, on the sample", "the group's function"])
async def test_what_is_no_number_is_refused_by_the_name_of_its_sample_and_judged_again(kind: str, by: str) -> None:
    value: Any = NO_REWARDS[kind]

    def reward(sample: Any) -> Any:
        if by == "the function, on the sample":
            sample.reward = value
            return None
        return value

    def of_group(samples: list[Any]) -> list[Any]:
        return [1.0, *(value for _ in samples[1:])]

    grouped = by == "the group's function"
    source = Buffer(groups_of(1))
    options: dict[str, Any] = {"groups": 1, "reward": of_group if grouped else reward, "group_reward": grouped}
    with pytest.raises(StreamfoldError) as caught:
        await bounded(rollout(Scripted(), max_failures=0, **options).run(source))
    assert f"of sample {1 if grouped else 0} is" in str(caught.value.__cause__)
    assert "number" in str(caught.value.__cause__)
    failed = await bounded(rollout(Scripted(), **options).run(source))
    assert (failed.groups, failed.metrics["streamfold/groups/failed"]) == ([], 1)
    ((first, second),) = source.take(1)
    assert (first.reward, second.reward) == (None, None)


@pytest.mark.parametrize(
    "value",
    [0, -1.5, True, np.float32(0.5), np.array(0.5), Decimal("0.5"), {"score": 0.5, "answer": "4", "parsed": None}],
    ids=repr,
)
async def test_numbers_of_every_kind_and_dicts_with_notes_are_rewards(value: Any) -> None:
    result = await bounded(rollout(Scripted(), groups=1, reward=lambda _sample: value).run(Buffer(endless())))
    assert all(sample.reward is value for sample in result.groups[0])


async def test_a_generator_that_sets_no_number_has_its_sample_generated_again() -> None:
    """Nobody else can judge it."""

    class Judging(Scripted):
        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            made = await super().__call__(sample, params, aborted=aborted)
            made.reward = math.nan if len(self.asked) == 1 else 3.0
            return made

    script, source = Judging(), Buffer(groups_of(1, 1))
    first = await bounded(rollout(script, groups=1, partial_rollout=True).run(source))
    assert (first.groups, first.metrics["streamfold/groups/failed"]) == ([], 1)
    ((sample,),) = (await bounded(rollout(script, groups=1, partial_rollout=True).run(source, 1))).groups
    assert (sample.reward, sample.response_length, script.asked) == (3.0, 2, [0, 0])
