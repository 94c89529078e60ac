"""What looking at a training adds to a rule of widening, and what a trial adds; for the page."""

import math
from functools import partial

import numpy as np
from capacity_rules import (
    COUNT,
    Floats,
    Look,
    Outcomes,
    costs,
    gains_by_width,
    lookup,
    nothing,
    scores,
)
from scipy.stats import spearmanr

from esper.own_models.width_search import BEGIN, LONGER, TRIAL

TRIALS, WEIGHTS = (0.05, 0.1, 0.15, TRIAL, 0.25, 0.4), (0.3, 0.5, 0.7)
"""Shares of the epochs that a trial takes, and what its result counts beside the table."""


def _row(host: Outcomes, share: float) -> int:
    """The last epoch within a share of them, from 0."""
    return min(max(1, round(share * host["epochs"])), host["epochs"]) - 1


def _losses(host: Outcomes) -> float:
    """The loss of a guess, by which others are divided."""
    return math.log(host["outputs"]) if host["outputs"] > 1 else 1.0


def curve(share: float, host: Outcomes) -> list[float]:
    """Losses, score, their gap and slopes of the narrow network up to a share of the epochs."""
    end, rows, unit = _row(host, share), np.array(host["curves"][0]), _losses(host)
    first, half, now = rows[0], rows[end // 2], rows[end]
    slopes = (half - now)[:2] / unit
    return [*now[:2] / unit, now[2], (now[1] - now[0]) / unit, *slopes, first[0] / unit]


def beside(share: float, host: Outcomes) -> list[float]:
    """``curve``, and how 2 and 8 times as wide differ from it."""
    end, unit = _row(host, share), _losses(host)
    narrow, two, eight = (np.array(host["curves"][i])[end] for i in (0, 2, 4))
    seen = [((wide - narrow) / (unit, unit, 1.0)).tolist() for wide in (two, eight)]
    return [*curve(share, host), *seen[0], *seen[1]]


LOOKS: dict[str, Look] = {"nothing": nothing}
for share in (0.1, 0.2, 0.5):
    LOOKS[f"its losses and scores up to {share:.0%} of training"] = partial(curve, share)
for share in (0.15, 0.25, 0.35, 0.5):
    LOOKS[f"the same up to {share:.0%}, and of 2 and 8 times as wide beside it"] = partial(
        beside, share
    )
"""What a forest sees of a training, beside shape, samples, classes and steps."""


def _length(host: Outcomes, share: float) -> int:
    """Epochs of a trial."""
    return max(2 if host["epochs"] >= LONGER else 1, round(share * host["epochs"]))


def _difference(host: Outcomes, choice: int, length: int) -> float:
    """The score on validation of the wide network after a trial, minus that of the narrow one."""
    begin = 0 if host["trained"] else max(1, round(BEGIN * host["epochs"]))
    end = min(begin + length, host["epochs"]) - 1
    return float(host["curves"][choice][end][2] - host["curves"][0][end][2])


def _expected(host: Outcomes, choice: int, table: dict[int, list[float]]) -> float:
    """What the table expects of a factor."""
    row = next(table[width] for width in table if host["width"] <= width)
    return [0.0, *row][choice]


def correlations(hosts: list[Outcomes], lessons: list[Outcomes]) -> list[float]:
    """Rank correlations of predictions with what the largest factor adds to the score on test.

    The predictions are those of the table, of a trial and of the mean of both.
    """
    table, largest = gains_by_width(lessons), COUNT - 1
    truth = [scores(host)[largest] - scores(host)[0] for host in hosts]
    expected = np.array([_expected(host, largest, table) for host in hosts])
    trials = np.array([_difference(host, largest, _length(host, TRIAL)) for host in hosts])
    columns = expected, trials, (expected + trials) / 2.0
    return [float(spearmanr(column, truth).statistic) for column in columns]


def trial(
    hosts: list[Outcomes], lessons: list[Outcomes], share: float, weight: float
) -> tuple[Floats, Floats]:
    """What a trial adds to the utility of the table's choice, and the operations that it takes.

    The narrow and the wide network are trained for a share of the epochs; the wide one stays where
    the mean, so weighted, of what validation shows and what the table expects is above the price.

    Returns:
        ``[hosts]`` each, the second relative to training without a trial.
    """
    choose, table = lookup(lessons), gains_by_width(lessons)
    gains, ratios = [], []
    for host in hosts:
        choice, worths = choose(host), scores(host) - costs(host)
        operations = [plan["operations"] for plan in host["plans"][0][:COUNT]]
        length = _length(host, share)
        difference, expected = _difference(host, choice, length), _expected(host, choice, table)
        stays = weight * difference + (1.0 - weight) * expected >= costs(host)[choice]
        result = choice if stays else 0
        gains.append(worths[result] - worths[choice])
        of_narrow, of_wide = operations[0], operations[choice]
        loser = (of_narrow if stays else of_wide) * length / host["epochs"]
        ratios.append((operations[result] + (loser if choice else 0.0)) / of_wide)
    return np.array(gains), np.array(ratios)
