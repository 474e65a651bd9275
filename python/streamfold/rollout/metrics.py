"""Metrics of a rollout (``RolloutResult.metrics``), and the lag of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from streamfold.client.observer import Observer
from streamfold.rollout.figures import CallTimes, Spread
from streamfold.rollout.rewards import as_number
from streamfold.rollout.tasks import Aborted
from streamfold.samples.metadata import count_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from streamfold.client.observer import ObservedCall, Subject
    from streamfold.samples.sample import Sample

__all__ = ["EventLoopLag", "RolloutStats"]

_TICK_SECONDS = 0.01
_LOST: Final = ("lost_side_data", "restarted_tokens")


@dataclass
class RolloutStats(Observer):
    """Counts of one rollout, or of a pool since its metrics were last read. Observes the calls that it makes.

    Attributes:
        groups: ``done``: given to the trainer. ``aborted``: unfinished at the end of the rollout. ``put_back``: of all
            unfinished groups, those returned to the source, of which ``fresh`` without a token. ``kept``: finished, and
            returned for the next rollout. ``failed``: a generate or reward function raised. ``stale``: restarted
            because of ``max_staleness``; those that were dropped for it are counted in ``dropped``.
        dropped: groups that were dropped, by reason.
        drawn: groups that were taken from the source.
        samples: generations that were started, of which ``resumed`` continued a response of an earlier rollout.
        aborted: generations that an abort has ended.
        retried: generations that were started again after the generate function had raised an error.
        ended: samples of all groups that have ended, of which ``unfinished`` were not finished.
        lengths: of the responses that the trainer got, in tokens, of which ``truncated`` are TRUNCATED.
        reward: of their rewards, where these are numbers.
        calls: times of the calls that have ended.
        timed_out: samples that were truncated at ``sample_seconds``.
        tokens: tokens that were received, including the lost ones.
        kept: of those, tokens of unfinished samples that a later rollout resumes.
        lost: tokens that were dropped, because their side data was not received or their sample was restarted.
        resumes: how often a sample was resumed after its stream had broken off.
        resumed_penalties: how often a call continued a response whose penalties the engine then counted anew.
        retries: how often a request was retried before its first token.
        rewards: samples that got a reward.
        stale_tokens: tokens older than ``max_staleness`` in groups given to the trainer.
        staleness: of each group given to the trainer, in rollouts (in a pool: weight versions).
        abort_seconds: spent in aborts.
        is_dry: whether the source had too few groups.
        is_drawn_out: whether ``max_groups_drawn`` groups were too few.
    """

    groups: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    drawn: int = 0
    samples: int = 0
    resumed: int = 0
    aborted: int = 0
    retried: int = 0
    timed_out: int = 0
    ended: int = 0
    unfinished: int = 0
    truncated: int = 0
    lengths: Spread = field(default_factory=Spread)
    reward: Spread = field(default_factory=Spread)
    calls: CallTimes = field(default_factory=CallTimes)
    tokens: int = 0
    kept: int = 0
    lost: int = 0
    resumes: int = 0
    resumed_penalties: int = 0
    retries: int = 0
    rewards: int = 0
    stale_tokens: int = 0
    staleness: list[int] = field(default_factory=list)
    abort_seconds: float = 0.0
    is_dry: bool = False
    is_drawn_out: bool = False
    _running: dict[int, tuple[Sample, int]] = field(default_factory=dict)  # samples, and their tokens at the start

    @property
    def received(self) -> int:
        """Tokens that were received: ``tokens``, and what running generations have written to their samples."""
        return self.tokens + sum(max(0, sample.response_length - before) for sample, before in self._running.values())

    @contextlib.contextmanager
    def generating(self, sample: Sample) -> Iterator[list[Sample]]:
        """Count one generation. The caller fills the list with the samples that were made, if not ``sample`` alone."""
        length, lost_before = sample.response_length, _lost(sample)
        before = {name: count_of(sample, name) for name in ("resumed", "resumed_penalties")}
        self.samples += 1
        self.resumed += length > 0
        made: list[Sample] = []
        self._running[id(sample)] = sample, length
        try:
            yield made
            self.aborted += any(each.status.name == "ABORTED" for each in made)
        except Aborted:
            self.aborted += 1
            raise
        finally:
            self._running.pop(id(sample), None)
            made = made or [sample]
            lost = sum(max(0, _lost(each) - lost_before) for each in made)
            self.tokens += sum(each.response_length for each in made) - length + lost
            self.lost += lost
            more = {name: sum(max(0, count_of(s, name) - count) for s in made) for name, count in before.items()}
            self.resumes += more["resumed"]
            self.resumed_penalties += more["resumed_penalties"]

    def on_end(self, call: ObservedCall, subject: Subject | None, at: float) -> None:
        """A call of a generate function has ended."""
        self.calls.on_end(call, subject, at)

    def count_ended(self, samples: list[Sample], unfinished: int) -> None:
        """Count the samples of a group that has ended."""
        self.ended += len(samples)
        self.unfinished += unfinished

    def count_delivered(self, samples: list[Sample]) -> None:
        """Count the samples of a group that the trainer gets."""
        for sample in samples:
            self.truncated += sample.status.name == "TRUNCATED"
            self.lengths.add(sample.response_length)
            if (reward := as_number(sample.reward)) is not None:
                self.reward.add(reward)

    def explain_shortage(self) -> str:
        """Why there are fewer groups than the source gave, for the end of a log line; empty if nothing went wrong."""
        parts = []
        if self.dropped:
            reasons = self.dropped.most_common()
            named = reasons[0][0] if len(reasons) == 1 else ", ".join(f"{count} {reason}" for reason, count in reasons)
            parts.append(f"{self.dropped.total()} groups dropped: {named}")
        if self.groups["failed"]:
            parts.append(f"{self.groups['failed']} groups failed (see the warnings above)")
        return "".join(f"; {part}" for part in parts)

    def add(self, other: RolloutStats) -> None:
        """Add the counts and figures of another process."""
        for name, value in vars(other).items():
            if isinstance(value, (Spread, CallTimes)):
                getattr(self, name).merge(value)
            elif name != "_running":  # there, not here
                setattr(self, name, getattr(self, name) + value)

    def __getstate__(self) -> dict[str, Any]:
        """All but the samples of this process."""
        return {**vars(self), "_running": {}}

    def clear(self) -> None:
        """Reset all counts; generations that are running are counted when they end."""
        vars(self).update(vars(RolloutStats(_running=self._running)))

    def metrics(self, lag: EventLoopLag) -> dict[str, float]:
        """All counts and times under their names in :data:`~streamfold.rollout.metric_names.METRICS`.

        Figures of what there was none of are left out: percentiles without a call, rewards without a reward.
        """
        groups = ("done", "aborted", "put_back", "fresh", "kept", "failed", "stale")
        values: dict[str, float] = {f"groups/{name}": self.groups[name] for name in groups}
        values["groups/dropped"] = self.dropped.total()
        values |= {f"groups/dropped/{reason}": count for reason, count in self.dropped.items()}
        values |= {
            "groups/drawn": self.drawn,
            "samples/started": self.samples,
            "samples/resumed": self.resumed,
            "samples/retried": self.retried,
            "samples/timed_out": self.timed_out,
            "samples/aborted_ratio": _ratio(self.unfinished, self.ended),
            "samples/truncated_ratio": _ratio(self.truncated, self.lengths.count),
            "tokens/generated": self.tokens,
            "tokens/kept": self.kept,
            "tokens/lost": self.lost,
            "tokens/stale": self.stale_tokens,
            "resumes": self.resumes,
            "resumed_penalties": self.resumed_penalties,
            "retries": self.retries,
            "rewards": self.rewards,
            "seconds": lag.seconds,
            "abort_seconds": self.abort_seconds,
            "tokens_per_second": _ratio(self.tokens, lag.seconds),
            "longest_pause": lag.longest_pause,
            "staleness/mean": _ratio(sum(self.staleness), len(self.staleness)),
            "staleness/max": max(self.staleness, default=0),
            "source_dry": self.is_dry,
            "drawn_out": self.is_drawn_out,
            **self.calls.metrics(),
            **self.lengths.metrics("response_length", "mean", "max"),
            **self.reward.metrics("reward", "mean", "std", "max"),
        }
        return {f"streamfold/{name}": float(value) for name, value in values.items()}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _lost(sample: Sample) -> int:
    return sum(count_of(sample, name) for name in _LOST)


class EventLoopLag:
    """Measures elapsed time, and the longest time for which the event loop was blocked."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._stopped_at: float | None = None
        self.longest_pause: float = 0.0

    @property
    def seconds(self) -> float:
        """Elapsed seconds, until :meth:`stop`."""
        return (self._loop.time() if self._stopped_at is None else self._stopped_at) - self._started_at

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the timer."""
        self._schedule_tick()

    def stop(self) -> None:
        """Stop the timer and the clock."""
        self._stopped_at = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule_tick(self) -> None:
        self._due = self._loop.time() + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self.longest_pause = max(self.longest_pause, self._loop.time() - self._due)
        self._schedule_tick()
