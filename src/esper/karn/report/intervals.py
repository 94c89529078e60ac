"""Intervals of a mean: percentile bootstrap intervals (Efron, 1979)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 1000
LEVEL = 0.95
"""Share of resampled means that an interval holds."""

MOST_POINTS = 300
"""Points of a curve; longer ones are averaged in blocks of rounds."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Means ``[R]`` with the ends of their intervals; NaN where nothing was measured."""

    mean: Floats
    low: Floats
    high: Floats


def bootstrap(values: Floats) -> Estimate:
    """The mean of each row and its interval, whole columns being drawn with replacement.

    Values that are not finite are left out. All rows share their draws, so differences between
    rows are as steady as the rows.

    Args:
        values: ``[R, N]``, N independent units. With one unit there is no interval.
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
    # NaN sorts to the end: rows of few finite values may have resamples without any.
    counts = np.isfinite(means).sum(1)
    tail = (1 - LEVEL) / 2
    low, high = (_quantile(means, counts, q) for q in (tail, 1 - tail))
    several = finite.sum(1) > 1
    return Estimate(mean, np.where(several, low, np.nan), np.where(several, high, np.nan))


def blocks(rounds: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Rounds ``[R]`` and values ``[R, N]`` as at most ``MOST_POINTS`` means of rounds in a row."""
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
    """How many rounds a point of a curve stands for."""
    return max(1, -(-rounds // MOST_POINTS))


def _ratio(sums: Floats, counts: NDArray[np.int_] | Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)


def _quantile(ordered: Floats, counts: NDArray[np.int_], q: float) -> Floats:
    """Quantile ``q`` of the first ``counts`` values of each row, linear between neighbours."""
    place = np.maximum(counts - 1, 0) * q
    below = np.floor(place).astype(int)
    above = np.minimum(below + 1, np.maximum(counts - 1, 0))
    rows = np.arange(len(ordered))
    share = place - below
    return ordered[rows, below] * (1 - share) + ordered[rows, above] * share
