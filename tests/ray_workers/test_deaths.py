"""Workers that are killed in the midst of long streams: what they had reported is resumed, token by token."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Buffer
from streamfold.loopback import Loopback
from support.ray_jobs import config, open_workers, undisturbed
from support.rollouts import bounded

if TYPE_CHECKING:
    from pathlib import Path

    from streamfold import Sample
    from streamfold.ray import RolloutWorkers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("_ray")]

GROUPS = 3
TOKENS = 200
LONG = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


async def saved(shared: RolloutWorkers, path: Path) -> list[Sample]:
    """The samples as the buffer has them."""
    await shared.save(path)
    buffer = Buffer()
    buffer.load(path)
    return [sample for group in buffer.take(len(buffer)) for sample in group]


async def reported(shared: RolloutWorkers, path: Path, tokens: int) -> dict[int, Sample]:
    """The samples by their index, once each has so many tokens in the buffer."""
    while True:
        samples = await saved(shared, path)
        if len(samples) == 2 * GROUPS and all(sample.response_length >= tokens for sample in samples):
            return {sample.index or 0: sample for sample in samples}
        await asyncio.sleep(0.02)


def sent(engine: Loopback) -> list[dict[str, Any]]:
    """The requests for tokens, in their order."""
    return [seen.json() for seen in engine.seen() if seen.path == "/generate"]


@pytest.mark.parametrize("killed", [1, 2])
async def test_samples_go_on_from_the_tokens_that_a_killed_worker_had_reported(tmp_path: Path, killed: int) -> None:
    with Loopback(token_rate=25) as engine:
        async with open_workers(engine, config(GROUPS, sampling_params=LONG), GROUPS) as shared:
            first = asyncio.create_task(shared.next(GROUPS))
            held = await bounded(reported(shared, tmp_path / "buffer", 5))
            assert len(sent(engine)) == 2 * GROUPS, "nothing was resumed until then"
            for pid in shared.pids[:killed]:
                os.kill(pid, signal.SIGKILL)
            groups = await bounded(first)
        requests = sent(engine)
    samples = {sample.index or 0: sample for group in groups for sample in group}
    assert samples.keys() == held.keys()
    wholes = {index: undisturbed(engine, sample, LONG) for index, sample in samples.items()}
    for index, sample in samples.items():
        whole = wholes[index]
        assert held[index].tokens == whole.tokens[: len(held[index].tokens)], "a prefix, with nothing lost or doubled"
        assert sample.tokens == whole.tokens
        assert sample.rollout_log_probs == whole.rollout_log_probs
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.shape[0] == len(sample.tokens) - 1
        assert "streamfold_restarted_tokens" not in sample.metadata
        sample.check()
    resumes = requests[2 * GROUPS :]
    for request in resumes:
        ids = request["input_ids"]
        index = next(index for index, whole in wholes.items() if whole.tokens[: len(ids)] == ids)
        assert len(ids) >= len(held[index].tokens), "the prompt and all that was reported"
        kept = len(ids) - (len(wholes[index].tokens) - TOKENS)
        assert request["sampling_params"]["max_new_tokens"] == TOKENS - kept
        assert kept >= 5
    assert len(resumes) == 2 * GROUPS if killed == 2 else 0 < len(resumes) < 2 * GROUPS
