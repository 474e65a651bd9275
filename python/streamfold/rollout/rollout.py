"""One rollout: groups in flight until there are enough of them, the rest cut, kept, and handed back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from streamfold.client._internal import internals_of
from streamfold.rollout import groups as rules
from streamfold.rollout.config import RolloutConfig
from streamfold.rollout.metrics import EventLoopLag, RolloutStats
from streamfold.rollout.rewards import Rewards
from streamfold.rollout.scheduler import GroupScheduler
from streamfold.rollout.tracker import GroupTracker
from streamfold.samples.completion import CompletionOptions, complete

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from streamfold.client.client import Client
    from streamfold.rollout.groups import Group, Source
    from streamfold.rollout.scheduler import Generate
    from streamfold.rollout.tracker import Filter

__all__ = ["Rollout", "RolloutConfig", "RolloutResult"]

log = logging.getLogger("streamfold")


@dataclass(frozen=True)
class RolloutResult:
    """What a rollout came to.

    Attributes:
        groups: finished groups, sorted by index; fewer than were asked for only if the source had no more.
        metrics: what happened, as plain floats under names like ``rollout/tokens_per_second``; seconds, tokens,
            samples, groups.
    """

    groups: list[Group]
    metrics: dict[str, float]

    @property
    def is_short(self) -> bool:
        """Whether the source ran dry before there were enough groups."""
        return bool(self.metrics["rollout/source_dry"])


class Rollout:
    """Gives groups of finished samples, rollout after rollout; each may run in an event loop of its own.

    Args:
        client: of the engines.
        config: how it is done.
        reward: gives a finished sample its reward: a number or a dict, once, when its text is whole. With
            ``config.group_reward`` it takes the list of a group's samples and gives a list of rewards. It may be
            ``async``; if not it runs in threads. None: there are no rewards.
        filter: the dynamic filter: whether a finished group is given to the trainer, or a pair of that and a reason.
            Groups that are not are forgotten, and others are asked for.
        sample_filter: called once with the groups of a rollout, before they are given. It may mark samples that are
            not to be trained on (``remove_sample``).
        generate: generates one sample, instead of :func:`~streamfold.samples.completion.complete`. See
            :class:`~streamfold.rollout.scheduler.Generate`.
        on_abort: called when the end of a rollout begins, before anything is cut: for a host's own flag.

    A generator or reward that raises ends neither its siblings nor the rollout. The group goes back to the source with
    all that it has, when the rollout is over, and the error is logged; ``config.max_failures`` and
    ``config.group_tries`` say how often that may happen.

    Raises:
        ValueError: ``max_new_tokens`` is missing: the built-in generator cannot resume without it.
    """

    def __init__(
        self,
        client: Client,
        config: RolloutConfig,
        *,
        reward: Callable[[Any], Any] | None = None,
        filter: Filter | None = None,  # noqa: A002  # the field's name for it
        sample_filter: Callable[[list[Group]], object] | None = None,
        generate: Generate | None = None,
        on_abort: Callable[[], object] = lambda: None,
    ) -> None:
        if generate is None and "max_new_tokens" not in config.sampling_params:
            raise ValueError("sampling_params must hold max_new_tokens: a resumed call is given what is left of it")
        self.config: Final = config
        self.client: Final = client
        self._reward = reward
        self._filter = filter
        self.sample_filter: Final = sample_filter
        self._generate: Generate = _Complete(client, config) if generate is None else generate
        self._on_abort = on_abort

    async def run(self, source: Source, rollout_id: int = 0) -> RolloutResult:
        """Give ``config.groups`` finished groups, or as many as the source has.

        Groups that are in flight when there are enough are cut, within ``config.abort_seconds``. What they have goes
        back to the source if the rules say so.

        Args:
            source: of groups.
            rollout_id: noted on samples that a later rollout goes on with, as ``metadata["start_rollout_id"]``.

        Raises:
            StreamfoldError: too many groups failed. Everything that was taken has gone back to the source.
            asyncio.CancelledError: this was cancelled. Likewise; a second cancel ends drains.
            Exception: what the source or a filter raised. Likewise.
        """
        stats = RolloutStats()
        rewards = self.rewards()
        tracker = self.tracker(source, stats)
        scheduler = self.scheduler(stats, rewards, await self.engines())
        target, retried = self.config.groups, self.client.retried

        def state() -> tuple[int, str]:
            return len(tracker.ready), f"{len(scheduler)} in flight, {stats.tokens} tokens"

        with EventLoopLag(target if self.config.progress else None, state) as watch:
            try:
                await self._collect(scheduler, tracker, rollout_id)
                await scheduler.abort()
                tracker.enter_rest(scheduler)
                groups = sorted(tracker.ready, key=rules.index_of)
                if self.sample_filter is not None:
                    self.sample_filter(groups)
                tracker.settle()
            except BaseException:
                try:
                    await scheduler.abort(now=True)
                finally:
                    tracker.enter_rest(scheduler)
                    tracker.return_all()
                raise
            finally:
                if rewards is not None:
                    rewards.report()
            for group in groups:
                tracker.deliver(group, rollout_id)
        stats.retries = self.client.retried - retried
        if len(groups) < target:
            stats.is_dry = True
            log.warning("the source ran dry: rollout %d ends with %d of %d groups", rollout_id, len(groups), target)
        return RolloutResult(groups, stats.metrics(watch))

    async def _collect(self, scheduler: GroupScheduler, tracker: GroupTracker, rollout_id: int) -> None:
        """Keep groups in flight until enough have ended."""
        target = self.config.groups
        while len(tracker.ready) < target:
            while not tracker.is_dry and len(tracker.ready) + len(scheduler) < target:
                for group in tracker.take(self.config.ask, rollout_id):
                    scheduler.start(group, rollout_id)
            ended = await scheduler.ended()
            if ended is None:
                return
            tracker.enter(ended)
            if ended.is_cancelled:
                raise asyncio.CancelledError

    # The parts, which a pool uses too.

    def rewards(self) -> Rewards | None:
        """What computes rewards in the running event loop."""
        return None if self._reward is None else Rewards(self._reward, self.config.reward_threads)

    def tracker(self, source: Source, stats: RolloutStats, *, gives_back_all: bool = False) -> GroupTracker:
        """A tracker of what is taken from ``source``."""
        judged = self._reward is not None
        return GroupTracker(source, self.config, self._filter, stats, judged=judged, gives_back_all=gives_back_all)

    def scheduler(self, stats: RolloutStats, rewards: Rewards | None, engines: int) -> GroupScheduler:
        """A flight in the running event loop."""
        return GroupScheduler(
            self.config,
            self._generate,
            rewards=rewards,
            at_once=self.config.concurrency * engines,
            abort_engines=self.client.abort_engines,
            on_abort=self._on_abort,
            stats=stats,
        )

    async def engines(self) -> int:
        """How many engines the client knows, at least one."""
        return max(1, len(await self.client.workers()))


class _Complete:
    """The built-in generator."""

    abort_mode: Final = "request"

    def __init__(self, client: Client, config: RolloutConfig) -> None:
        self._client = client
        self._config = config
        self._stop_ids = set(config.stop_ids)
        self._ranks = [0] * config.dp_size

    async def __call__(
        self,
        sample: Any,  # noqa: ANN401  # ours or a host's
        sampling_params: Mapping[str, Any],
        *,
        aborted: Callable[[], bool],
    ) -> Any:  # noqa: ANN401
        with self._rank() as rank:
            headers, extra = internals_of(self._client).engine_spec.route(getattr(sample, "session_id", None), rank)
            options = CompletionOptions(
                logprobs=self._config.logprobs,
                stop_ids=self._stop_ids,
                headers=headers,
                extra=extra,
                aborted=aborted,
            )
            return await complete(self._client, sample, sampling_params, resume=self._config.resume, options=options)

    @contextlib.contextmanager
    def _rank(self) -> Iterator[int | None]:
        """Name the rank with the fewest requests, if there are several."""
        if len(self._ranks) == 1:
            yield None
            return
        rank = self._ranks.index(min(self._ranks))
        self._ranks[rank] += 1
        try:
            yield rank
        finally:
            self._ranks[rank] -= 1
