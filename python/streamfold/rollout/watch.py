"""``StallWatch``: warns while no group comes in, with the oldest one in flight and what became of the others."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.scheduler import Scheduler
    from streamfold.rollout.tracker import GroupTracker

__all__ = ["StallWatch"]

_logger = logging.getLogger("streamfold")

_STALL_SECONDS: Final = 60.0
_LOOKS: Final = 20  # in that time


class StallWatch:
    """Logs a warning when no group has become ready for a minute, and at each further minute.

    Args:
        tracker: counts the groups that became ready.
        stats: counts the others.
        scheduler: returns the scheduler; None while there is none, as in a pool that is paused.
    """

    def __init__(self, tracker: GroupTracker, stats: RolloutStats, scheduler: Callable[[], Scheduler | None]) -> None:
        self._tracker = tracker
        self._stats = stats
        self._scheduler = scheduler

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Watch from now on, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._begin()
        self._schedule_look()

    def stop(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _begin(self) -> None:
        self._accepted, self._since, self._warnings = self._tracker.accepted, self._loop.time(), 0

    def _schedule_look(self) -> None:
        self._timer = self._loop.call_later(_STALL_SECONDS / _LOOKS, self._look)

    def _look(self) -> None:
        scheduler = self._scheduler()
        if scheduler is None or not len(scheduler) or self._tracker.accepted != self._accepted:
            self._begin()
        elif self._loop.time() - self._since >= _STALL_SECONDS * (self._warnings + 1):
            self._warnings += 1
            _logger.warning("%s", self._describe(scheduler))
        self._schedule_look()

    def _describe(self, scheduler: Scheduler) -> str:
        now, oldest = self._loop.time(), scheduler.oldest
        text = f"no group has come in for {now - self._since:.0f} s: {len(scheduler)} in flight, "
        text += f"{len(self._tracker.ready)} ready{self._stats.explain_shortage()}"
        if oldest is not None:
            text += f"; the oldest is group {oldest.index}, started {now - oldest.started_at:.0f} s ago: {oldest.state}"
        return text
