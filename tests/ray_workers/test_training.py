"""The training loop with rollouts by two processes: it trains on the same prompts, and resumes across the updates."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import pytest

from streamfold.ray import RolloutWorkers
from streamfold.training.config import TrainConfig
from streamfold.training.loop import RolloutParts, train
from streamfold.training.task import read_prompts
from support.rollouts import bounded
from support.training import engine, make

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from streamfold import RolloutResult

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.usefixtures("_ray")]

CONFIG = TrainConfig(steps=3, groups=3, over_sampling=5, n_samples=2, max_new_tokens=24, bucket_bytes=1 << 19)


@contextlib.asynccontextmanager
async def by_two(parts: RolloutParts) -> AsyncIterator[Callable[[int], Awaitable[RolloutResult]]]:
    async with RolloutWorkers(
        2,
        client=parts.client,
        config=parts.config,
        source=parts.source,
        reward=parts.reward,
        worker_options={"num_cpus": 0},
    ) as workers:
        yield workers.run


async def test_the_loop_trains_on_what_workers_generate_and_resumes_across_updates(tmp_path: Path) -> None:
    path = make(tmp_path)
    with engine(path, batch_invariant=False, max_running_requests=3, token_rate=100.0) as server:
        reports = await bounded(train(server.url, path, read_prompts(), CONFIG, rollouts=by_two))
    assert [report.samples for report in reports] == [6] * 3
    assert all(math.isfinite(report.stats.grad_norm) for report in reports)
    assert reports[0].stats.ratio == pytest.approx(1.0, abs=1e-4)
    assert sum(report.resumed for report in reports[1:]) > 0
    assert max(report.versions for report in reports) > 1, "a response of two weight versions"
    assert all(report.stats.gap < 1e-5 for report in reports)
