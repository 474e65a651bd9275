"""Tracks every group from the source to the trainer, or back to the source, so that none is lost or given twice."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Final, TypeAlias

from streamfold.errors import StreamfoldError
from streamfold.rollout.groups import (
    count_tokens,
    has_started,
    is_complete,
    is_partial,
    mark_start,
    restart_samples,
    samples_of,
    sort_key,
    start_of,
    unfinished_samples,
)  # fmt: skip
from streamfold.rollout.stale import StalePolicy
from streamfold.rollout.user_code import UserCode
from streamfold.samples.metadata import add_counts, count_of, enter

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group, Source
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.outcome import GroupOutcome
    from streamfold.rollout.scheduler import Scheduler

    FilterWithCount: TypeAlias = Callable[[Group, int], bool | tuple[bool, str | None]]

__all__ = ["GroupTracker"]

_logger = logging.getLogger("streamfold")

_MIN_STARTED: Final = 16  # groups, before the share of failed ones means anything


class GroupTracker:
    """Takes groups from a source, sorts them by their outcome, and returns those that the trainer does not get.

    Args:
        source: of the groups.
        config: the rules.
        filter: takes a finished group, and how many others are ready or in flight. None: the trainer gets all groups.
        on_taken: called with each list of groups that was taken.
        stats: counts.
        needs_reward: whether a group without rewards is not complete.
        returns_all: whether all groups are returned, also to a source without ``done``, as in a pool.

    Attributes:
        ready: complete groups for the trainer, in the order in which they ended.
        is_dry: whether the source had no group when it was last called.
        accepted: how many groups have become ready.
    """

    def __init__(
        self,
        source: Source,
        config: RolloutConfig,
        *,
        filter: FilterWithCount | None,  # noqa: A002  # the field's name for it
        on_taken: Callable[[list[Group]], object] | None,
        stats: RolloutStats,
        needs_reward: bool,
        returns_all: bool,
    ) -> None:
        self.ready: list[Group] = []
        self.is_dry: bool = False
        self.accepted: int = 0
        self._source = source
        self._config = config
        self._filter = filter
        self._on_taken = on_taken
        self._stats = stats
        self._needs_reward = needs_reward
        self._returns_all = returns_all
        self._version = 0
        self._extra: list[Group] = []  # complete, but not needed
        self._unfinished: list[Group] = []
        self._failed: list[GroupOutcome] = []
        self._returning: list[Group] = []  # kept until add_samples has succeeded
        self._drawn = 0
        self._ended = 0
        self._stale = StalePolicy(config, stats)

    # From the source.

    @property
    def is_drawn_out(self) -> bool:
        """Whether ``config.max_groups_drawn`` groups were taken."""
        limit = self._config.max_groups_drawn
        return limit is not None and self._drawn >= limit

    def take(self, n: int, version: int) -> list[Group]:
        """Take ``n`` groups from the source, in the rollout or weight version ``version``.

        Stale ones are restarted, or others taken in their place. No more than ``config.max_groups_drawn`` are taken.

        Raises:
            ValueError: a group does not have ``config.n_samples_per_prompt`` samples.
        """
        self._version = version
        taken: list[Group] = []
        try:
            while drawn := self._draw(n - len(taken)):
                kept, spoiled = self._stale.sort(drawn, version)
                taken += kept
                for group in spoiled:
                    self._drop(group, "stale")
                if not spoiled:
                    break
            for group in taken:
                self._stale.restart(group, version)
        except BaseException:
            self._unfinished += taken
            raise
        if taken and self._on_taken is not None:
            self._on_taken(taken)
        return taken

    def _draw(self, n: int) -> list[Group]:
        """Draw ``n`` groups, or as many as may be drawn, and check them."""
        if self._config.max_groups_drawn is not None:
            n = min(n, self._config.max_groups_drawn - self._drawn)
        if n <= 0:
            return []
        with UserCode("get_samples of the source", self._source):
            drawn = list(self._source.get_samples(n))  # a list: an exhausted generator would not be seen to be empty
        self.is_dry = not drawn
        self._drawn += len(drawn)
        self._stats.drawn += len(drawn)
        size = self._config.n_samples_per_prompt
        try:
            for group in drawn:
                if not group or (size is not None and len(group) != size):
                    raise ValueError(f"the source gave a group of {len(group)} samples; n_samples_per_prompt is {size}")
                for sample in samples_of(group):
                    enter(sample)
        except BaseException:
            self._unfinished += drawn
            raise
        return drawn

    def note_shortage(self) -> str:
        """Note in the counts, and return, why no more groups can be taken."""
        if self.is_drawn_out:
            self._stats.is_drawn_out = True
            return f"{self._drawn} groups were drawn, as many as max_groups_drawn"
        self._stats.is_dry = True
        return "the source ran out"

    # From the scheduler.

    def record(self, outcome: GroupOutcome, in_flight: int) -> None:
        """Record a group that has ended while ``in_flight`` others are running.

        Raises:
            StreamfoldError: more groups have failed than ``config.max_failures`` or ``config.max_failure_rate`` allow;
                its cause is the first failure.
        """
        self._classify(outcome, in_flight, is_wanted=True)
        if outcome.failures and (limit := self._exceeded_limit(self._ended + in_flight)):
            raise StreamfoldError(
                f"{len(self._failed)} groups have failed{limit}. All groups were returned to the source; see the cause "
                "of this error"
            ) from self._failed[0].failures[0][1]

    def _exceeded_limit(self, started: int) -> str:
        """The limit that the number of failed groups exceeds, of ``started`` ones; empty if it exceeds none."""
        failed, most, rate = len(self._failed), self._config.max_failures, self._config.max_failure_rate
        if most is not None and failed > most:
            return f", but max_failures is {most}"
        if rate is not None and started >= _MIN_STARTED and failed > rate * started:
            return f" of {started} that were started, but max_failure_rate is {rate:g}"
        return ""

    def count_anew(self) -> None:
        """Count anew, from now on, what the limits of one rollout concern: groups that were drawn, and that failed."""
        self._drawn = self._ended = 0

    def record_remaining(self, scheduler: Scheduler, *, are_wanted: bool = False) -> None:
        """Record all groups of an aborted scheduler. The number of failures is not limited here.

        Args:
            scheduler: aborted.
            are_wanted: whether the trainer may get complete groups; otherwise they are extra ones.
        """
        try:
            while (outcome := scheduler.pop_outcome()) is not None:
                self._classify(outcome, len(scheduler), is_wanted=are_wanted)
        except BaseException:
            self.record_remaining(scheduler)
            raise
        for group, replacement in scheduler.abandon_running():
            samples = samples_of(replacement)
            self._stats.count_ended(samples, len(samples))
            self._stats.lost += restart_samples(samples)
            self._forget(group)
            self._unfinished.append(replacement)

    def _classify(self, outcome: GroupOutcome, in_flight: int, *, is_wanted: bool) -> None:
        group = outcome.group
        self._ended += 1
        self._stats.count_ended(samples_of(group), len(unfinished_samples(group)))
        if self._returns_all:
            mark_start(group, outcome.version)
        if outcome.failures:
            self._failed.append(outcome)
            self._stats.groups["failed"] += 1
            sample, error = outcome.failures[0]
            _logger.warning("sample %s failed; its group is returned to the source", sample.index, exc_info=error)
        elif unfinished_samples(group):
            self._unfinished.append(group)
        elif is_wanted and is_complete(group, needs_reward=self._needs_reward):
            if self._stale.is_spoiled(group, self._version):
                self._drop(group, "stale")
            else:
                self._apply_filter(group, in_flight)
        else:
            self._extra.append(group)

    def _apply_filter(self, group: Group, in_flight: int) -> None:
        try:
            with UserCode("the filter"):
                verdict = self._filter is None or self._filter(group, len(self.ready) + in_flight)
            keeps, reason = verdict if isinstance(verdict, tuple) else (verdict, None)
            _check_verdict(keeps)
        except BaseException:
            self._extra.append(group)
            raise
        if keeps:
            self.ready.append(group)
            self.accepted += 1
        else:
            self._drop(group, reason or "filter")

    # To the trainer.

    def deliver(self, group: Group, version: int) -> None:
        """Count a group that the trainer gets, mask its stale tokens, and call ``done`` of the source."""
        self._stale.deliver(group, version)
        self._stats.groups["done"] += 1
        self._stats.count_delivered(samples_of(group))
        self._stats.staleness.append(version - start_of(group, version))
        self._forget(group)

    # Back to the source.

    def drop_stale(self, version: int) -> None:
        """Drop ready groups that have become stale, or restart and return them, as ``config.stale`` says."""
        kept, spoiled = self._stale.sort(self.ready, version)
        returned = [group for group in kept if self._stale.restart(group, version)]
        restarted = {id(group) for group in returned}
        self.ready = [group for group in kept if id(group) not in restarted]
        for group in spoiled:
            self._drop(group, "stale")
        self._return(returned)

    def return_unused(self) -> None:
        """Return failed, unfinished and extra groups, or drop them, as the configuration says."""
        self.return_failed()
        returned: list[Group] = []
        for group in self._unfinished:
            self._stats.groups["aborted"] += 1
            if self._is_returned(group):
                returned.append(group)
            else:
                self._stats.lost += count_tokens(samples_of(group))
                self._drop(group, "aborted")
        for group in self._extra:
            if self._config.keep_finished or self._returns_all:
                self._stats.groups["kept"] += 1
                returned.append(group)
            else:
                self._drop(group, "surplus")
        self._unfinished, self._extra = [], []
        self._return(returned)

    def return_failed(self) -> int:
        """Return failed groups, or drop those that failed ``config.group_tries`` times; how many were returned."""
        returned: list[Group] = []
        failed, self._failed = self._failed, []
        for group in (outcome.group for outcome in failed):
            samples = samples_of(group)
            add_counts((unfinished_samples(group) or samples)[0], failures=1)
            if sum(count_of(sample, "failures") for sample in samples) < self._config.group_tries:
                returned.append(group)
            else:
                _logger.error(
                    "group %d is dropped: it failed in %d rollouts, as many as group_tries",
                    sort_key(group)[0],
                    self._config.group_tries,
                )
                self._drop(group, "failed")
        self._return(returned)
        return len(returned)

    def return_all(self) -> None:
        """Return every group that was taken and that the trainer did not get."""
        self._stats.groups["aborted"] += len(self._unfinished)
        returned = [*(outcome.group for outcome in self._failed), *self._unfinished, *self._extra, *self.ready]
        self._failed, self._unfinished, self._extra, self.ready = [], [], [], []
        self._return(returned)

    def keeps_rewards(self, group: Group) -> bool:
        """Whether rewards of a group are of use if the rollout ends now: it is neither dropped nor restarted whole."""
        if not unfinished_samples(group):
            return self._config.keep_finished or self._returns_all
        if not self._config.partial_rollout and not self._config.keep_finished:
            return False
        return self._config.partial_rollout or self._returns_all or hasattr(self._source, "done")

    def _is_returned(self, group: Group) -> bool:
        """Whether an aborted group is returned. A source with ``done`` gets all of them."""
        returns_all = self._returns_all or hasattr(self._source, "done")
        return returns_all or (self._config.partial_rollout and is_partial(group))

    def _return(self, groups: list[Group]) -> None:
        for group in groups:
            self._prepare_return(group)
        self._returning += groups
        if self._returning:
            with UserCode("add_samples of the source", self._source):
                self._source.add_samples(sorted(self._returning, key=sort_key))
            self._returning = []

    def _prepare_return(self, group: Group) -> None:
        """Restart the samples that must not be resumed, and mark when the others started."""
        unfinished = unfinished_samples(group)
        if unfinished:
            restarted = unfinished
            if self._config.partial_rollout and is_partial(group):
                restarted = []
            elif not self._config.partial_rollout and not self._config.keep_finished:
                restarted = samples_of(group)
            self._stats.lost += restart_samples(restarted)
            self._stats.kept += count_tokens(unfinished)
            self._stats.groups["put_back"] += 1
            self._stats.groups["fresh"] += not has_started(group)
        mark_start(group, self._version)

    def _drop(self, group: Group, reason: str) -> None:
        self._stats.dropped[reason] += 1
        self._forget(group)

    def _forget(self, group: Group) -> None:
        done = getattr(self._source, "done", None)
        if done is not None:
            with UserCode("done of the source", self._source):
                done([group])


def _check_verdict(keeps: object) -> None:
    """Raise TypeError for what a filter returns by mistake: None counts as False, and an awaitable as True."""
    if keeps is None or inspect.isawaitable(keeps):
        what = "None" if keeps is None else f"a {type(keeps).__name__}: it is async"
        if inspect.iscoroutine(keeps):
            keeps.close()
        raise TypeError(
            f"the filter returned {what}; it must return True or False, or a pair of that and the reason for False"
        )
