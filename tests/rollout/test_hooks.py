"""What integrations add to a rollout or pool: how many engines there are, the groups taken, a filter that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from streamfold.rollout.buffer import Buffer
from streamfold.rollout.parts import RolloutHooks
from streamfold.rollout.pool import Pool
from streamfold.rollout.rollout import Rollout, RolloutConfig, parts_of
from streamfold.samples.sample import Sample
from support.rollouts import NoEngine, Scripted, bounded, groups_of

if TYPE_CHECKING:
    from streamfold.rollout.groups import Group


def hooked(hooks: RolloutHooks, generate: Any = None, **options: Any) -> Rollout:
    config = RolloutConfig(sampling_params={"max_new_tokens": 8}, progress=False, **options)
    client: Any = NoEngine()
    return Rollout(client, config, generate=generate or Scripted(), hooks=hooks)


@pytest.mark.parametrize(("count", "engines"), [(7, 7), (0, 1), (None, 1)])
async def test_the_number_of_engines_is_the_hook_s_or_the_client_s(count: int | None, engines: int) -> None:
    rollout = hooked(RolloutHooks(count_engines=lambda: count), groups=1)
    assert await parts_of(rollout).count_engines() == engines


async def test_concurrency_counts_for_each_of_the_hook_s_engines() -> None:
    for count, most in ((3, 6), (1, 2)):
        generate = Scripted(wait=0.02)
        rollout = hooked(RolloutHooks(count_engines=lambda count=count: count), generate, groups=8, concurrency=2)  # type: ignore[misc]
        await bounded(rollout.run(Buffer(groups_of(8))))
        assert generate.most == most


@pytest.mark.parametrize("pooled", [False, True])
async def test_each_list_of_groups_that_was_taken_is_shown_before_they_start(pooled: bool) -> None:
    generate = Scripted()
    taken: list[int | None] = []

    def on_taken(groups: list[Group]) -> None:
        assert not {sample.index for group in groups for sample in group} & set(generate.asked)
        taken.extend(group[0].group_index for group in groups)

    rollout, buffer = hooked(RolloutHooks(on_taken=on_taken), generate, groups=3), Buffer(groups_of(5))
    if pooled:
        async with Pool(rollout, buffer, in_flight=2) as pool:
            await bounded(pool.next(5))
    else:
        await bounded(rollout.run(buffer))
    assert taken == list(range(5 if pooled else 3))


async def test_the_filter_gets_the_number_of_other_groups_that_are_ready_or_in_flight() -> None:
    others: list[int] = []

    def keep(group: Group, count: int) -> tuple[bool, str | None]:
        others.append(count)
        return group[0].group_index != 0, "first"

    script = dict.fromkeys(range(10), (1, Sample.Status.COMPLETED))
    rollout = hooked(RolloutHooks(filter=keep), Scripted(script), groups=3, over_sampling=4)
    result = await bounded(rollout.run(Buffer(groups_of(5))))
    assert [group[0].group_index for group in result.groups] == [1, 2, 3]
    assert result.metrics["streamfold/groups/dropped/first"] == 1
    assert others == [3, 2, 2, 2]
