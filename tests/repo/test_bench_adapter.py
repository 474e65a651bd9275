"""The benchmark of the adapter compares like with like: both ways make the same sample. A small reply, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from benches.bench_adapter import PROMPT, TURNS, WAYS, Adapters, pace
from benches.report import report
from benches.server import Pace, serving
from support.cargo import needs_cargo
from support.host import installed


@needs_cargo
@pytest.mark.parametrize(("mode", "per_event"), TURNS)
def test_both_ways_make_the_same_sample(mode: str, per_event: int) -> None:
    with installed(), serving(pace(mode, per_event)) as url:
        adapters = Adapters(mode, per_event, url, tokens=65)
        try:
            ours, theirs = (_without_notes(adapters.first[way]) for way in WAYS)
        finally:
            adapters.close()
    assert ours == theirs
    assert (len(ours.tokens), ours.response_length) == (len(PROMPT) + 65, 65)
    assert ours.status is type(ours).Status.TRUNCATED
    assert len(ours.response) > 65
    assert len(ours.rollout_log_probs or []) == 65


@needs_cargo
def test_many_samples_at_once_are_each_as_one_alone() -> None:
    with installed(), serving(Pace(per_event=20, hold=0.3)) as url:
        adapters = Adapters("incremental", 20, url, tokens=20)
        try:
            for way in WAYS:
                assert [_without_notes(sample) for sample in adapters.ask_many(way, 120)] == [
                    adapters.first["host"]
                ] * 120
        finally:
            adapters.close()


def _without_notes(sample: Any) -> Any:
    """The sample without what streamfold notes for the next call."""
    sample.metadata = {}
    return sample


def test_the_report_tells_the_ratio_of_the_adapters() -> None:
    times = (("streamfold", 0.02), ("host", 0.5), ("streamfold", 0.01), ("host", 0.3))
    entries = [
        {
            "extra_info": {"adapter": True, "way": way, "mode": "incremental", "per_event": 1, "tokens": 4096},
            "stats": {"data": [seconds]},
        }
        for way, seconds in times
    ]
    entries += [{"extra_info": {"streams": 100, "way": way}, "stats": {"data": [seconds]}} for way, seconds in times]
    cpu = {"brand_raw": "A CPU", "count": 2}
    machine = {"cpu": cpu, "system": "Linux", "machine": "x", "python_implementation": "P", "python_version": "3"}
    lines = list(report({"datetime": "2026-01-02", "machine_info": machine, "benchmarks": entries}, {"parser": 13.0}))
    assert "| incremental | 1 | streamfold | 2 | 10.0 | 15.0 |  |" in lines
    assert "| incremental | 1 | host | 2 | 300.0 | 400.0 | 30.0x |" in lines
    assert "| 100 | streamfold | 2 | 0.10 | 0.15 |  |" in lines
    assert "| 100 | host | 2 | 3.00 | 4.00 | 30.0x |" in lines
