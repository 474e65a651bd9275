"""Pacing: arithmetic on given times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.client.drivers.pacing import BURST, RATE, Pacing


def taken(pacing: Pacing, now: float) -> int:
    """How many connections may begin now."""
    count = 0
    while pacing.take(now):
        count += 1
    return count


def test_after_a_pause_a_burst_may_begin_and_then_as_many_as_the_rate_allows() -> None:
    pacing = Pacing(rate=1000, burst=64)
    assert taken(pacing, 100.0) == 64
    assert taken(pacing, 100.0) == 0
    assert taken(pacing, 100.0105) == 10
    assert taken(pacing, 200.0) == 64


def test_4096_connections_begin_within_five_seconds_and_never_run_far_ahead_of_the_server() -> None:
    pacing = Pacing(RATE, BURST)
    begun, now = 0, 50.0
    while begun < 4096:
        begun += taken(pacing, now)
        assert begun <= BURST + RATE * (now - 50.0) + 1
        now += pacing.wait(now)
    assert now - 50.0 < 5


def test_the_wait_is_the_time_to_the_next_connection() -> None:
    pacing = Pacing(rate=10, burst=2)
    assert pacing.wait(1.0) == 0
    assert taken(pacing, 1.0) == 2
    assert pacing.wait(1.0) == pytest.approx(0.1)
    assert not pacing.take(1.09)
    assert pacing.take(1.1001)


def test_a_slow_connection_halves_the_rate_which_recovers() -> None:
    pacing = Pacing(rate=1000, burst=64)
    pacing.opened(10.0, 10.7)
    assert pacing.rate(10.7) == 1000
    pacing.opened(10.0, 11.0)
    assert pacing.rate(11.0) == 500
    assert 500 < pacing.rate(12.0) < 1000
    assert pacing.rate(30.0) == 1000


def test_connections_that_met_the_same_backlog_halve_the_rate_once() -> None:
    pacing = Pacing(rate=1000, burst=64)
    for _ in range(50):
        pacing.opened(10.0, 11.0)
    assert pacing.rate(11.0) == 500
    pacing.opened(11.0, 12.0)
    assert 250 < pacing.rate(12.0) < 500


def test_the_rate_never_falls_to_nothing() -> None:
    pacing = Pacing(rate=1000, burst=64)
    for second in range(1000):
        pacing.opened(float(second), second + 1.0)
    assert pacing.rate(1000.0) >= 1000 / 16


def test_after_a_slow_connection_no_burst_is_left() -> None:
    pacing = Pacing(rate=1000, burst=64)
    pacing.opened(10.0, 11.0)
    assert taken(pacing, 11.0) <= 1


def test_a_pacing_that_has_recovered_is_as_good_as_a_new_one() -> None:
    pacing = Pacing(rate=1000, burst=64)
    assert pacing.is_full(1.0)
    pacing.take(1.0)
    assert not pacing.is_full(1.0)
    assert pacing.is_full(2.0)
    pacing.opened(1.0, 2.0)
    assert not pacing.is_full(3.0)
    assert pacing.is_full(20.0)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=60),
    st.floats(1, 10_000),
    st.integers(1, 100),
)
def test_however_time_passes_no_more_begin_than_burst_and_rate_allow(
    steps: list[tuple[float, bool]], rate: float, burst: int
) -> None:
    pacing, now, begun = Pacing(rate, burst), 5.0, 0
    for pause, is_slow in steps:
        now += pause
        begun += taken(pacing, now)
        if is_slow:
            pacing.opened(now - 1, now)
        assert begun <= burst + rate * (now - 5.0) * 1.000001 + 1
        assert pacing.wait(now) <= 17 / rate
