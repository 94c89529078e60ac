"""Means with 95 % intervals over independent units.

Environments of one group share host, data and twin, so the units are groups, and for a comparison
of trained policies groups and policies. From ``BOOTSTRAP_UNITS`` units on the units are resampled
(percentile bootstrap, Efron, 1979; for two levels the pigeonhole bootstrap, Owen, 2007). With fewer
units the percentile bootstrap is too narrow, about 80 % at four, and Student's t is used.
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


def two_levels(values: Floats) -> Estimate:
    """Return the mean over policies and groups, each of which is a sample of a population.

    Every policy met every group. With fewer than ``BOOTSTRAP_UNITS`` policies or groups the
    interval is Student's, with the variance components of a two-way layout (Searle, Casella and
    McCulloch, "Variance Components", 1992) and the degrees of freedom of Satterthwaite (1946).

    Args:
        values: ``[..., P, G]`` of P policies and G groups, at least two of each, all finite.

    Returns:
        Estimates ``[...]``.
    """
    policies, groups = values.shape[-2:]
    mean = values.mean((-2, -1))
    if min(policies, groups) >= BOOTSTRAP_UNITS:
        draws = np.random.default_rng(0)
        rows, columns = (
            draws.multinomial(count, [1 / count] * count, RESAMPLES) / count
            for count in (policies, groups)
        )
        means = np.einsum("...pg,rp,rg->...r", values, rows, columns)
        low, high = np.quantile(means, [_TAIL, 1.0 - _TAIL], axis=-1)
        return Estimate(mean, low, high)
    by_policy, by_group = values.mean(-1), values.mean(-2)
    residuals = values - by_policy[..., :, None] - by_group[..., None, :] + mean[..., None, None]
    freedom = np.array([policies - 1, groups - 1, (policies - 1) * (groups - 1)])
    squares = np.stack(
        [
            groups * by_policy.var(-1, ddof=1),
            policies * by_group.var(-1, ddof=1),
            (residuals**2).sum((-2, -1)) / freedom[2],
        ],
        -1,
    )
    # Where a component is estimated as negative, the larger mean square alone is the safe choice.
    total = np.maximum(squares[..., 0] + squares[..., 1] - squares[..., 2], squares.max(-1))
    degrees = _ratio(total**2, (squares**2 / freedom).sum(-1))
    degrees = np.clip(np.nan_to_num(degrees, nan=1.0), 1.0, None)
    half = stdtrit(degrees, 1.0 - _TAIL) * np.sqrt(total / (policies * groups))
    return Estimate(mean, mean - half, mean + half)


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
