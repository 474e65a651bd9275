"""Where each group has got to that was taken from the source: none is lost without a word."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

from streamfold.errors import StreamfoldError
from streamfold.rollout import groups as rules
from streamfold.samples.metadata import add_counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group, Source
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.scheduler import Ended, GroupScheduler

    Filter: TypeAlias = Callable[[Group], bool | tuple[bool, str | None]]

__all__ = ["GroupTracker"]

log = logging.getLogger("streamfold")


class GroupTracker:
    """Takes groups from a source, files them as they end, and gives back what the trainer does not get.

    Args:
        source: of the groups.
        config: the rules.
        keep: the dynamic filter: whether a finished group is of use, and why not. None: all are.
        judged: whether there are rewards, without which no group is finished.
        stats: what is counted.
        gives_back_all: whether everything goes back, whatever the source is; a pool's does.

    Attributes:
        ready: finished groups for the trainer, in the order in which they ended.
        is_dry: whether the source had none left when it was asked last.
    """

    def __init__(
        self,
        source: Source,
        config: RolloutConfig,
        keep: Filter | None,
        stats: RolloutStats,
        *,
        judged: bool,
        gives_back_all: bool = False,
    ) -> None:
        self.ready: list[Group] = []
        self.is_dry = False
        self._source = source
        self._config = config
        self._keep = keep
        self._stats = stats
        self._judged = judged
        self._gives_back_all = gives_back_all
        self._now = 0
        self._surplus: list[Group] = []
        self._open: list[Group] = []
        self._failed: list[Ended] = []
        self._back: list[Group] = []  # on their way back, until the source has taken them

    # From the source.

    def take(self, n: int, now: int) -> list[Group]:
        """Ask the source for ``n`` groups, in rollout (or weight version) ``now``; those too old start again.

        Raises:
            ValueError: a group has not the number of samples that it should have.
        """
        self._now = now
        taken = list(self._source.get_samples(n))  # a generator would never be seen to be empty
        self.is_dry = not taken
        size = self._config.n_samples_per_prompt
        try:
            for group in taken:
                if not group or (size is not None and len(group) != size):
                    raise ValueError(f"the source gave a group of {len(group)} samples; n_samples_per_prompt is {size}")
                self.refresh(group, now)
        except BaseException:
            self._open += taken
            raise
        return taken

    def refresh(self, group: Group, now: int) -> bool:
        """Let a group start again if it is too old; whether it was."""
        limit = self._config.max_staleness
        if limit is None or now - rules.begun_in(group, now) <= limit:
            return False
        self._stats.groups["stale"] += 1
        self._stats.lost += rules.start_again(rules.samples_of(group))
        return True

    # From the scheduler.

    def enter(self, ended: Ended, *, wanted: bool = True) -> None:
        """File a group that has ended. The filter is asked only about those that the trainer may get.

        Raises:
            StreamfoldError: more groups have failed than ``config.max_failures``; the cause is the first failure.
        """
        self._file(ended, wanted=wanted)
        if ended.failures and len(self._failed) > self._config.max_failures:
            raise StreamfoldError(
                f"{len(self._failed)} groups have failed, more than max_failures: the fault is not theirs. All groups "
                "have gone back to the source; see the cause"
            ) from self._failed[0].failures[0][1]

    def enter_rest(self, scheduler: GroupScheduler, *, wanted: bool = False) -> None:
        """File what an aborted flight has not told yet."""
        try:
            while (ended := scheduler.take_ended()) is not None:
                self._file(ended, wanted=wanted)  # whether too many have failed is of no matter any more
        except BaseException:
            self.enter_rest(scheduler)
            raise
        for group, again in scheduler.abandon():
            self._stats.lost += rules.start_again(rules.samples_of(again))
            self._forget(group)
            self._open.append(again)

    def _file(self, ended: Ended, *, wanted: bool) -> None:
        group = ended.group
        if self._gives_back_all:
            rules.stamp(group, ended.now)
        if ended.failures:
            self._failed.append(ended)
            sample, error = ended.failures[0]
            log.warning("sample %s failed, and its group goes back to the source", sample.index, exc_info=error)
        elif rules.open_ones(group):
            self._open.append(group)
        elif wanted and rules.is_over(group, judged=self._judged):
            self._ask_filter(group)
        else:
            self._surplus.append(group)

    def _ask_filter(self, group: Group) -> None:
        try:
            verdict = self._keep is None or self._keep(group)
        except BaseException:
            self._surplus.append(group)
            raise
        keeps, reason = verdict if isinstance(verdict, tuple) else (verdict, None)
        if keeps:
            self.ready.append(group)
        else:
            self._drop(group, reason or "filter")

    # To the trainer, and back to the source.

    def deliver(self, group: Group, now: int) -> None:
        """Take note that the trainer gets a group."""
        self._stats.groups["done"] += 1
        self._stats.staleness.append(now - rules.begun_in(group, now))
        self._forget(group)

    def weed(self, now: int) -> None:
        """Give finished groups back that are too old by now, to start again."""
        old = [self.refresh(group, now) for group in self.ready]
        back = [group for group, is_old in zip(self.ready, old, strict=True) if is_old]
        self.ready = [group for group, is_old in zip(self.ready, old, strict=True) if not is_old]
        self._give_back(back)

    def settle(self) -> None:
        """Give back what is left when a rollout has its groups, or drop it: as the rules say."""
        self.settle_failed()
        back: list[Group] = []
        for group in self._open:
            self._stats.groups["aborted"] += 1
            if self._goes_back(group):
                back.append(group)
            else:
                self._stats.lost += rules.tokens_of(rules.samples_of(group))
                self._drop(group, "aborted")
        for group in self._surplus:
            if self._config.keep_finished or self._gives_back_all:
                self._stats.groups["kept"] += 1
                back.append(group)
            else:
                self._drop(group, "surplus")
        self._open, self._surplus = [], []
        self._give_back(back)

    def settle_failed(self) -> int:
        """Give back the groups that failed, but drop those that have too often; how many went back."""
        back: list[Group] = []
        failed, self._failed = self._failed, []
        for group in (ended.group for ended in failed):
            samples = rules.samples_of(group)
            self._stats.groups["failed"] += 1
            add_counts((rules.open_ones(group) or samples)[0], failures=1)
            if sum((sample.metadata or {}).get("failures", 0) for sample in samples) < self._config.group_tries:
                back.append(group)
            else:
                log.error(
                    "group %d is dropped: it has failed in %d rollouts",
                    rules.index_of(group)[0],
                    self._config.group_tries,
                )
                self._drop(group, "failed")
        self._give_back(back)
        return len(back)

    def return_all(self) -> None:
        """Give everything back that was taken and that the trainer did not get."""
        self._stats.groups["aborted"] += len(self._open)
        back = [*(ended.group for ended in self._failed), *self._open, *self._surplus, *self.ready]
        self._failed, self._open, self._surplus, self.ready = [], [], [], []
        self._give_back(back)

    def _goes_back(self, group: Group) -> bool:
        """Whether a group that was cut is given back: all are to a source that keeps account of them."""
        accounts = self._gives_back_all or hasattr(self._source, "done")
        return accounts or (self._config.partial_rollout and rules.is_partial(group))

    def _give_back(self, groups: list[Group]) -> None:
        for group in groups:
            self._make_fit(group)
        self._back += groups
        if self._back:
            self._source.add_samples(sorted(self._back, key=rules.index_of))
            self._back = []

    def _make_fit(self, group: Group) -> None:
        """Let samples that are not to be gone on with start again; note when the others were begun."""
        unfinished = rules.open_ones(group)
        if unfinished:
            again = unfinished
            if self._config.partial_rollout and rules.is_partial(group):
                again = []
            elif not self._config.partial_rollout and not self._config.keep_finished:
                again = rules.samples_of(group)
            self._stats.lost += rules.start_again(again)
            self._stats.kept += rules.tokens_of(unfinished)
            self._stats.groups["put_back"] += 1
            self._stats.groups["fresh"] += not rules.is_begun(group)
        rules.stamp(group, self._now)

    def _drop(self, group: Group, reason: str) -> None:
        self._stats.dropped[reason] += 1
        self._forget(group)

    def _forget(self, group: Group) -> None:
        done = getattr(self._source, "done", None)
        if done is not None:
            done([group])
