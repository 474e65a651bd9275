"""Rewards: one for each finished sample, ever, whatever the function is like and whenever the abort comes."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import Any

import pytest

from streamfold import StreamfoldError
from streamfold.rollout.buffer import Buffer
from streamfold.samples.sample import Sample
from support.rollouts import Counted, Scripted, bounded, endless, groups_of, nothing_left, rollout

BOTH_LOOPS = True

Status = Sample.Status


async def plain(sample: Any) -> float:
    return float(sample.response_length)


class Method:
    async def __call__(self, sample: Any) -> float:
        return await plain(sample)


@pytest.mark.parametrize(
    "reward",
    [
        plain,
        Method(),
        functools.partial(plain),
        lambda sample: plain(sample),  # noqa: PLW0108  # no coroutine function, but gives a coroutine
        lambda sample: float(sample.response_length),
    ],
    ids=["async", "async method", "partial", "gives a coroutine", "sync"],
)
async def test_a_reward_function_may_be_of_any_kind(reward: Any) -> None:
    async with nothing_left():
        result = await bounded(rollout(Scripted(), groups=2, reward=reward).run(Buffer(endless())))
    assert [[s.reward for s in group] for group in result.groups] == [[2.0, 2.0]] * 2
    assert result.metrics["streamfold/rewards"] == 4


async def test_a_reward_that_raises_costs_neither_the_response_nor_the_rollout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[int] = []

    async def reward(sample: Any) -> float:
        asked.append(sample.index)
        if sample.index == 1 and asked.count(1) == 1:
            raise LookupError("the judge is away")
        return 1.0

    source = Buffer(endless())
    trainer = rollout(script := Scripted(), groups=1, reward=reward)
    async with nothing_left():
        first = await bounded(trainer.run(source, 0))
    assert [group[0].group_index for group in first.groups] == [1]
    assert "the judge is away" in caplog.text
    second = await bounded(trainer.run(source, 1))
    ((sibling, sample),) = second.groups
    assert (sibling.index, sibling.reward, sample.index, sample.reward) == (0, 1.0, 1, 1.0)
    assert script.asked == [0, 1, 2, 3], "the response itself was not generated again"
    assert asked == [0, 1, 2, 3, 1], "the sibling's reward was not computed again"


async def test_a_reward_that_raises_for_all_ends_the_rollout_with_its_error() -> None:
    async def reward(_sample: Any) -> float:
        raise LookupError("the judge is away")

    with pytest.raises(StreamfoldError) as caught:
        await bounded(rollout(Scripted(), groups=3, reward=reward, max_failures=3).run(Buffer(endless())))
    assert isinstance(caught.value.__cause__, LookupError)


async def test_a_reward_of_none_is_an_error_unless_the_function_has_set_the_samples_own() -> None:
    async def sets(sample: Any) -> None:
        sample.reward = 0.0

    result = await bounded(rollout(Scripted(), groups=1, reward=sets).run(Buffer(endless())))
    assert [s.reward for s in result.groups[0]] == [0.0, 0.0]
    nothing = rollout(Scripted(), groups=1, reward=lambda _sample: None, max_failures=0)
    with pytest.raises(StreamfoldError) as caught:
        await bounded(nothing.run(Buffer(endless())))
    assert "returned None" in str(caught.value.__cause__)


async def test_a_sample_whose_generator_has_set_its_reward_keeps_it() -> None:
    class Judging(Scripted):
        async def __call__(self, sample: Any, params: dict[str, Any], **more: Any) -> Any:
            sample.reward = 7.0
            return await super().__call__(sample, params, **more)

    rewards = Counted()
    result = await bounded(rollout(Judging(), groups=1, reward=rewards).run(Buffer(endless())))
    assert [s.reward for s in result.groups[0]] == [7.0, 7.0]
    assert rewards.asked == []


# When the abort comes.


async def test_a_slow_reward_is_waited_for_when_the_abort_comes_and_not_computed_again() -> None:
    asked: list[int] = []

    async def reward(sample: Any) -> float:
        asked.append(sample.index)
        await asyncio.sleep(0.15 if sample.group_index == 0 else 0)
        return 1.0

    source = Buffer(endless())
    script = Scripted({3: (1, "hang"), 2: (1, Status.COMPLETED)})
    script.script |= {4: (2, Status.COMPLETED)}
    options: dict[str, Any] = {"groups": 1, "over_sampling": 3, "partial_rollout": True, "reward": reward}
    async with nothing_left():
        first = await bounded(rollout(script, **options).run(source))
    assert [group[0].group_index for group in first.groups] == [2]
    (slow, cut) = source.take(2)
    assert [s.reward for s in slow] == [1.0, 1.0]
    assert [s.reward for s in cut] == [1.0, None], "an aborted sample gets none"
    source.put([slow, cut])
    await bounded(rollout(Scripted(), **options | {"groups": 2, "over_sampling": 2}).run(source))
    assert sorted(asked) == [0, 1, 2, 3, 4, 5]


async def test_a_reward_that_outlasts_the_abort_is_cancelled_and_computed_in_the_next_rollout() -> None:
    asked: list[int] = []
    stuck = asyncio.Event()

    async def reward(sample: Any) -> float:
        asked.append(sample.index)
        if sample.group_index == 0:
            await stuck.wait()
        return 1.0

    source, script = Buffer(endless()), Scripted()
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "reward": reward, "reward_seconds": 0.05}
    async with nothing_left():
        first = await bounded(rollout(script, **options).run(source, 0))
    assert [group[0].group_index for group in first.groups] == [1]
    stuck.set()
    second = await bounded(rollout(script, **options | {"over_sampling": 1}).run(source, 1))
    assert [group[0].group_index for group in second.groups] == [0]
    assert script.asked == [0, 1, 2, 3]
    assert asked == [0, 1, 2, 3, 0, 1]


# In threads.


async def test_a_slow_reward_in_a_thread_does_not_hold_up_the_event_loop_and_no_thread_is_left() -> None:
    lock, running, most = threading.Lock(), 0, 0
    loop_thread = threading.get_ident()

    def reward(sample: Any) -> float:
        nonlocal running, most
        assert threading.get_ident() != loop_thread
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return float(sample.response_length)

    async with nothing_left():
        result = await bounded(rollout(Scripted(), groups=4, reward=reward, reward_threads=3).run(Buffer(endless())))
    assert result.metrics["streamfold/rewards"] == 8
    assert most == 3


async def test_a_thread_that_outlasts_the_abort_is_told_of_and_its_result_thrown_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, asked = threading.Event(), []

    def reward(sample: Any) -> float:
        asked.append(sample.index)
        if sample.group_index == 0:
            assert gate.wait(10)
        return 1.0

    source = Buffer(endless(1))
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "reward": reward, "reward_seconds": 0.05}
    before = threading.active_count()
    await bounded(rollout(Scripted(), **options).run(source, 0))
    assert "1 calls of the reward function are still running" in caplog.text
    assert threading.active_count() == before + 1
    gate.set()
    while threading.active_count() > before:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    ((sample,),) = source.take(1)
    assert sample.reward is None
    source.put([[sample]])
    result = await bounded(rollout(Scripted(), **options | {"over_sampling": 1}).run(source, 1))
    assert result.groups == [[sample]]
    assert sample.reward == 1.0


def test_a_thread_that_ends_after_its_event_loop_does_no_harm() -> None:
    gate = threading.Event()

    def reward(sample: Any) -> float:
        if sample.group_index == 0:
            assert gate.wait(10)
        return 1.0

    before = threading.active_count()
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "reward": reward, "reward_seconds": 0.02}
    asyncio.run(rollout(Scripted(), **options).run(Buffer(endless(1))))
    gate.set()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("error", [LookupError("x"), StopIteration("x")], ids=["an error", "StopIteration"])
async def test_what_a_thread_raises_is_the_failure_of_its_group(error: Exception) -> None:
    def reward(_sample: Any) -> float:
        raise error

    with pytest.raises(StreamfoldError) as caught:
        await bounded(rollout(Scripted(), groups=1, reward=reward, max_failures=0).run(Buffer(endless())))
    cause = caught.value.__cause__
    assert error in (cause, getattr(cause, "__cause__", None))


# Of whole groups.


async def test_a_group_is_judged_once_as_a_whole_and_only_when_all_of_it_is_at_its_end() -> None:
    asked: list[list[int]] = []

    async def reward(samples: list[Any]) -> list[float]:
        asked.append([sample.index for sample in samples])
        return [float(sample.response_length) for sample in samples]

    source = Buffer(endless(3))
    script = Scripted({1: (3, "hang")}, wait=0.01)
    options: dict[str, Any] = {"partial_rollout": True, "reward": reward, "group_reward": True}
    first = await bounded(rollout(script, groups=1, over_sampling=2, **options).run(source))
    assert asked == [[3, 4, 5]]
    assert first.metrics["streamfold/rewards"] == 3
    second = await bounded(rollout(Scripted(), groups=1, **options).run(source))
    assert asked == [[3, 4, 5], [0, 1, 2]]
    assert [s.reward for s in second.groups[0]] == [2.0, 5.0, 2.0]


async def test_a_kept_group_is_not_judged_again() -> None:
    asked: list[int] = []

    def reward(samples: list[Any]) -> list[float]:
        asked.append(samples[0].group_index)
        return [1.0] * len(samples)

    source = Buffer(groups_of(4))
    trainer = rollout(Scripted(wait=0.01), groups=2, over_sampling=4, reward=reward, group_reward=True)
    for rollout_id in range(2):
        await bounded(trainer.run(source, rollout_id))
    assert sorted(asked) == [0, 1, 2, 3]


async def test_as_many_rewards_must_come_as_the_group_has_samples() -> None:
    trainer = rollout(Scripted(), groups=1, reward=lambda _samples: [1.0], group_reward=True, max_failures=0)
    with pytest.raises(StreamfoldError) as caught:
        await bounded(trainer.run(Buffer(endless())))
    assert "returned 1 rewards for 2 samples" in str(caught.value.__cause__)
