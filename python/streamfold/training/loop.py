"""The training loop: rollout, checks, optimizer step, weights to the engine, and again. This is the file to copy."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import AutoTokenizer

from streamfold._core import Experts
from streamfold.client.client import Client
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.groups import count_tokens, prompt_groups, samples_of
from streamfold.rollout.rollout import Rollout
from streamfold.samples.sample import Sample
from streamfold.training.task import reward
from streamfold.training.trainer import Trainer
from streamfold.training.weights import send_weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path
    from typing import TypeAlias

    from streamfold.rollout.callbacks import RewardFunction
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.rollout import RolloutResult
    from streamfold.training.config import TrainConfig
    from streamfold.training.trainer import StepStats

    RunRollout: TypeAlias = Callable[[int], Awaitable[RolloutResult]]

__all__ = ["FIRST_VERSION", "RolloutParts", "StepReport", "in_this_process", "train"]

FIRST_VERSION = "0"
"""The weight version that the engine starts with."""


@dataclass(frozen=True)
class StepReport:
    """One step of a run: its rollout, its optimizer step, its weight update.

    Attributes:
        step: its number, from 0.
        samples: trained on.
        tokens: of their responses.
        aborted: groups that were cut at the end of the rollout.
        resumed: samples that went on from the tokens of an earlier rollout.
        reward: mean over the samples.
        stats: of the optimizer step.
        buckets: of weights that were sent to the engine.
        versions: mean number of weight versions that sampled one sample.
        seconds: of the rollout, of the optimizer step, of the weight update.
    """

    step: int
    samples: int
    tokens: int
    aborted: int
    resumed: int
    reward: float
    stats: StepStats
    buckets: int
    versions: float
    seconds: tuple[float, float, float]


@dataclass(frozen=True)
class RolloutParts:
    """What the rollouts are made of, wherever they run: all of it can be pickled.

    Attributes:
        client: makes the client of the engine.
        config: of the rollouts.
        source: makes the buffer with the prompts.
        reward: the reward function.
    """

    client: Callable[[], Client]
    config: RolloutConfig
    source: Callable[[], Buffer]
    reward: RewardFunction


@contextlib.asynccontextmanager
async def in_this_process(parts: RolloutParts) -> AsyncIterator[RunRollout]:
    """Rollouts in this process; yields what runs the one of a step."""
    async with parts.client() as client:
        rollout, buffer = Rollout(client, parts.config, reward=parts.reward), parts.source()
        yield functools.partial(rollout.run, buffer)


async def train(
    url: str,
    path: Path,
    prompts: Sequence[dict[str, Any]],
    config: TrainConfig,
    *,
    on_step: Callable[[StepReport], object] = lambda _report: None,
    rollouts: Callable[[RolloutParts], AbstractAsyncContextManager[RunRollout]] = in_this_process,
) -> list[StepReport]:
    """Train a model on its own samples.

    Args:
        url: of an engine with the model of ``path``, whose weight version is :data:`FIRST_VERSION`.
        path: the folder of the model and its tokenizer.
        prompts: with ``prompt`` and ``label``; they are repeated for ever.
        config: of the run.
        on_step: called after each step.
        rollouts: where they run: in this process, or by workers.

    Raises:
        StreamfoldError: too many groups failed, or the engine refused weights.
        ValueError: a check of the samples failed.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    trainer = Trainer(path, config)
    layers, top_k, experts = trainer.experts_shape
    parts = RolloutParts(
        client=functools.partial(Client, url, tokenizer=tokenizer, experts=Experts(layers, top_k, num_experts=experts)),
        config=config.rollout((tokenizer.eos_token_id,)),
        source=functools.partial(_make_buffer, prompts, tokenizer, config.n_samples),
        reward=reward,
    )
    async with rollouts(parts) as run_rollout:
        run = _Run(url, trainer, run_rollout, config)
        reports = []
        for step in range(config.steps):
            reports.append(await run.step(step))
            on_step(reports[-1])
    return reports


@dataclass(frozen=True)
class _Run:
    """What the steps of a run share."""

    url: str
    trainer: Trainer
    rollout: RunRollout
    config: TrainConfig

    async def step(self, step: int) -> StepReport:
        """A rollout, an optimizer step, and the new weights to the engine."""
        started = time.perf_counter()
        result = await self.rollout(step)  # aborts the rest, which returns to the source
        generated = time.perf_counter()
        stats = self.trainer.step(result.groups, version=str(step))
        trained = time.perf_counter()
        weights = self.trainer.weights()
        buckets = await send_weights(self.url, weights, str(step + 1), bucket_bytes=self.config.bucket_bytes)
        seconds = generated - started, trained - generated, time.perf_counter() - trained
        return _report(step, result, stats, buckets, seconds)


def _report(
    step: int, result: RolloutResult, stats: StepStats, buckets: int, seconds: tuple[float, float, float]
) -> StepReport:
    samples = samples_of([sample for group in result.groups for sample in group])
    rewards: list[Any] = [sample.reward for sample in samples]
    return StepReport(
        step=step,
        samples=len(samples),
        tokens=count_tokens(samples),
        aborted=int(result.metrics["streamfold/groups/aborted"]),
        resumed=int(result.metrics["streamfold/samples/resumed"]),
        reward=float(np.mean(rewards)),
        stats=stats,
        buckets=buckets,
        versions=float(np.mean([len({version for version, _, _ in sample.version_spans}) for sample in samples])),
        seconds=seconds,
    )


def _make_buffer(prompts: Sequence[dict[str, Any]], tokenizer: Any, n_samples: int) -> Buffer:  # noqa: ANN401  # transformers'
    return Buffer(prompt_groups(_samples(prompts, tokenizer), n_samples))


def _samples(prompts: Sequence[dict[str, Any]], tokenizer: Any) -> Iterator[Sample]:  # noqa: ANN401  # transformers'
    for prompt in itertools.cycle(prompts):
        yield Sample(prompt=prompt["prompt"], label=prompt["label"], tokens=tokenizer.encode(prompt["prompt"]))
