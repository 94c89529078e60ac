"""Accuracy against parameters: what a policy and its opponents grow at which price.

A policy that observes the price of parameters draws a whole front: it should add fewer where they
cost more.
"""

from collections.abc import Sequence

import numpy as np

from esper_lab.evaluation import (
    CLAIRVOYANT,
    NEVER_GROW,
    RULES,
    Evaluation,
    PricedRung,
    Rung,
    best_rung,
)
from esper_lab.ladder_steps import points, points_text

FRONT_HEADS = "parameters", "accuracy, %", "utility, points"
"""What ``front_cells`` holds."""


def front(evaluation: Evaluation) -> list[PricedRung]:
    """Never growing, the best rule, the clairvoyant and the policy by thirds of the price.

    The rule is the best over all hosts. The list is empty if fewer than three prices were drawn or
    scores were not recorded.
    """
    rents = np.array(evaluation.rents)
    rungs = _rungs(evaluation)
    if any(rung.score is None for rung in rungs) or len(np.unique(rents)) < 3:
        return []
    edges = np.quantile(rents, [1 / 3, 2 / 3])
    thirds = np.searchsorted(edges, rents)
    rows = []
    for third in np.unique(thirds):
        where = thirds == third
        splits = [split for split, counts in zip(evaluation.splits, where, strict=True) if counts]
        prices = float(rents[where].min()), float(rents[where].max())
        for rung in rungs:
            parameters, score, utility = (
                np.array(column)[where] for column in (rung.added, rung.score, rung.utility)
            )
            # ``points`` are hundredths, and parameters are counted.
            rows.append(
                PricedRung(
                    rung.name,
                    prices,
                    int(where.sum()),
                    points(parameters / 100.0, splits),
                    points(score, splits),
                    points(utility, splits),
                )
            )
    return rows


def _rungs(evaluation: Evaluation) -> list[Rung]:
    names = NEVER_GROW, CLAIRVOYANT
    best = best_rung(evaluation.rungs, RULES)
    return [rung for rung in evaluation.rungs if rung.policy or rung is best or rung.name in names]


def price_range(row: PricedRung) -> str:
    """The prices of a row as text."""
    least, greatest = row.prices
    return f"{least:.3f} to {greatest:.3f}"


def front_cells(row: PricedRung) -> Sequence[str]:
    """The numbers of a row as text, see ``FRONT_HEADS``."""
    return (
        points_text(row.added, ".0f"),
        points_text(row.score, ".1f"),
        points_text(row.utility, ".1f"),
    )
