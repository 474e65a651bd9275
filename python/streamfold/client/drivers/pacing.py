"""Pacing: how fast connections to one address begin. Arithmetic of time, without a clock."""

from __future__ import annotations

import math

__all__ = ["BURST", "RATE", "Pacing"]

RATE = 1_000.0
"""New connections to an address, in one second. A server's backlog is often 128 or 256, and it drops what comes beyond:
TCP repeats that after 1, 3 and 7 seconds."""

BURST = 64

# A connect that takes longer met a full backlog (or a distant server, which a lower rate does not hurt).
_SLOW_SECONDS = 0.8
_LOWEST_SHARE = 1 / 16
# From the lowest rate back to the full one.
_RECOVERY_SECONDS = 10.0
# One connection, but for rounding: a time plus a wait is not exact.
_ONE = 1 - 1e-6


class Pacing:
    """Says how many connections may begin now.

    All times are seconds of one monotonic clock.

    Args:
        rate: connections per second.
        burst: how many may begin at once after a pause.
    """

    def __init__(self, rate: float = RATE, burst: int = BURST) -> None:
        self._full_rate = rate
        self._burst = burst
        self._rate = rate  # at _rated_at
        self._rated_at = -math.inf
        self._slowed_at = -math.inf
        self._allowance = float(burst)  # at _counted_at
        self._counted_at = -math.inf

    def rate(self, now: float) -> float:
        """Connections per second at present."""
        recovered = self._full_rate * (1 - _LOWEST_SHARE) * (now - self._rated_at) / _RECOVERY_SECONDS
        return min(self._full_rate, self._rate + recovered)

    def take(self, now: float) -> bool:
        """Whether one more connection may begin now. It is counted."""
        self._count(now)
        if self._allowance < _ONE:
            return False
        self._allowance -= 1
        return True

    def wait(self, now: float) -> float:
        """Seconds until a connection may begin; 0 if it may now."""
        self._count(now)
        return max(0.0, (1 - self._allowance) / self.rate(now))

    def opened(self, began: float, now: float) -> None:
        """A connection that began at ``began`` is open now. If that took long, the rate is halved.

        Once for all that began before: they met the same backlog.
        """
        if now - began <= _SLOW_SECONDS or began < self._slowed_at:
            return
        self._count(now)
        self._rate = max(self._full_rate * _LOWEST_SHARE, self.rate(now) / 2)
        self._rated_at = self._slowed_at = now
        self._allowance = min(self._allowance, 1.0)

    def is_full(self, now: float) -> bool:
        """Whether nothing is to be remembered: it behaves as a new one does."""
        self._count(now)
        return self._allowance >= self._burst and self.rate(now) >= self._full_rate

    def _count(self, now: float) -> None:
        if now > self._counted_at:
            grown = self.rate(now) * (now - self._counted_at)
            self._allowance = min(float(self._burst), self._allowance + grown)
            self._counted_at = now
