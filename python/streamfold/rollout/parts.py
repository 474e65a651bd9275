"""Internal: the parts of a run, built from the arguments of ``Rollout``, for ``Rollout`` and ``Pool``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamfold.client._internal import totals_of
from streamfold.client.observer import unique
from streamfold.rollout.progress import ProgressView, RunState
from streamfold.rollout.rewards import Rewards
from streamfold.rollout.scheduler import GroupScheduler
from streamfold.rollout.spans import NO_SPANS, Spans
from streamfold.rollout.tracker import GroupTracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.client.client import Client
    from streamfold.client.observer import Observer
    from streamfold.rollout.callbacks import Filter, Generate, RewardFunction, SampleFilter
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group, Source
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.scheduler import Scheduler

__all__ = ["RolloutHooks", "RolloutParts"]


@dataclass(frozen=True, kw_only=True)
class RolloutHooks:
    """Functions that an integration of a trainer adds to a rollout, and to a pool over it, besides the user's.

    Attributes:
        count_engines: how many engines there are; None, as result too: ask the client.
        on_taken: called with each list of groups that was taken from the source.
        spans: around groups and samples, of a trainer's trace.
        shows_bar: whether the trainer shows a progress bar of its own. Then only log lines tell of the progress.
        scheduler: in place of one that runs groups in this process. Takes the counts, and what returns the version of
            now, if that may change.
        filter: in place of the user's filter. Takes a complete group, and how many other groups are ready or in flight.
    """

    count_engines: Callable[[], int | None] | None = None
    on_taken: Callable[[list[Group]], object] | None = None
    spans: Spans = NO_SPANS
    shows_bar: bool = False
    scheduler: Callable[[RolloutStats, Callable[[], int] | None], Scheduler] | None = None
    filter: Callable[[Group, int], bool | tuple[bool, str | None]] | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """The arguments of a ``Rollout``, and the parts that a run of it, or a pool, needs."""

    client: Client
    config: RolloutConfig
    generate: Generate
    reward: RewardFunction | None
    filter: Filter | None
    sample_filter: SampleFilter | None
    on_abort: Callable[[], object]
    hooks: RolloutHooks = field(default_factory=RolloutHooks)

    def rewards(self) -> Rewards | None:
        """What calls the reward function in the running event loop."""
        return None if self.reward is None else Rewards(self.reward, self.config.reward_threads)

    def tracker(self, source: Source, stats: RolloutStats, *, returns_all: bool) -> GroupTracker:
        """A tracker of the groups of ``source``."""
        return GroupTracker(
            source,
            self.config,
            filter=self.hooks.filter or self._filter_with_count(),
            on_taken=self.hooks.on_taken,
            stats=stats,
            needs_reward=self.reward is not None,
            returns_all=returns_all,
        )

    def scheduler(
        self, stats: RolloutStats, rewards: Rewards | None, engines: int, version: Callable[[], int] | None = None
    ) -> Scheduler:
        """A scheduler in the running event loop."""
        if self.hooks.scheduler is not None:
            return self.hooks.scheduler(stats, version)
        return GroupScheduler(
            self.config,
            self.generate,
            rewards=rewards,
            concurrency=self.config.concurrency * engines,
            abort_engines=self.client.abort_engines,
            on_abort=self.on_abort,
            stats=stats,
            version=version,
            spans=self.hooks.spans,
            observers=self.observers,
        )

    def progress(
        self, name: str, total: int | None, stats: RolloutStats, tracker: GroupTracker, in_flight: Callable[[], int]
    ) -> ProgressView:
        """What shows the progress of a run: ``total`` groups, or None in a pool, which never ends."""

        def look() -> RunState:
            return RunState(
                done=tracker.accepted,
                in_flight=in_flight(),
                tokens=stats.received,
                calls=totals_of(self.client),
                counts={"aborted": stats.aborted, "failed": stats.groups["failed"], "dropped": stats.dropped.total()},
            )

        draws, is_shown = not self.hooks.shows_bar, self.config.progress
        return ProgressView(name, "groups", total, look, draws=draws, is_shown=is_shown)

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those of the client, and the trace of the configuration."""
        internals = getattr(self.client, "__client_internals__", None)  # a stand-in of a test has none
        trace = () if self.config.trace is None else (self.config.trace,)
        return unique((*(internals().observers if internals is not None else ()), *trace))

    async def count_engines(self) -> int:
        """How many engines there are, at least one."""
        count = None if self.hooks.count_engines is None else self.hooks.count_engines()
        return max(1, len(await self.client.workers()) if count is None else count)

    def _filter_with_count(self) -> Callable[[Group, int], Any] | None:
        keep = self.filter
        return None if keep is None else lambda group, _others: keep(group)
