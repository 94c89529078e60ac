"""Means over policies and hosts with 95 % intervals of two levels.

Both are samples: another training run would give another policy, another seed other hosts. From
``BOOTSTRAP_UNITS`` of both on they are resampled (pigeonhole bootstrap, Owen, 2007).
"""

import numpy as np
from scipy.special import stdtrit

from esper.karn.intervals import BOOTSTRAP_UNITS, LEVEL, RESAMPLES, Estimate, Floats

TAIL = (1.0 - LEVEL) / 2.0


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
        low, high = np.quantile(means, [TAIL, 1.0 - TAIL], axis=-1)
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
    degrees = total**2 / np.maximum((squares**2 / freedom).sum(-1), 1e-300)
    degrees = np.clip(np.nan_to_num(degrees, nan=1.0), 1.0, None)
    half = stdtrit(degrees, 1.0 - TAIL) * np.sqrt(total / (policies * groups))
    return Estimate(mean, mean - half, mean + half)
