"""The trainer's filters, rewards and sample hooks, as our rollout functions call them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from support.host import installed
from support.host.helpers import Scripted, append, until
from support.host.slime.rollout.data_source import RolloutDataSourceWithBuffer
from support.host.slime.rollout.filter_hub.base_types import DynamicFilterOutput
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host.slime.utils.types import Sample
from support.host_calls import HOSTS, Status, entry_module
from support.host_rolls import rolled, scripted

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param):
        yield


# Filters and functions that see groups.


@pytest.mark.parametrize("verdict", [False, DynamicFilterOutput(keep=False), DynamicFilterOutput(False, "odd")])
def test_groups_that_the_dynamic_filter_drops_are_replaced_and_counted_by_reason(verdict: Any) -> None:
    args = scripted(Scripted(), rollout_batch_size=2, over_sampling_batch_size=2)

    def keep_even(args: Any, group: list[Sample]) -> Any:
        return True if (group[0].group_index or 0) % 2 == 0 else verdict

    args.dynamic_sampling_filter_path = keep_even
    groups, metrics = rolled(args)
    assert [group[0].group_index for group in groups] == [0, 2]
    reason = getattr(verdict, "reason", None)
    of_trainer = {name: value for name, value in metrics.items() if name.startswith("rollout/dynamic_filter/")}
    assert of_trainer == ({"rollout/dynamic_filter/drop_odd": 1} if reason else {})
    assert metrics[f"streamfold/groups/dropped/{reason or 'filter'}"] == 1
    others = [name for name in metrics if not name.startswith(("streamfold/", "rollout/dynamic_filter/"))]
    assert others == [], "these are the trainer's: rollout/rewards is its reward curve"


@pytest.mark.parametrize("verdict", [None, DynamicFilterOutput(keep=None)])  # type: ignore[arg-type]
def test_a_dynamic_filter_that_returns_no_verdict_is_refused_by_its_option(verdict: Any) -> None:
    args = scripted(Scripted(), rollout_batch_size=1)
    args.dynamic_sampling_filter_path = lambda args, group: verdict
    with pytest.raises(TypeError, match=r"--dynamic-sampling-filter-path returned None"):
        rolled(args)


def test_keep_when_insufficient_keeps_a_group_if_more_would_have_to_be_requested() -> None:
    """Of four groups in flight for two, the first two that are rejected go, the others stay."""
    generate = Scripted()
    args = scripted(generate, rollout_batch_size=2, over_sampling_batch_size=4)

    def never(args: Any, group: list[Sample]) -> DynamicFilterOutput:
        return DynamicFilterOutput(keep=False, reason="flat", keep_when_insufficient=True)

    args.dynamic_sampling_filter_path = never
    groups, metrics = rolled(args)
    assert [group[0].group_index for group in groups] == [2, 3]
    assert metrics["rollout/dynamic_filter/drop_flat"] == 2
    assert sorted(generate.calls) == [0, 1, 2, 3]


def test_the_sample_filter_sees_the_batch_and_the_other_hook_every_finished_group() -> None:
    seen: list[Any] = []
    args = scripted(Scripted(), rollout_batch_size=2, over_sampling_batch_size=2)
    args.dynamic_sampling_filter_path = lambda args, group: group[0].group_index != 0
    args.rollout_sample_filter_path = lambda args, groups: seen.append([g[0].index for g in groups])
    args.rollout_all_samples_process_path = lambda args, groups, source: seen.append(
        ([g[0].index for g in groups], source)
    )
    source = RolloutDataSourceWithBuffer(args)
    groups, _ = rolled(args, source)
    given = [group[0].index for group in groups]
    assert seen == [given, (sorted([0, *given]), source)]


def test_an_error_of_a_filter_ends_the_rollout_and_everything_goes_back() -> None:
    args = scripted(Scripted(), partial_rollout=True)

    def breaks(args: Any, groups: Any) -> None:
        raise LookupError("broken")

    args.rollout_sample_filter_path = breaks
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(LookupError, match="broken"):
        entry_module().generate_rollout(args, 0, source)
    assert not GenerateState(args).aborted
    ((sample,),) = source.buffer
    args.rollout_sample_filter_path = None
    assert rolled(args, source)[0] == [[sample]]


# Rewards and hooks.


def test_rewards_of_a_group_come_from_one_call() -> None:
    calls: list[list[Sample]] = []

    async def reward(args: Any, samples: list[Sample]) -> list[float]:
        calls.append(samples)
        return [float(sample.index or 0) for sample in samples]

    groups, metrics = rolled(scripted(Scripted(), n_samples_per_prompt=3, group_rm=True, custom_rm_path=reward))
    assert calls == groups
    assert [sample.reward for sample in groups[0]] == [0.0, 1.0, 2.0]
    assert metrics["streamfold/rewards"] == 3


def fanned(args: Any, sample: Sample, rewards: list[float | None]) -> list[Sample]:
    """Samples that one generation made of one, some with rewards."""
    made = [Sample(group_index=sample.group_index, index=sample.index, reward=reward) for reward in rewards]
    for each in made:
        append(each, args, [7], text="x")
        each.status = Status.COMPLETED
    return made


def test_samples_that_one_generate_call_made_are_judged_in_one_call() -> None:
    calls: list[int] = []

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> list[Sample]:
        return fanned(args, sample, [None, 0.5, None])

    async def reward(args: Any, samples: list[Sample]) -> list[float]:
        calls.append(len(samples))
        return [float(10 + i) for i in range(len(samples))]

    (group,), metrics = rolled(scripted(generate, n_samples_per_prompt=2, custom_rm_path=reward))
    assert [[sample.reward for sample in made] for made in group] == [[10.0, 0.5, 11.0]] * 2
    assert calls == [2, 2]
    assert metrics["streamfold/rewards"] == 4


def test_what_the_trainer_reads_of_a_dict_of_rewards_must_be_a_number(caplog: pytest.LogCaptureFixture) -> None:
    """Other values may be anything: the trainer's own judges put the parsed answer there."""
    answers: list[Any] = [{"score": None, "acc": 1.0}, {"acc": 1.0}, {"score": 0.5, "pred": None}]

    async def reward(args: Any, sample: Sample) -> Any:
        return answers.pop(0)

    args = scripted(Scripted(), custom_rm_path=reward, reward_key="score")
    ((sample,),), metrics = rolled(args)
    assert sample.reward == {"score": 0.5, "pred": None}
    assert metrics["streamfold/groups/failed"] == 2
    assert "the reward['score'] of sample 0 is None: it must be a finite number" in caplog.text


