"""Percentile bootstrap intervals of a mean (Efron, 1979)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 1000
LEVEL = 0.95
"""Share of resampled means that an interval contains."""

MOST_POINTS = 300
"""Maximum number of points per curve; longer curves are averaged over blocks of rounds."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Means ``[R]`` and the ends of their intervals; NaN where nothing was measured."""

    mean: Floats
    low: Floats
    high: Floats


def bootstrap(values: Floats) -> Estimate:
    """Return the mean of each row and its interval; columns are resampled with replacement.

    Values that are not finite are left out. All rows use the same resampled columns, so
    that resampling adds no noise to differences between rows.

    Args:
        values: ``[R, N]``, N independent units. With a single unit the interval is NaN.
    """
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    mean = _ratio(known.sum(1), finite.sum(1))
    units = values.shape[1]
    if units < 2:
        nothing = np.full_like(mean, np.nan)
        return Estimate(mean, nothing, nothing)
    draws = np.random.default_rng(0).multinomial(units, [1 / units] * units, RESAMPLES)
    means = _ratio(known @ draws.T.astype(float), finite.astype(float) @ draws.T)
    means.sort(1)
    # NaN sorts to the end: a row with few finite values may have resamples without any.
    counts = np.isfinite(means).sum(1)
    tail = (1 - LEVEL) / 2
    low, high = (_quantile(means, counts, q) for q in (tail, 1 - tail))
    several = finite.sum(1) > 1
    return Estimate(mean, np.where(several, low, np.nan), np.where(several, high, np.nan))


def blocks(rounds: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Average rounds ``[R]`` and values ``[R, N]`` over blocks, to at most ``MOST_POINTS`` rows."""
    size = block_size(len(rounds))
    if size == 1:
        return rounds, values
    starts = np.arange(0, len(rounds), size)
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    means = _ratio(sums, np.add.reduceat(finite.astype(int), starts))
    lengths = np.diff([*starts, len(rounds)])
    return np.add.reduceat(rounds.astype(float), starts) / lengths, means


def block_size(rounds: int) -> int:
    """Return how many rounds one point of a curve averages."""
    return max(1, -(-rounds // MOST_POINTS))


def _ratio(sums: Floats, counts: NDArray[np.int_] | Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)


def _quantile(ordered: Floats, counts: NDArray[np.int_], q: float) -> Floats:
    """Quantile ``q`` of the first ``counts`` values of each row, linearly interpolated."""
    place = np.maximum(counts - 1, 0) * q
    below = np.floor(place).astype(int)
    above = np.minimum(below + 1, np.maximum(counts - 1, 0))
    rows = np.arange(len(ordered))
    share = place - below
    return ordered[rows, below] * (1 - share) + ordered[rows, above] * share
