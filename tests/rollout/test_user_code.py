"""What users write for a rollout, with the types that they would give it: mypy checks it, and it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from streamfold.rollout.buffer import Buffer
from streamfold.rollout.groups import Group, Source, prompt_groups
from streamfold.rollout.pool import Pool
from streamfold.rollout.rollout import Rollout, RolloutConfig, RolloutResult
from streamfold.samples.sample import Sample
from support.rollouts import NoEngine, append, bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import assert_type

    from streamfold import Client
    from streamfold.rollout.callbacks import Generate
else:

    def assert_type(value: object, _expected: object) -> object:
        return value


def reward(sample: Sample) -> float:
    return float(len(sample.response))


async def reward_as_dict(sample: Sample) -> dict[str, float]:
    return {"length": float(sample.response_length)}


async def rewards_of_group(group: list[Sample]) -> list[float]:
    return [float(sample.response_length) for sample in group]


def keep(group: Group) -> tuple[bool, str | None]:
    return all(sample.reward is not None for sample in group), "no reward"


def mark(groups: list[Group]) -> None:
    for group in groups:
        group[0].remove_sample = True


class Agent:
    abort_mode = "request"

    async def __call__(self, sample: Sample, params: dict[str, Any], *, aborted: Callable[[], bool]) -> Sample:
        assert not aborted()
        append(sample, params["max_new_tokens"])
        sample.status = Sample.Status.COMPLETED
        return sample


async def two_of_one(sample: Sample, params: dict[str, Any], *, aborted: Callable[[], bool]) -> list[Sample]:
    return [await Agent()(sample, params, aborted=aborted), Sample(status=Sample.Status.COMPLETED)]


class Prompts:
    """A source of the user's own."""

    def get_samples(self, num_samples: int) -> list[Group]:
        return list(prompt_groups([Sample(prompt="Hi")] * num_samples, 2))

    def add_samples(self, samples: list[Group]) -> None:
        pass


def forever() -> Iterator[Group]:
    for index, (sample,) in enumerate(prompt_groups([Sample(prompt="Hi")] * 100, 1)):
        yield [Sample(group_index=index, index=2 * index + i, prompt=sample.prompt) for i in range(2)]


async def test_functions_of_users_fit_the_types_of_a_rollout() -> None:
    config = RolloutConfig(groups=3, sampling_params={"max_new_tokens": 4}, progress=False)
    buffer = Buffer(forever())
    source: Source = buffer
    client = cast("Client", NoEngine())
    agent: Generate = Agent()
    rollout = Rollout(client, config, reward=reward, filter=keep, sample_filter=mark, generate=agent)
    checked: RolloutResult = await bounded(rollout.run(source))
    assert_type(checked.groups, list[list[Sample]])
    assert_type(buffer.take(0), list[list[Sample]])
    assert [[sample.reward for sample in group] for group in checked.groups] == [[4.0, 4.0]] * 3
    assert [[sample.remove_sample for sample in group] for group in checked.groups] == [[True, False]] * 3
    other = Rollout(client, config, reward=reward_as_dict, generate=two_of_one)
    assert len((await other.run(Prompts())).groups) == 3
    grouped = RolloutConfig(groups=3, group_reward=True, progress=False, sampling_params={"max_new_tokens": 1})
    async with Pool(Rollout(client, grouped, reward=rewards_of_group, generate=Agent()), buffer) as pool:
        groups = await pool.next(2)
        assert_type(groups, list[list[Sample]])
        assert_type(pool.metrics(), dict[str, float])
    assert [[sample.reward for sample in group] for group in groups] == [[1.0, 1.0]] * 2