def test_hooks_see_a_sample_that_its_time_limit_ends() -> None:
    seen: list[tuple[int | None, str, int]] = []

    async def replace(args: Any, sample: Sample) -> Sample:
        seen.append((sample.index, sample.status.name, sample.response_length))
        return Sample(**{**vars(sample), "label": "hooked"})

    args = scripted(Scripted({0: [(1, "hang")]}), streamfold_sample_seconds=0.05, rollout_sample_hook_path=[replace])
    ((sample,),), metrics = rolled(args)
    assert (sample.label, sample.status.name, sample.reward) == ("hooked", "TRUNCATED", 1.0)
    assert seen == [(0, "TRUNCATED", 1)]
    assert metrics["streamfold/samples/timed_out"] == 1


def test_a_reward_call_that_fails_or_is_short_is_retried_for_all_of_them() -> None:
    answers: list[Any] = [OSError("no reward"), [1.0], [1.0, 2.0]]
    generated: list[int | None] = []
    calls: list[list[int | None]] = []

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> list[Sample]:
        generated.append(sample.index)
        return fanned(args, sample, [0.0] if sample.index else [None, None])

    async def reward(args: Any, samples: list[Sample]) -> Any:
        calls.append([sample.index for sample in samples])
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    args = scripted(generate, custom_rm_path=reward, partial_rollout=True, streamfold_group_tries=9)
    source = RolloutDataSourceWithBuffer(args)
    given: Any = [rolled(args, source)[0] for _ in range(3)]
    assert calls == [[0, 0]] * 3
    assert [group[0][0].index for (group,) in given] == [1, 2, 0]
    assert [sample.reward for sample in given[2][0][0]] == [1.0, 2.0]
    assert generated == [0, 1, 2], "what a reward failed for is not generated again"


def test_hooks_see_each_sample_once_when_it_is_finished_and_may_replace_it() -> None:
    seen: list[tuple[int | None, str, bool]] = []

    def look(args: Any, sample: Sample, evaluation: bool) -> None:
        seen.append((sample.index, sample.status.name, evaluation))

    async def replace(args: Any, sample: Sample) -> Sample:
        await asyncio.sleep(0)
        return Sample(**{**vars(sample), "label": "hooked"})

    generate = Scripted({1: [(1, "hang"), (1, Status.TRUNCATED)]})
    args = scripted(
        generate,
        over_sampling_batch_size=2,
        partial_rollout=True,
        rollout_sample_hook_path=[look, replace],
    )
    source = RolloutDataSourceWithBuffer(args)
    first, second = (rolled(args, source, i)[0][0][0] for i in range(2))
    assert (first.index, second.index) == (0, 1)
    assert (first.label, second.label) == ("hooked", "hooked")
    assert second.response == "xx"
    assert seen[:2] == [(0, "COMPLETED", False), (1, "TRUNCATED", False)]


def test_a_hook_also_sees_a_sample_that_finished_during_its_abort() -> None:
    at_work = asyncio.Event()

    async def faster_than_its_abort(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        try:
            if sample.index:
                at_work.set()
                await asyncio.Event().wait()
            await at_work.wait()
        finally:
            sample.tokens = [300]
            append(sample, args, [301], text="x")
            sample.status = Status.COMPLETED
        return sample

    vars(faster_than_its_abort)["abort_mode"] = "request"
    hooked: list[int | None] = []
    args = scripted(faster_than_its_abort, over_sampling_batch_size=2)
    args.rollout_sample_hook_path = [lambda args, sample: hooked.append(sample.index)]
    source = RolloutDataSourceWithBuffer(args)
    rolled(args, source)
    rolled(args, source, 1)
    assert hooked[:2] == [0, 1]
    assert hooked.count(1) == 1


def test_a_hook_that_runs_during_an_abort_finishes() -> None:
    hooked: list[int | None] = []
    at_work = asyncio.Event()

    async def slow(args: Any, sample: Sample) -> None:
        if sample.index == 1:
            at_work.set()
            await until(lambda: GenerateState(args).aborted)
        await until(at_work.is_set)
        hooked.append(sample.index)

    args = scripted(Scripted(), over_sampling_batch_size=2, rollout_sample_hook_path=[slow])
    source = RolloutDataSourceWithBuffer(args)
    rolled(args, source)
    assert hooked == [0, 1]
    ((kept,),) = source.buffer
    assert (kept.index, kept.status, kept.reward) == (1, Status.COMPLETED, 1.0)
