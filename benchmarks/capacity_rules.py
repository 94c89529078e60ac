"""Rules that choose how wide a host becomes, learned from what other hosts came to."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from esper.kasmina.width_prior import FACTORS, GAINS, NEAR
from esper_lab.capacity.training import BATCH

Outcomes = dict[str, Any]
"""A host and what its plans came to, see ``capacity_plays.outcomes``."""
Floats = NDArray[np.float64]
Choice = Callable[[Outcomes], int]
"""Which of the factors of the width a rule takes for a host."""
Look = Callable[[Outcomes], list[float]]
"""What a rule sees of a host beside ``features``."""
COUNT = 1 + len(FACTORS)
"""Factors, and to stay as wide."""


def scores(host: Outcomes) -> Floats:
    """Score on test by factor, the mean of all orders of the data."""
    return np.mean([[plan["test"] for plan in order[:COUNT]] for order in host["plans"]], axis=0)


def costs(host: Outcomes) -> Floats:
    """What parameters and training cost by factor."""
    plans = host["plans"][0][:COUNT]
    sizes, operations = (
        np.log([plan[name] / plans[0][name] for plan in plans])
        for name in ("parameters", "operations")
    )
    return host["price"] * sizes + host["training_price"] * operations


def gains_by_width(hosts: list[Outcomes]) -> dict[int, list[float]]:
    """What ``width_prior.GAINS`` holds: mean gains of score over all hosts of a width."""
    gains, lower = {}, 0
    for width in GAINS:
        rows = [scores(host) for host in hosts if lower < host["width"] <= width]
        gains[width] = list(np.mean([row[1:] - row[0] for row in rows], axis=0))
        lower = width
    return gains


def constant(hosts: list[Outcomes]) -> Choice:
    """The factor that is best on the mean."""
    best = int(np.mean([scores(host) - costs(host) for host in hosts], axis=0).argmax())
    return lambda host: best


def lookup(hosts: list[Outcomes]) -> Choice:
    """The rule that ships, with the table of gains of other hosts."""
    return by_table(gains_by_width(hosts))


def by_table(gains: Mapping[int, Sequence[float]]) -> Choice:
    """The rule that ships: the table of gains by width, minus the price."""

    def choice(host: Outcomes) -> int:
        width = next(each for each in gains if host["width"] <= each)
        worth = np.array([0.0, *gains[width]]) - costs(host)
        return int(np.flatnonzero(worth >= worth.max() - NEAR)[0])

    return choice


def features(host: Outcomes) -> list[float]:
    """What a rule knows of a host without a look."""
    steps = host["epochs"] * host["samples"] / BATCH
    numbers = (host["width"], host["parameters"], host["samples"], host["outputs"], steps)
    return [*map(math.log, numbers), float(host["outputs"] == 1), float(host["depth"])]


def nothing(_: Outcomes) -> list[float]:
    """No look."""
    return []


def arrival(host: Outcomes) -> list[float]:
    """The scores of a host as it arrives."""
    return [host["training"], host["validation"]]


def forest(look: Look, hosts: list[Outcomes]) -> Choice:
    """Gains by ``ExtraTreesRegressor`` from ``features`` and a look, minus the price."""
    model = ExtraTreesRegressor(400, min_samples_leaf=4, random_state=0)
    targets = [scores(host)[1:] - scores(host)[0] for host in hosts]
    model.fit([features(host) + look(host) for host in hosts], targets)

    def choice(host: Outcomes) -> int:
        (gains,) = model.predict([features(host) + look(host)])
        return int((np.array([0.0, *gains]) - costs(host)).argmax())

    return choice
