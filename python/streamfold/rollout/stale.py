"""``StalePolicy``: what becomes of groups with tokens older than ``RolloutConfig.max_staleness``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from streamfold.rollout.groups import restart_samples, samples_of, sort_key, unfinished_samples
from streamfold.samples.metadata import add_counts, count_of
from streamfold.samples.staleness import mask_stale, stale_tokens, would_mask_all

if TYPE_CHECKING:
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group
    from streamfold.rollout.metrics import RolloutStats

__all__ = ["StalePolicy"]

_logger = logging.getLogger("streamfold")


class StalePolicy:
    """Applies ``RolloutConfig.stale`` to groups. A token is stale if it is older than ``max_staleness``.

    Args:
        config: the rules.
        stats: counts.
    """

    def __init__(self, config: RolloutConfig, stats: RolloutStats) -> None:
        self._config = config
        self._stats = stats

    def is_spoiled(self, group: Group, version: int) -> bool:
        """Whether a group is to be dropped in ``version``, and would be in any later one."""
        if self._config.stale not in ("drop", "keep_masked") or not self._count(group, version):
            return False
        if self._config.stale == "drop":
            return True
        oldest = self._oldest(version)
        return not unfinished_samples(group) and all(would_mask_all(sample, oldest) for sample in samples_of(group))

    def sort(self, groups: list[Group], version: int) -> tuple[list[Group], list[Group]]:
        """Those groups that are kept, and those that are to be dropped."""
        kept: list[Group] = []
        spoiled: list[Group] = []
        for group in groups:
            (spoiled if self.is_spoiled(group, version) else kept).append(group)
        return kept, spoiled

    def restart(self, group: Group, version: int) -> bool:
        """Restart a stale group from its prompt, if that is the rule; whether it was restarted."""
        if self._config.stale != "restart" or not self._count(group, version):
            return False
        samples = samples_of(group)
        for sample in samples:
            if sample.response_length:
                add_counts(sample, stale_restarts=1)
        self._stats.groups["stale"] += 1
        self._stats.lost += restart_samples(samples)
        times = max(count_of(sample, "stale_restarts") for sample in samples)
        if times > 1:
            _logger.warning(
                "group %d was restarted as stale %d times: its samples take more than %s versions (max_staleness), and "
                'may never end; stale="keep_masked" keeps them',
                sort_key(group)[0],
                times,
                self._config.max_staleness,
            )
        return True

    def deliver(self, group: Group, version: int) -> None:
        """Count the stale tokens of a group that the trainer gets, and mask them, if that is the rule."""
        stale = self._count(group, version)
        self._stats.stale_tokens += stale
        if stale and self._config.stale == "keep_masked":
            for sample in samples_of(group):
                mask_stale(sample, self._oldest(version))

    def _count(self, group: Group, version: int) -> int:
        """How many tokens are stale."""
        if self._config.max_staleness is None:
            return 0
        oldest = self._oldest(version)
        return sum(stale_tokens(sample, oldest) for sample in samples_of(group))

    def _oldest(self, version: int) -> int:
        """The oldest version that is not stale."""
        return version - (self._config.max_staleness or 0)
