"""Means with 95 % intervals over independent units.

Environments of one group share host, data and twin, so the units are groups. From
``BOOTSTRAP_UNITS`` units on they are resampled (percentile bootstrap, Efron, 1979). With fewer the
percentile bootstrap is too narrow, about 80 % at four, and Student's t is used.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Floats = NDArray[np.float64]

BOOTSTRAP_UNITS = 20
"""Units below which an interval is Student's."""
RESAMPLES = 1000
LEVEL = 0.95
"""Share of intervals that contain the true mean."""
_TAIL = (1.0 - LEVEL) / 2.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Means and the ends of their intervals, all of one shape; NaN where nothing was measured."""

    mean: Floats
    low: Floats
    high: Floats


def interval(values: Floats) -> Estimate:
    """Return the mean of each row and its interval; columns are independent units.

    Values that are not finite are left out. All rows use the same resampled columns, so that
    resampling adds no noise to differences between rows.

    Args:
        values: ``[R, N]``. A row with a single finite value has no interval.

    Returns:
        Estimates ``[R]``.
    """
    finite = np.isfinite(values)
    units = finite.sum(1)
    summands = np.where(finite, values, 0.0)
    mean = _ratio(summands.sum(1), units)
    deviations = np.where(finite, values - mean[:, None], 0.0)
    variance = _ratio((deviations**2).sum(1), units - 1)
    half = _student(units - 1) * np.sqrt(_ratio(variance, units))
    low, high = mean - half, mean + half
    resampled_rows = units >= BOOTSTRAP_UNITS
    if resampled_rows.any():
        low[resampled_rows], high[resampled_rows] = _bootstrap(
            summands[resampled_rows], finite[resampled_rows]
        )
    return Estimate(mean, low, high)


def group_means(values: Floats, size: int) -> Floats:
    """Return the means of consecutive groups of ``size`` columns, ``[R, G]``.

    NaN where a group has no finite value.
    """
    starts = np.arange(0, values.shape[1], size)
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts, axis=1)
    return _ratio(sums, np.add.reduceat(finite.astype(float), starts, axis=1))


def _bootstrap(summands: Floats, finite: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Percentiles of the means of resampled columns, each ``[R]``."""
    units = summands.shape[1]
    draws = np.random.default_rng(0).multinomial(units, [1 / units] * units, RESAMPLES)
    means = _ratio(summands @ draws.T.astype(float), finite.astype(float) @ draws.T)
    means.sort(1)
    # NaN sorts to the end: a row with few finite values may have resamples without any.
    counts = np.isfinite(means).sum(1)
    return _quantile(means, counts, _TAIL), _quantile(means, counts, 1.0 - _TAIL)


def _student(degrees: NDArray[np.int_]) -> Floats:
    """Quantiles of Student's t; NaN without a degree of freedom."""
    return np.where(degrees > 0, stdtrit(np.maximum(degrees, 1), 1.0 - _TAIL), np.nan)


def _ratio(sums: Floats, counts: NDArray[np.int_] | Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)


def _quantile(means: Floats, counts: NDArray[np.int_], q: float) -> Floats:
    """Quantile ``q`` of the first ``counts`` values of each row, linearly interpolated."""
    position = np.maximum(counts - 1, 0) * q
    below = np.floor(position).astype(int)
    above = np.minimum(below + 1, np.maximum(counts - 1, 0))
    rows = np.arange(len(means))
    share = position - below
    return means[rows, below] * (1 - share) + means[rows, above] * share
