"""Bootstrap intervals agree with scipy's; long curves are averaged in blocks."""

import numpy as np
import pytest
from scipy import stats

from esper.karn.report.intervals import blocks, bootstrap


def test_intervals_are_those_of_an_independent_bootstrap() -> None:
    values = np.random.default_rng(3).gamma(2.0, size=(3, 40))
    found = bootstrap(values)
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
    found = bootstrap(holed)
    assert found.mean == pytest.approx(full.mean(1))
    assert found.low < found.mean < found.high
    assert found.high - found.low == pytest.approx(4 / 30**0.5, rel=0.4)


def test_fewer_than_two_units_have_no_interval() -> None:
    found = bootstrap(np.array([[1.0, np.nan], [np.nan, np.nan], [2.0, 2.0]]))
    assert found.mean[[0, 2]].tolist() == [1.0, 2.0]
    assert np.isnan(found.mean[1])
    assert np.isnan(found.low[:2]).all()
    assert found.low[2] == found.high[2] == 2.0
    assert np.isnan(bootstrap(np.array([[3.0]])).high).all()


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
