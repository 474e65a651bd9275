"""Metrics: each has a documented name, and says what happened to the calls and samples of a rollout or pool."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from streamfold import Buffer, Client, Pool, Rollout, RolloutConfig, prompt_groups
from streamfold.loopback import Loopback
from streamfold.rollout.figures import Spread
from streamfold.rollout.metric_names import METRICS, markdown_table
from streamfold.rollout.metrics import RolloutStats
from streamfold.samples.sample import Sample
from support.paths import ROOT
from support.rollouts import HostSource, Scripted, bounded, endless, groups_of, rollout

Status = Sample.Status
PREFIX = "streamfold/"


def names(metrics: dict[str, float]) -> set[str]:
    """The names as the table has them."""
    found = {name.removeprefix(PREFIX) for name in metrics}
    assert all(name.startswith(PREFIX) for name in metrics)
    return {"groups/dropped/<reason>" if name.startswith("groups/dropped/") else name for name in found}


def test_the_table_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").endswith(f"\n\n{markdown_table()}")


async def test_a_rollout_gives_every_metric_of_the_table_and_no_other() -> None:
    prompts = [Sample(prompt="p", tokens=[5, 6, 7 + i]) for i in range(8)]
    config = RolloutConfig(sampling_params={"max_new_tokens": 12, "ignore_eos": True}, groups=2, progress=False)
    dropped: list[int] = []

    def keep(group: Any) -> tuple[bool, str]:
        dropped.append(group[0].group_index)
        return len(dropped) > 1, "the first"

    with Loopback(token_rate=400) as loopback:
        async with Client(loopback.url) as client:
            parts = Rollout(client, config, reward=lambda sample: float(sample.index), filter=keep)
            result = await bounded(parts.run(Buffer(prompt_groups(prompts, 2))))
    assert names(result.metrics) == METRICS.keys()
    metrics = {name.removeprefix(PREFIX): value for name, value in result.metrics.items()}
    for name in ("ttft", "itl", "latency"):
        assert 0 < metrics[f"{name}/p50"] <= metrics[f"{name}/p90"] <= metrics[f"{name}/p99"]
    assert metrics["ttft/p50"] < metrics["latency/p50"]
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (12, 12)
    assert metrics["samples/truncated_ratio"] == 1
    assert metrics["groups/dropped/the first"] == 1
    rewards = [sample.reward for group in result.groups for sample in group]
    assert (metrics["reward/mean"], metrics["reward/max"]) == (pytest.approx(np.mean(rewards)), max(rewards))
    assert metrics["reward/std"] == pytest.approx(np.std(rewards))


async def test_what_there_was_none_of_has_no_figure() -> None:
    result = await bounded(rollout(Scripted(), groups=1).run(Buffer(groups_of(1))))
    missing = METRICS.keys() - names(result.metrics)
    assert {name.partition("/")[0] for name in missing} == {"groups", "ttft", "itl", "latency", "reward"}
    assert "groups/dropped/<reason>" in missing


async def test_the_ratios_are_shares_of_samples() -> None:
    script = Scripted({0: (2, Status.TRUNCATED), 1: (4, Status.COMPLETED), 2: (1, "hang"), 3: (1, Status.COMPLETED)})
    source = HostSource(groups_of(2))
    result = await bounded(rollout(script, groups=1, over_sampling=2, partial_rollout=True).run(source))
    assert result.metrics["streamfold/samples/truncated_ratio"] == 0.5
    assert result.metrics["streamfold/samples/aborted_ratio"] == 0.25
    assert result.metrics["streamfold/response_length/mean"] == 3
    assert result.metrics["streamfold/response_length/max"] == 4


async def test_a_pool_counts_from_one_reading_to_the_next() -> None:
    config = RolloutConfig(sampling_params={"max_new_tokens": 4, "ignore_eos": True}, groups=1, progress=False)
    with Loopback() as loopback:
        async with (
            Client(loopback.url) as client,
            Pool(Rollout(client, config, reward=lambda _: 1.0), Buffer(groups_of(3)), in_flight=3) as pool,
        ):
            await bounded(pool.next(3))
            first, second = pool.metrics(), pool.metrics()
    assert first["streamfold/ttft/p50"] > 0
    assert first["streamfold/reward/mean"] == 1
    assert not [name for name in second if "/p50" in name or "reward/" in name]


async def test_calls_of_others_are_not_counted() -> None:
    async def generate(sample: Any, _params: dict[str, Any], *, aborted: Any) -> Any:
        assert not aborted()
        sample.append_response_tokens(None, tokens=[1], log_probs=[-1.0], text="a")
        sample.status = Status.COMPLETED
        return sample

    with Loopback() as loopback:
        async with Client(loopback.url) as client:
            other = client.start([5, 6], {"max_new_tokens": 4, "ignore_eos": True})
            result = await bounded(rollout(generate, client=client, groups=1).run(Buffer(endless())))
            await other
    assert "streamfold/ttft/p50" not in result.metrics


def test_a_spread_is_that_of_numpy() -> None:
    values = np.random.default_rng(3).normal(5.0, 2.0, 1000)
    spread = Spread()
    assert (spread.mean, spread.std) == (0.0, 0.0)
    for value in values.tolist():
        spread.add(value)
    assert spread.mean == pytest.approx(values.mean())
    assert spread.std == pytest.approx(values.std())
    assert (spread.max, spread.count) == (values.max(), 1000)


def test_the_counts_of_another_process_are_added_with_its_figures() -> None:
    """Its samples stay there."""
    both, one, other = RolloutStats(), RolloutStats(), RolloutStats()
    for stats, rewards in ((one, [1.0, 3.0]), (other, [8.0])):
        for reward in rewards:
            for each in (stats, both):
                each.samples += 1
                each.reward.add(reward)
                each.calls.ttft.add(reward)
    other._running[1] = Sample(), 0
    one.add(pickle.loads(pickle.dumps(other)))
    one.add(RolloutStats())
    assert (one.samples, one.calls.ttft.quantile(1.0), one._running) == (3, 8.0, {})
    figures = [stats.reward.metrics("reward", "mean", "std", "max") for stats in (one, both)]
    assert figures[0] == pytest.approx(figures[1])
