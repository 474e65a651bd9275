"""Tracks every group from the source to the trainer, or back to the source, so that none is lost or given twice."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, TypeAlias

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
from streamfold.samples.metadata import add_counts, count_of, enter

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group, Source
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.runner import GroupOutcome
    from streamfold.rollout.scheduler import GroupScheduler

    FilterWithCount: TypeAlias = Callable[[Group, int], bool | tuple[bool, str | None]]

__all__ = ["GroupTracker"]

_logger = logging.getLogger("streamfold")


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

    # From the source.

    def take(self, n: int, version: int) -> list[Group]:
        """Take ``n`` groups from the source, in the rollout or weight version ``version``; stale ones are restarted.

        Raises:
            ValueError: a group does not have ``config.n_samples_per_prompt`` samples.
        """
        self._version = version
        taken = list(self._source.get_samples(n))  # a list: an exhausted generator would not be seen to be empty
        self.is_dry = not taken
        size = self._config.n_samples_per_prompt
        try:
            for group in taken:
                if not group or (size is not None and len(group) != size):
                    raise ValueError(f"the source gave a group of {len(group)} samples; n_samples_per_prompt is {size}")
                for sample in samples_of(group):
                    enter(sample)
                self._restart_if_stale(group, version)
        except BaseException:
            self._unfinished += taken
            raise
        if self._on_taken is not None:
            self._on_taken(taken)
        return taken

    def _restart_if_stale(self, group: Group, version: int) -> bool:
        limit = self._config.max_staleness
        if limit is None or version - start_of(group, version) <= limit:
            return False
        self._stats.groups["stale"] += 1
        self._stats.lost += restart_samples(samples_of(group))
        return True

    # From the scheduler.

    def record(self, outcome: GroupOutcome, in_flight: int) -> None:
        """Record a group that has ended while ``in_flight`` others are running.

        Raises:
            StreamfoldError: more groups have failed than ``config.max_failures``; its cause is the first failure.
        """
        self._classify(outcome, in_flight, is_wanted=True)
        if outcome.failures and len(self._failed) > self._config.max_failures:
            raise StreamfoldError(
                f"{len(self._failed)} groups have failed, but max_failures is {self._config.max_failures}. All groups "
                "were returned to the source; see the cause of this error"
            ) from self._failed[0].failures[0][1]

    def record_remaining(self, scheduler: GroupScheduler, *, are_wanted: bool = False) -> None:
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
            self._stats.lost += restart_samples(samples_of(replacement))
            self._forget(group)
            self._unfinished.append(replacement)

    def _classify(self, outcome: GroupOutcome, in_flight: int, *, is_wanted: bool) -> None:
        group = outcome.group
        if self._returns_all:
            mark_start(group, outcome.version)
        if outcome.failures:
            self._failed.append(outcome)
            sample, error = outcome.failures[0]
            _logger.warning("sample %s failed; its group is returned to the source", sample.index, exc_info=error)
        elif unfinished_samples(group):
            self._unfinished.append(group)
        elif is_wanted and is_complete(group, needs_reward=self._needs_reward):
            self._apply_filter(group, in_flight)
        else:
            self._extra.append(group)

    def _apply_filter(self, group: Group, in_flight: int) -> None:
        try:
            verdict = self._filter is None or self._filter(group, len(self.ready) + in_flight)
            keeps, reason = verdict if isinstance(verdict, tuple) else (verdict, None)
            _check_verdict(keeps)
        except BaseException:
            self._extra.append(group)
            raise
        if keeps:
            self.ready.append(group)
        else:
            self._drop(group, reason or "filter")

    # To the trainer.

    def deliver(self, group: Group, version: int) -> None:
        """Count a group that the trainer gets, and call ``done`` of the source."""
        self._stats.groups["done"] += 1
        self._stats.staleness.append(version - start_of(group, version))
        self._forget(group)

    # Back to the source.

    def return_stale(self, version: int) -> None:
        """Restart ready groups that have become stale, and return them."""
        stale = [self._restart_if_stale(group, version) for group in self.ready]
        returned = [group for group, is_stale in zip(self.ready, stale, strict=True) if is_stale]
        self.ready = [group for group, is_stale in zip(self.ready, stale, strict=True) if not is_stale]
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
            self._stats.groups["failed"] += 1
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

    def _is_returned(self, group: Group) -> bool:
        """Whether an aborted group is returned. A source with ``done`` gets all of them."""
        returns_all = self._returns_all or hasattr(self._source, "done")
        return returns_all or (self._config.partial_rollout and is_partial(group))

    def _return(self, groups: list[Group]) -> None:
        for group in groups:
            self._prepare_return(group)
        self._returning += groups
        if self._returning:
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
