"""Figures of a rollout that are distributions: times of its calls, lengths and rewards of its samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from streamfold._core import Durations
from streamfold.client.observer import Observer

if TYPE_CHECKING:
    from streamfold.client.observer import ObservedCall, Subject

__all__ = ["CallTimes", "Spread"]

_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass
class Spread:
    """Count, mean, standard deviation and maximum of numbers, which are not kept (Welford's method)."""

    count: int = 0
    mean: float = 0.0
    max: float = -math.inf
    _squares: float = 0.0  # of the distances from the mean

    def add(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        distance = value - self.mean
        self.mean += distance / self.count
        self._squares += distance * (value - self.mean)
        self.max = max(self.max, value)

    def merge(self, other: Spread) -> None:
        """Add all numbers of another."""
        count = self.count + other.count
        if not other.count:
            return
        distance = other.mean - self.mean
        self._squares += other._squares + distance * distance * self.count * other.count / count
        self.mean += distance * other.count / count
        self.count, self.max = count, max(self.max, other.max)

    @property
    def std(self) -> float:
        """The standard deviation of the numbers themselves, not an estimate from a part of them."""
        return math.sqrt(max(0.0, self._squares / self.count)) if self.count else 0.0

    def metrics(self, name: str, *figures: Literal["mean", "std", "max"]) -> dict[str, float]:
        """Some of the figures under names like ``reward/mean``; none if there are no numbers."""
        return {f"{name}/{figure}": getattr(self, figure) for figure in figures} if self.count else {}


@dataclass
class CallTimes(Observer):
    """Times of the calls that have ended, whoever has made them."""

    ttft: Durations = field(default_factory=Durations)
    itl: Durations = field(default_factory=Durations)
    latency: Durations = field(default_factory=Durations)

    def on_end(self, call: ObservedCall, subject: Subject | None, at: float) -> None:  # noqa: ARG002
        """Add the times of a call; the latency if the engine has finished the response."""
        generation = call.generation()
        timings = generation.timings
        if timings is None or timings.ttft is None or timings.latency is None:
            return
        self.ttft.add(timings.ttft)
        self.itl.merge(call.gaps()[0])
        if generation.finish_reason in ("stop", "length"):
            self.latency.add(timings.latency)

    def merge(self, other: CallTimes) -> None:
        """Add the times of other calls."""
        self.ttft.merge(other.ttft)
        self.itl.merge(other.itl)
        self.latency.merge(other.latency)

    def metrics(self) -> dict[str, float]:
        """Percentiles in seconds, of what there is."""
        found = {
            f"{name}/{percentile}": durations.quantile(share)
            for name, durations in (("ttft", self.ttft), ("itl", self.itl), ("latency", self.latency))
            for percentile, share in _SHARES.items()
        }
        return {name: seconds for name, seconds in found.items() if seconds is not None}
