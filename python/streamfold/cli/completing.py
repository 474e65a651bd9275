"""Complete many samples, each with sampling parameters of its own, for ``streamfold rollout``."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from streamfold.client._internal import internals_of
from streamfold.rollout.generate import CompleteSample
from streamfold.rollout.rewards import Rewards
from streamfold.rollout.scheduler import GroupScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from streamfold.client.client import Client
    from streamfold.rollout.callbacks import RewardFunction
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.outcome import GroupOutcome
    from streamfold.samples.sample import Sample

__all__ = ["complete_all"]


class _WithOwnParams(CompleteSample):
    """Generates a sample with the sampling parameters of its metadata."""

    async def __call__(
        self, sample: Sample, sampling_params: Mapping[str, Any], /, *, aborted: Callable[[], bool]
    ) -> Sample:
        del sampling_params  # of all samples: none
        return await super().__call__(sample, sample.metadata["sampling_params"], aborted=aborted)


async def complete_all(
    client: Client,
    samples: Iterable[Sample],
    on_end: Callable[[Sample, BaseException | None], object],
    *,
    config: RolloutConfig,
    stats: RolloutStats,
    reward: RewardFunction | None = None,
) -> None:
    """Complete and judge all ``samples``, each with its own ``metadata["sampling_params"]``.

    The scheduler is that of :class:`~streamfold.Rollout`, with groups of one sample. It is not a rollout itself: that
    gives its groups to the trainer when it ends, while here each sample has to be on the disk when it ends.

    ``on_end`` is called once for each sample that was started, with the error that ended it, if there was one; what it
    raises ends the run. Cancelling this aborts what is in flight and hands the partial samples to ``on_end`` too. A
    second cancel ends the drains of side data.

    Args:
        client: of the engine.
        samples: taken when there is room for them.
        on_end: takes a sample when it has ended.
        config: the limits, and how samples are requested.
        stats: counts.
        reward: the reward function; samples with a reward keep it.
    """
    rewards = None if reward is None else Rewards(reward, config.reward_threads)
    scheduler = GroupScheduler(
        config,
        _WithOwnParams(client, config),
        rewards=rewards,
        concurrency=config.concurrency,
        abort_engines=client.abort_engines,
        on_abort=lambda: None,
        stats=stats,
        observers=internals_of(client).observers,
    )
    rest = iter(samples)
    # Samples that are being judged hold no slot: others are generated meanwhile.
    most = config.concurrency if rewards is None else 2 * config.concurrency
    try:
        while True:
            for sample in itertools.islice(rest, most - len(scheduler)):
                scheduler.start([sample], 0)
            outcome = await scheduler.next_outcome()
            if outcome is None:
                return
            _report(outcome, on_end)
            if outcome.is_cancelled:
                raise asyncio.CancelledError
    finally:
        try:
            await scheduler.abort(now=True)
        finally:
            while (outcome := scheduler.pop_outcome()) is not None:
                _report(outcome, on_end)
            if rewards is not None:
                rewards.warn_if_running()


def _report(outcome: GroupOutcome, on_end: Callable[[Sample, BaseException | None], object]) -> None:
    (sample,) = outcome.group
    on_end(sample, outcome.failures[0][1] if outcome.failures else None)
