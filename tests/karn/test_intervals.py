"""Intervals contain the true mean as often as they claim; long curves are averaged in blocks."""

import numpy as np
import pytest
from scipy import stats

from esper.karn import intervals
from esper.karn.intervals import BOOTSTRAP_UNITS, group_means, interval
from esper.karn.report.drawing import blocks

SAMPLES = 2000


def coverage(estimate, true_mean: float) -> float:
    return float(((estimate.low <= true_mean) & (true_mean <= estimate.high)).mean())


@pytest.mark.parametrize("units", [2, 4, 8, 19, 20, 60])
def test_an_interval_contains_the_mean_of_normal_units_95_times_of_100(units: int) -> None:
    values = np.random.default_rng(units).normal(1.0, 2.0, size=(SAMPLES, units))
    assert coverage(interval(values), 1.0) == pytest.approx(0.95, abs=0.025)


def test_an_interval_contains_the_mean_of_skewed_units_nearly_as_often() -> None:
    values = np.random.default_rng(0).gamma(2.0, size=(SAMPLES, 8))
    assert coverage(interval(values), 2.0) > 0.9


def test_units_are_groups_where_environments_share_a_host() -> None:
    generator = np.random.default_rng(5)
    hosts = generator.normal(size=(SAMPLES, 8, 1)).repeat(4, axis=2)
    values = (hosts + 0.3 * generator.normal(size=hosts.shape)).reshape(SAMPLES, 32)
    assert coverage(interval(group_means(values, 4)), 0.0) == pytest.approx(0.95, abs=0.025)
    assert coverage(interval(values), 0.0) < 0.75  # environments are not independent


def test_few_units_have_the_interval_of_student() -> None:
    values = np.random.default_rng(3).gamma(2.0, size=(3, BOOTSTRAP_UNITS - 1))
    found = interval(values)
    for row, low, high in zip(values, found.low, found.high, strict=True):
        reference = stats.t.interval(0.95, len(row) - 1, row.mean(), stats.sem(row))
        assert (low, high) == pytest.approx(reference)


def test_many_units_have_the_interval_of_an_independent_bootstrap() -> None:
    values = np.random.default_rng(3).gamma(2.0, size=(3, 40))
    found = interval(values)
    for row, mean, low, high in zip(values, found.mean, found.low, found.high, strict=True):
        reference = stats.bootstrap(
            (row,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
        ).confidence_interval
        width = reference.high - reference.low
        assert mean == pytest.approx(row.mean())
        assert low == pytest.approx(reference.low, abs=0.1 * width)
        assert high == pytest.approx(reference.high, abs=0.1 * width)


def test_values_that_are_not_finite_are_left_out() -> None:
    full = np.random.default_rng(0).normal(size=(1, 30))
    holed = np.concatenate([full, [[np.nan] * 20 + [np.inf] * 10]], axis=1)
    found = interval(holed)
    assert found.mean == pytest.approx(full.mean(1))
    assert found.low < found.mean < found.high
    assert found.high - found.low == pytest.approx(4 / 30**0.5, rel=0.4)


def test_fewer_than_two_units_have_no_interval() -> None:
    found = interval(np.array([[1.0, np.nan], [np.nan, np.nan], [2.0, 2.0]]))
    assert found.mean[[0, 2]].tolist() == [1.0, 2.0]
    assert np.isnan(found.mean[1])
    assert np.isnan(found.low[:2]).all()
    assert found.low[2] == found.high[2] == 2.0
    assert np.isnan(interval(np.array([[3.0]])).high).all()


def test_group_means_leave_out_values_that_are_not_finite() -> None:
    found = group_means(np.array([[1.0, 3.0, np.nan, 4.0, np.inf, np.nan, 7.0]]), 2)
    assert found[0, [0, 1, 3]].tolist() == [2.0, 4.0, 7.0]
    assert np.isnan(found[0, 2])


def test_blocks_are_means_of_consecutive_rounds() -> None:
    rounds, values = np.arange(1.0, 702.0), np.arange(1.0, 702.0)[:, None] * [1.0, 2.0]
    values[0, 1] = np.nan
    x, y = blocks(rounds, values)
    assert len(x) == len(y) == 234
    assert x[0] == 2.0
    assert x[-1] == 700.5 + 0.0 if 701 % 3 == 2 else x[-1] == 701.0
    assert y[0].tolist() == [2.0, 5.0]
    same = blocks(rounds[:300], values[:300])
    assert same[0].tolist() == rounds[:300].tolist()


def test_quantiles_are_those_of_numpy() -> None:
    means = np.sort(np.random.default_rng(3).normal(size=(4, 9)), 1)
    for q in (0.0, 0.025, 0.5, 0.9, 1.0):
        for count in (1, 2, 5, 9):
            expected = np.quantile(means[:, :count], q, axis=1)
            quantiles = intervals._quantile(means, np.full(4, count), q)
            np.testing.assert_allclose(quantiles, expected)
