"""What happened in a rollout, counted; how long the event loop stood still; and the bar that shows it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.progress import Progress, TaskID
    from typing_extensions import Self

__all__ = ["EventLoopLag", "RolloutStats"]

_EVERY_SECONDS = 0.01
_BAR_SECONDS = 0.1


@dataclass
class RolloutStats:
    """Counts of one rollout, or of a pool since it was last asked.

    Attributes:
        groups: ``done``: given to the trainer. ``aborted``: cut by the end of the rollout. ``put_back``: went back to
            the source, of which ``fresh`` without a token. ``kept``: finished, and waiting for the next rollout.
            ``failed``: a generator or reward raised. ``stale``: started again, being too old.
        dropped: groups that nobody gets, by reason.
        samples: generations that were begun, of which ``resumed`` went on with a response of an earlier rollout.
        tokens: tokens that came, the lost ones included.
        kept: of those, tokens of samples that are to be gone on with.
        lost: tokens that were dropped: side data did not come with them, or their sample started again.
        resumes: how often a sample went on after its stream had broken off.
        retries: how often a request was made again before its first token.
        rewards: samples that got one.
        staleness: of each group that was given to the trainer, in rollouts (in a pool: weight versions).
    """

    groups: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    resumed: int = 0
    tokens: int = 0
    kept: int = 0
    lost: int = 0
    resumes: int = 0
    retries: int = 0
    rewards: int = 0
    staleness: list[int] = field(default_factory=list)
    abort_seconds: float = 0.0
    is_dry: bool = False

    @contextlib.contextmanager
    def generating(self, sample: Any) -> Iterator[list[Any]]:  # noqa: ANN401  # ours or a host's
        """Count one generation. The list is for what was made of the sample, if it is not the sample alone."""
        length, before = sample.response_length, _notes(sample)
        self.samples += 1
        self.resumed += length > 0
        made: list[Any] = []
        try:
            yield made
        finally:
            made = made or [sample]
            notes = [_notes(each) for each in made]
            lost = sum(max(0, _lost(each) - _lost(before)) for each in notes)
            self.tokens += sum(each.response_length for each in made) - length + lost
            self.lost += lost
            self.resumes += sum(max(0, each.get("resumed", 0) - before.get("resumed", 0)) for each in notes)

    def clear(self) -> None:
        """Count from the beginning."""
        vars(self).update(vars(RolloutStats()))

    def metrics(self, watch: EventLoopLag) -> dict[str, float]:
        """All of it under names with slashes."""
        groups = ("done", "aborted", "put_back", "fresh", "kept", "failed", "stale")
        told: dict[str, float] = {f"groups/{name}": self.groups[name] for name in groups}
        told["groups/dropped"] = self.dropped.total()
        told |= {f"groups/dropped/{reason}": count for reason, count in self.dropped.items()}
        told |= {
            "samples/started": self.samples,
            "samples/resumed": self.resumed,
            "tokens/generated": self.tokens,
            "tokens/kept": self.kept,
            "tokens/lost": self.lost,
            "resumes": self.resumes,
            "retries": self.retries,
            "rewards": self.rewards,
            "seconds": watch.seconds,
            "abort_seconds": self.abort_seconds,
            "tokens_per_second": self.tokens / watch.seconds if watch.seconds > 0 else 0.0,
            "longest_pause": watch.longest_pause,
            "staleness/mean": sum(self.staleness) / len(self.staleness) if self.staleness else 0.0,
            "staleness/max": max(self.staleness, default=0),
            "source_dry": self.is_dry,
        }
        return {f"rollout/{name}": float(value) for name, value in told.items()}


def _notes(sample: Any) -> Mapping[str, Any]:  # noqa: ANN401
    return sample.metadata or {}


def _lost(notes: Mapping[str, Any]) -> int:
    lost: int = notes.get("lost_side_data", 0) + notes.get("restarted_tokens", 0)
    return lost


class EventLoopLag:
    """Measures seconds, and the longest time in which the event loop could not run; draws the bar meanwhile.

    Args:
        total: groups at which the bar is full; None: no bar.
        state: groups so far, and a few words.
    """

    def __init__(self, total: int | None, state: Callable[[], tuple[int, str]]) -> None:
        self._total = total
        self._state = state
        self._bar: _Bar | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._ended: float | None = None
        self.longest_pause = 0.0

    @property
    def seconds(self) -> float:
        """Since the beginning, up to the end."""
        return (self._loop.time() if self._ended is None else self._ended) - self._began

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to look how the event loop does."""
        if self._total is not None and sys.stderr.isatty():
            self._bar = _Bar(self._total)
        self._drawn = self._loop.time()
        self._look_in(_EVERY_SECONDS)

    def stop(self) -> None:
        """Stand still from now on."""
        self._ended = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
        if self._bar is not None:
            self._bar.end(*self._state())

    def _look_in(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        self.longest_pause = max(self.longest_pause, now - self._due)
        if self._bar is not None and now - self._drawn >= _BAR_SECONDS:
            self._drawn = now
            self._bar.show(*self._state())
        self._look_in(_EVERY_SECONDS)


class _Bar:
    """A progress bar that draws itself only when it is told to: it needs no thread."""

    def __init__(self, total: int) -> None:
        from rich.console import Console  # noqa: PLC0415  # half of what an import of the package costs
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        columns: list[Any] = [TextColumn("rollout"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        self._progress: Progress = Progress(
            *columns, TextColumn("{task.description}"), console=Console(stderr=True), auto_refresh=False
        )
        self._task: TaskID = self._progress.add_task("", total=total)
        self._progress.start()

    def show(self, groups: int, words: str) -> None:
        self._progress.update(self._task, completed=groups, description=words)
        self._progress.refresh()

    def end(self, groups: int, words: str) -> None:
        self.show(groups, words)
        self._progress.stop()
