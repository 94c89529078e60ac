"""Simple rules that choose among the branches of ``branches.py``: a threshold, and a small tree."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.tree import DecisionTreeRegressor

Floats = NDArray[np.float64]
FIRST, LAST = 3, 22
"""Steps between which a threshold may be crossed; all branches part before the last."""
LAGS = 0, 2, 4
QUANTILES = np.linspace(0.5, 0.98, 25)
DEPTH = 3
"""Depth of the tree."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Takes a branch once a feature, or its change over some steps, exceeds a value.

    Attributes:
        feature: number of the feature.
        lag: steps over which the change is taken; 0 for the feature itself.
        sign: -1 if the feature must fall below minus the value.
        value: the threshold.
        branch: number of the branch.
    """

    feature: int
    lag: int
    sign: int
    value: float
    branch: int

    def choices(self, observed: Floats) -> NDArray[np.int_]:
        """The branch of each host, from features ``[T, H, F]``; 0, which keeps the seed, else."""
        highest = self.sign * _extreme(observed[..., self.feature], self.lag, self.sign)
        return np.where(highest > self.value, self.branch, 0)


def best_threshold(observed: Floats, above: Floats) -> Threshold:
    """The threshold that gains most on hosts of features ``[T, H, F]`` and branches ``[H, B]``."""
    best, found = -np.inf, None
    for feature in range(observed.shape[-1]):
        for lag in LAGS:
            for sign in (1, -1):
                highest = sign * _extreme(observed[..., feature], lag, sign)
                for value in np.unique(np.quantile(highest, QUANTILES)):
                    worth = above[highest > value].sum(0)
                    branch = int(worth.argmax())
                    if worth[branch] > best:
                        best = worth[branch]
                        found = Threshold(feature, lag, sign, float(value), branch)
    assert found is not None
    return found


def tree_choices(known: Floats, above: Floats, features: Floats) -> NDArray[np.int_]:
    """The branches that a small tree chooses, learned from ``known [H, F]``, ``above [H, B]``."""
    tree = DecisionTreeRegressor(max_depth=DEPTH, min_samples_leaf=10, random_state=0)
    tree.fit(known, above)
    chosen: NDArray[np.int_] = tree.predict(features).argmax(1)
    return chosen


def _extreme(values: Floats, lag: int, sign: int) -> Floats:
    """The highest of ``values [T, H]``, or the lowest, or of their changes, between the steps."""
    moved = values[lag:] - values[:-lag] if lag else values
    window = moved[max(FIRST - lag, 0) : LAST + 1 - lag]
    return window.max(0) if sign > 0 else window.min(0)
