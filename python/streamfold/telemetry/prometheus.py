"""Prometheus: a collector of the calls of clients, for a registry of the user's."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from streamfold._core import Durations
from streamfold.client.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from streamfold.client.observer import ObservedCall, Phase, Subject

    Labels: TypeAlias = tuple[str, str]  # engine, server

__all__ = ["PrometheusCollector"]

_LABELS: Final = ("engine", "server")
# A millisecond to 17 minutes: counts below powers of two are exact.
_BOUNDS: Final = tuple(2.0**power for power in range(-10, 11))
_COUNTERS: Final = {
    "retries": "Tries that failed before a token, and were repeated.",
    "prompt_tokens": "Tokens of prompts, as engines tell them.",
    "tokens": "Tokens that were received.",
}
_HISTOGRAMS: Final = {
    "ttft": ("streamfold_time_to_first_token_seconds", "From sending a request to its first token."),
    "itl": ("streamfold_inter_token_seconds", "From one token to the next; those of one read share the time evenly."),
    "latency": ("streamfold_call_seconds", "From the start of a call to its end, queue and retries included."),
}


@dataclass
class _Totals:
    """What the calls to one server have done."""

    phases: Counter[Phase] = field(default_factory=Counter)  # of those that run
    ended: Counter[str] = field(default_factory=Counter)  # by outcome
    retries: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    ttft: Durations = field(default_factory=Durations)
    itl: Durations = field(default_factory=Durations)
    latency: Durations = field(default_factory=Durations)


class PrometheusCollector(Observer):
    """Collects what the calls of any number of clients do. Register it where your process is scraped.

    ::

        collector = PrometheusCollector()
        prometheus_client.REGISTRY.register(collector)
        client = Client(url, observers=[collector])

    It opens no port and starts no thread. Counting costs a few additions at each phase and at the end of a call; the
    gaps between tokens are counted in Rust, and added when a call ends. Labels are ``engine`` (``"sglang"``) and
    ``server`` (the base URL).

    - ``streamfold_calls_running``: a gauge, by ``phase``
    - ``streamfold_calls_total``: by ``outcome``: ``stop``, ``length``, ``abort`` or ``error``
    - ``streamfold_retries_total``, ``streamfold_prompt_tokens_total`` (where the engine tells them) and
      ``streamfold_tokens_total``
    - ``streamfold_time_to_first_token_seconds``, ``streamfold_inter_token_seconds``, ``streamfold_call_seconds``:
      histograms
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a scrape comes in another thread
        self._totals: defaultdict[Labels, _Totals] = defaultdict(_Totals)
        self._phases: dict[int, Phase] = {}  # of the calls that have not ended

    def on_phase(self, call: ObservedCall, subject: Subject | None, phase: Phase, at: float) -> None:  # noqa: ARG002
        """Count the phase."""
        with self._lock:
            totals = self._totals[call.engine_name, call.base_url]
            totals.phases[phase] += 1
            totals.retries += phase == "retry"
            if (before := self._phases.get(id(call))) is not None:
                totals.phases[before] -= 1
            self._phases[id(call)] = phase

    def on_end(self, call: ObservedCall, subject: Subject | None, at: float) -> None:  # noqa: ARG002
        """Count what the call has brought."""
        generation, gaps = call.generation(), call.gaps()[0]
        timings = generation.timings
        with self._lock:
            totals = self._totals[call.engine_name, call.base_url]
            if (before := self._phases.pop(id(call), None)) is not None:
                totals.phases[before] -= 1
            totals.ended[_outcome(call)] += 1
            totals.prompt_tokens += generation.prompt_tokens or 0
            totals.tokens += len(generation.token_ids)
            totals.latency.add(at - call.started_at)
            totals.itl.merge(gaps)
            if timings is not None and timings.ttft is not None:
                totals.ttft.add(timings.ttft)

    def describe(self) -> Iterator[Metric]:
        """The metrics without values: registering the collector collects nothing."""
        return iter(_Families())

    def collect(self) -> Iterator[Metric]:
        """The metrics, for a scrape."""
        families = _Families()
        with self._lock:
            for labels, totals in self._totals.items():
                families.add(labels, totals)
        return iter(families)


class _Families:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        self._running = GaugeMetricFamily(
            "streamfold_calls_running", "Calls that run, by phase.", labels=(*_LABELS, "phase")
        )
        self._ended = CounterMetricFamily(
            "streamfold_calls", "Calls that have ended, by outcome.", labels=(*_LABELS, "outcome")
        )
        self._counters = {
            name: CounterMetricFamily(f"streamfold_{name}", text, labels=_LABELS) for name, text in _COUNTERS.items()
        }
        self._histograms = {
            field: HistogramMetricFamily(name, text, labels=_LABELS) for field, (name, text) in _HISTOGRAMS.items()
        }

    def __iter__(self) -> Iterator[Metric]:
        return iter((self._running, self._ended, *self._counters.values(), *self._histograms.values()))

    def add(self, labels: Labels, totals: _Totals) -> None:
        """Add what the calls to one server have done."""
        for phase, count in totals.phases.items():
            self._running.add_metric((*labels, phase), count)
        for outcome, count in totals.ended.items():
            self._ended.add_metric((*labels, outcome), count)
        for name, counter in self._counters.items():
            counter.add_metric(labels, getattr(totals, name))
        for name, histogram in self._histograms.items():
            durations: Durations = getattr(totals, name)
            buckets = [(f"{bound:g}", float(durations.below(bound))) for bound in _BOUNDS]
            histogram.add_metric(labels, [*buckets, ("+Inf", float(durations.count))], durations.sum)


def _outcome(call: ObservedCall) -> str:
    if call.error is not None:
        return "error"
    return call.generation().finish_reason or "abort"
