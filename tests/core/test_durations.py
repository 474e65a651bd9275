"""Durations: counted in bounded memory, right to within 3 %."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from streamfold._core import Durations


def test_quantiles_are_those_of_numpy_to_within_three_percent() -> None:
    values = np.random.default_rng(7).lognormal(-3.0, 1.5, 20_000)
    durations = Durations()
    for value in values.tolist():
        durations.add(value)
    assert durations.count == len(values)
    assert durations.sum == pytest.approx(values.sum())
    for share in (0.0, 0.1, 0.5, 0.9, 0.99, 0.999):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert durations.quantile(share) == pytest.approx(exact, rel=0.032)
    assert durations.quantile(1.0) == values.max()


def test_a_share_is_a_number_from_0_to_1() -> None:
    durations = Durations()
    assert durations.quantile(0.5) is None
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="from 0 to 1"):
            durations.quantile(share)


def test_merging_adds_those_of_another_and_of_itself() -> None:
    one, other = Durations(), Durations()
    one.add(1.0, 2)
    other.add(3.0)
    one.merge(other)
    assert (one.count, one.sum, one.quantile(1.0)) == (3, 5.0, 3.0)
    assert one.quantile(0.5) == pytest.approx(1.0, rel=0.032)
    one.merge(one)
    assert (one.count, one.sum, other.count) == (6, 10.0, 1)


def test_durations_are_pickled_and_copied_whole() -> None:
    durations = Durations()
    for again in (pickle.loads(pickle.dumps(durations)), copy.deepcopy(durations)):
        assert (again.count, again.quantile(0.5)) == (0, None)
    durations.add(0.25, 3)
    durations.add(1e9)
    for again in (pickle.loads(pickle.dumps(durations)), copy.deepcopy(durations)):
        figures = [(each.count, each.sum, each.quantile(0.5), each.quantile(1.0)) for each in (durations, again)]
        assert figures[0] == figures[1]
        again.add(1.0)
        assert durations.count == 4


def test_a_pickle_with_buckets_that_do_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="not the parts of durations"):
        Durations().__setstate__(([(10**6, 1)], 0.0, 0.0))  # type: ignore[attr-defined]  # for pickle alone
