"""``Rollout``: generates and judges groups until there are enough, aborts the rest, and returns it to the source."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamfold.client.observer import Observation, Subject
from streamfold.rollout.config import RolloutConfig
from streamfold.rollout.generate import CompleteSample
from streamfold.rollout.groups import count_tokens, samples_of, sort_key
from streamfold.rollout.metrics import EventLoopLag, RolloutStats
from streamfold.rollout.parts import RolloutHooks, RolloutParts
from streamfold.rollout.user_code import UserCode
from streamfold.rollout.watch import StallWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.client.client import Client
    from streamfold.rollout.callbacks import Filter, Generate, RewardFunction, SampleFilter
    from streamfold.rollout.groups import Group, Source
    from streamfold.rollout.scheduler import Scheduler
    from streamfold.rollout.tracker import GroupTracker

__all__ = ["Rollout", "RolloutConfig", "RolloutResult", "parts_of"]

_logger = logging.getLogger("streamfold")


@dataclass(frozen=True)
class RolloutResult:
    """The groups and metrics of one rollout.

    Attributes:
        groups: finished groups, sorted by index; fewer than ``RolloutConfig.groups`` only if the source had no more, or
            ``max_groups_drawn`` was reached.
        metrics: counts of tokens, samples and groups, and seconds, as floats under names like
            ``streamfold/tokens_per_second``.
        shortage: why there are fewer groups, and what became of the others, as in "the source ran out: rollout 0 ends
            with 0 of 8 groups; 64 groups dropped: all rewards equal". Empty: there are enough.
    """

    groups: list[Group]
    metrics: dict[str, float]
    shortage: str = ""

    def __repr__(self) -> str:
        samples = samples_of([sample for group in self.groups for sample in group])
        tokens, seconds = count_tokens(samples), self.metrics.get("streamfold/seconds", 0.0)
        return (
            f"<RolloutResult: {len(self.groups)} groups of {len(samples)} samples, {tokens} tokens in {seconds:.1f} s>"
        )

    @property
    def is_short(self) -> bool:
        """Whether there are fewer groups than ``RolloutConfig.groups``."""
        return bool(self.shortage)


class Rollout:
    """Generates groups of finished samples, one rollout after the other; each may run in another event loop.

    Args:
        client: of the engines.
        config: how many groups, how they are generated, and what becomes of unfinished ones.
        reward: the reward function: takes a finished sample and returns its reward: a finite number, or a dict with
            such numbers, in which anything else is a note. It is called once per sample, when its text is complete.
            With ``config.group_reward`` it takes the list of a group's samples and returns a list of rewards. It may be
            ``async``; otherwise it runs in threads. Anything that is no such reward (NaN, text) fails the group. None:
            no rewards.
        filter: the dynamic filter: takes a finished group, and returns whether the trainer gets it, or a pair of that
            and a reason. Rejected groups are dropped, and others are taken from the source. A filter that returns None
            or an awaitable ends the rollout with a ``TypeError``.
        sample_filter: called once with the groups of a rollout, before they are returned. It may set
            ``remove_sample`` on samples that are not to be trained on.
        generate: generates one sample, in place of :func:`~streamfold.complete`; see
            :class:`~streamfold.rollout.callbacks.Generate`.
        on_abort: called when the abort at the end of a rollout begins, before any request is aborted.
        hooks: for integrations of trainers.

    If a generate or reward function raises, the error is logged, the other samples of the group and the rollout
    continue, and the group is returned to the source at the end of the rollout with everything that it has.
    ``config.max_failures``, ``config.max_failure_rate`` and ``config.group_tries`` limit how often. A generate function
    that raises is first called again for that sample: ``config.sample_retries``. ``sys.exit()`` in any of these
    functions ends no process: it is a ``RuntimeError`` that names the function. A ``KeyboardInterrupt`` is let through.

    While no group comes in for a minute, a warning is logged, each minute: with the oldest group in flight, what its
    samples do, and the reasons for which others were dropped.

    Raises:
        ValueError: ``config.sampling_params`` has no ``max_new_tokens``, which the built-in generate function needs.
    """

    def __init__(
        self,
        client: Client,
        config: RolloutConfig,
        *,
        reward: RewardFunction | None = None,
        filter: Filter | None = None,  # noqa: A002  # the field's name for it
        sample_filter: SampleFilter | None = None,
        generate: Generate | None = None,
        on_abort: Callable[[], object] = lambda: None,
        hooks: RolloutHooks | None = None,
    ) -> None:
        if generate is None and "max_new_tokens" not in config.sampling_params:
            raise ValueError("sampling_params must have max_new_tokens: a resumed request gets what is left of it")
        self._parts = RolloutParts(
            client=client,
            config=config,
            generate=CompleteSample(client, config) if generate is None else generate,
            reward=reward,
            filter=filter,
            sample_filter=sample_filter,
            on_abort=on_abort,
            hooks=RolloutHooks() if hooks is None else hooks,
        )

    def __repr__(self) -> str:
        return f"<Rollout of {type(self.client).__name__}: {self.config!r}>"

    @property
    def client(self) -> Client:
        """The client of the engines."""
        return self._parts.client

    @property
    def config(self) -> RolloutConfig:
        """The configuration."""
        return self._parts.config

    async def run(self, source: Source, rollout_id: int = 0) -> RolloutResult:
        """Generate ``config.groups`` finished groups, or as many as the source has.

        Groups that are in flight when there are enough are aborted, within ``config.abort_seconds``; rewards have
        ``config.reward_seconds``, unless their groups are not kept. Unfinished and surplus groups are returned to the
        source, or dropped, as the configuration says.

        Args:
            source: of groups.
            rollout_id: set as ``metadata["start_rollout_id"]`` on samples that a later rollout resumes.

        Raises:
            StreamfoldError: more groups failed than ``config.max_failures`` or ``config.max_failure_rate`` allow.
            asyncio.CancelledError: this was cancelled. A second cancel ends drains.
            Exception: what the source or a filter raised. In all three cases every group that was taken has been
                returned to the source.
        """
        parts = self._parts
        stats = RolloutStats()
        rewards = parts.rewards()
        tracker = parts.tracker(source, stats, returns_all=False)
        scheduler = parts.scheduler(stats, rewards, await parts.count_engines())
        target, retried = parts.config.groups, parts.client.retried
        progress = parts.progress(f"rollout {rollout_id}", target, stats, tracker, lambda: len(scheduler))
        timeline = Observation(parts.observers, Subject("rollouts", "rollouts"))
        with timeline.work(f"rollout {rollout_id}"), EventLoopLag() as lag, progress:
            try:
                with StallWatch(tracker, stats, lambda: scheduler):
                    await self._collect(scheduler, tracker, rollout_id)
                with timeline.work("abort", in_flight=len(scheduler)):
                    await scheduler.abort(keeps_rewards=tracker.keeps_rewards)
                tracker.record_remaining(scheduler)
                groups = sorted(tracker.ready, key=sort_key)
                if parts.sample_filter is not None:
                    with UserCode("the sample filter"):
                        parts.sample_filter(groups)
                tracker.return_unused()
            except BaseException:
                try:
                    await scheduler.abort(now=True)
                finally:
                    tracker.record_remaining(scheduler)
                    tracker.return_all()
                raise
            finally:
                if rewards is not None:
                    rewards.warn_if_running()
            for group in groups:
                tracker.deliver(group, rollout_id)
        stats.retries = parts.client.retried - retried
        shortage = ""
        if len(groups) < target:
            shortage = f"{tracker.note_shortage()}: rollout {rollout_id} ends with {len(groups)} of {target} groups"
            shortage += stats.explain_shortage()
            _logger.warning("%s", shortage)
        return RolloutResult(groups, stats.metrics(lag), shortage)

    async def _collect(self, scheduler: Scheduler, tracker: GroupTracker, rollout_id: int) -> None:
        """Keep groups in flight until enough of them are ready, or the source has no more."""
        config = self._parts.config
        while len(tracker.ready) < config.groups:
            while not (tracker.is_dry or tracker.is_drawn_out) and len(tracker.ready) + len(scheduler) < config.groups:
                for group in tracker.take(config.take_size, rollout_id):
                    scheduler.start(group, rollout_id)
            outcome = await scheduler.next_outcome()
            if outcome is None:
                return
            tracker.record(outcome, len(scheduler))
            if outcome.is_cancelled:
                raise asyncio.CancelledError


def parts_of(rollout: Rollout) -> RolloutParts:
    """The parts of a rollout, for pools and integrations."""
    return rollout._parts  # noqa: SLF001  # the package's own access
