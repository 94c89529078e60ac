"""Averages over blocks of rounds, so that a long run has a short curve."""

import numpy as np

from esper.karn.intervals import Floats

MAX_POINTS = 300
"""Maximum number of points per curve; longer curves are averaged over blocks of rounds."""


def blocks(rounds: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Average rounds ``[R]`` and values ``[R, N]`` over blocks, to at most ``MAX_POINTS`` rows."""
    size = block_size(len(rounds))
    if size == 1:
        return rounds, values
    starts = np.arange(0, len(rounds), size)
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(int), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums / counts, np.nan)
    lengths = np.diff([*starts, len(rounds)])
    return np.add.reduceat(rounds.astype(float), starts) / lengths, means


def block_size(rounds: int) -> int:
    """Return how many rounds one point of a curve averages."""
    return max(1, -(-rounds // MAX_POINTS))
