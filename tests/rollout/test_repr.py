"""What a notebook or a debugger shows of a rollout's objects: a few lines, whatever they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold.rollout.buffer import Buffer
from streamfold.rollout.pool import Pool
from streamfold.rollout.rollout import RolloutConfig, RolloutResult
from support.host.slime.utils.types import Sample as HostSample
from support.rollouts import Scripted, bounded, endless, groups_of, rollout

if TYPE_CHECKING:
    from streamfold.samples.sample import Sample


def big_groups() -> list[list[Sample]]:
    groups = groups_of(64, 8)
    for group in groups:
        for sample in group:
            sample.tokens = list(range(5_000))
            sample.rollout_routed_experts = np.zeros((5_000, 4, 8), np.int32)
    return groups


def shown(value: Any) -> str:
    text = repr(value)
    assert len(text) <= 3 * 120, text
    assert text.count("\n") <= 2
    assert "0x" not in text
    return text


def test_a_buffer_shows_how_many_groups_are_where() -> None:
    buffer = Buffer(big_groups())
    buffer.put(buffer.take(5)[:2])
    assert shown(buffer) == "<Buffer: 2 groups wait, 3 in flight, 5 drawn>"
    assert "slime.utils.types.Sample: 0 groups" in shown(Buffer(sample_type=HostSample))


def test_a_rollout_shows_its_client_and_the_settings_that_were_changed() -> None:
    text = shown(rollout(Scripted(), groups=4, stop_ids=tuple(range(500)), sampling_params={"stop": ["x"] * 900}))
    assert text.startswith("<Rollout of ")
    assert "groups=4" in text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling_params": {"max_new_tokens": 10, "stop": ["word " * 100] * 100}, "stop_ids": tuple(range(1_000))},
        {
            "sampling_params": {f"parameter_{i}": [i] * 100 for i in range(100)}, "n_samples_per_prompt": 8,
            "over_sampling": 100_000, "concurrency": 4_096, "starts_per_ms": 128, "partial_rollout": True,
            "mask_offpolicy": True, "keep_finished": False, "group_reward": True, "reward_threads": 64,
            "abort_seconds": 12.345678, "resume": "restart", "logprobs": False, "stop_ids": tuple(range(1_000)),
            "dp_size": 8, "max_staleness": 12, "seed": 1 << 62, "max_failures": 1_000, "group_tries": 10,
            "progress": False,
        },
    ],
)  # fmt: skip
def test_a_configuration_shows_the_settings_that_were_changed(options: dict[str, Any]) -> None:
    text = shown(RolloutConfig(groups=4, **options))
    assert text.startswith("RolloutConfig(groups=4")
    assert ("concurrency" in text) == ("concurrency" in options)


async def test_a_result_shows_counts() -> None:
    result = await bounded(rollout(Scripted(), groups=3).run(Buffer(endless())))
    assert shown(result).startswith("<RolloutResult: 3 groups of 6 samples, 12 tokens in ")
    assert shown(RolloutResult(big_groups(), result.metrics))


async def test_a_pool_shows_what_is_in_flight_and_ready() -> None:
    pool = Pool(rollout(Scripted(), groups=3), Buffer(endless()))
    assert shown(pool) == "<Pool: closed, 0 groups in flight, 0 ready, version 0>"
    async with pool:
        await bounded(pool.next(3))
        assert shown(pool).startswith("<Pool: open, ")
        await pool.pause()
        assert shown(pool).startswith("<Pool: paused, 0 groups in flight")
    assert shown(pool).startswith("<Pool: closed, ")
