"""Hosts on which rules of widening are learned, and these rules; see ``capacity_page.py``."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from capacity_hosts import (
    BATCH,
    FACTORS,
    TEST,
    VALIDATION,
    Host,
    Split,
    convolutions,
    log_uniform,
    perceptron,
    residual,
    wrong_labels,
)
from numpy.typing import NDArray
from sklearn.datasets import (
    load_digits,
    make_classification,
    make_friedman1,
    make_friedman2,
    make_friedman3,
)
from sklearn.ensemble import ExtraTreesRegressor

from esper.kasmina.width_prior import GAINS, NEAR


def noisy_digits(samples: int, seed: int) -> Split:
    """Digits with drawn noise, wrong labels and classes."""
    draws = np.random.default_rng(seed)
    data = load_digits()
    classes = int(draws.integers(4, 11))
    rows = np.flatnonzero(data.target < classes)
    rows = draws.permutation(rows)
    x = data.data[rows] / 16 + draws.uniform(0, 0.6) * draws.standard_normal((len(rows), 64))
    y = torch.from_numpy(data.target[rows])
    y = wrong_labels(y, draws.choice([0.0, 0.0, 0.1, 0.3]), samples, draws)
    return Split(torch.from_numpy(x).float(), y)


def functions(samples: int, seed: int) -> Split:
    """One of Friedman's three functions (1991), standardised, with drawn noise."""
    draws = np.random.default_rng(seed)
    number, count = int(draws.integers(3)), samples + VALIDATION + TEST
    make = (make_friedman1, make_friedman2, make_friedman3)[number]
    x, y = make(count, noise=0.0, random_state=seed)
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    if draws.random() < 0.5:
        y = np.exp(y)
        y = (y - y.mean()) / y.std()
    y = y + draws.choice([0.0, 0.2, 0.5]) * draws.standard_normal(count)
    return Split(torch.from_numpy(x).float(), torch.from_numpy(y).float()[:, None])


def clusters(samples: int, seed: int) -> Split:
    """Clusters at the corners of a cube, several of a class."""
    draws = np.random.default_rng(seed)
    x, y = make_classification(
        samples + VALIDATION + TEST, 20, n_informative=int(draws.integers(5, 13)),
        n_classes=int(draws.integers(3, 11)), n_clusters_per_class=int(draws.integers(1, 4)),
        class_sep=float(draws.uniform(0.8, 2.0)), flip_y=0.0, random_state=seed,
    )  # fmt: skip
    y = wrong_labels(torch.from_numpy(y), draws.choice([0.0, 0.0, 0.1, 0.3]), samples, draws)
    return Split(torch.from_numpy(x / x.std(0)).float(), y)


def drawn(number: int) -> Host:
    """Host ``number``; an even one is trained from scratch, an odd one arrives trained."""
    draws = np.random.default_rng([41, number])
    data = (noisy_digits, functions, clusters)[int(draws.choice(3, p=[0.5, 0.25, 0.25]))]
    architecture = perceptron
    if data is noisy_digits and draws.random() < 0.6:
        architecture = (convolutions, residual)[int(draws.integers(2))]
    image = architecture is not perceptron
    samples = round(log_uniform(draws, 100, 600 if data is noisy_digits else 1500) / 50) * 50
    trained = number % 2 == 1
    return Host(
        architecture, partial(data, samples, number), data.__name__, samples,
        width=round(log_uniform(draws, 2, 10 if image else 32)),
        depth=int(draws.integers(1, 4)),
        epochs=round(log_uniform(draws, 3, 20) if trained else log_uniform(draws, 15, 60)),
        price=log_uniform(draws, 0.003, 0.1), trained=trained, seed=number,
    )  # fmt: skip


Outcomes = dict[str, Any]
"""A host and what its plans came to, see ``capacity_hosts.outcomes``."""
Floats = NDArray[np.float64]
Choice = Callable[[Outcomes], int]
"""Which of ``FACTORS`` a rule takes for a host."""
Look = Callable[[Outcomes], list[float]]
"""What a rule sees of a host beside ``features``."""
COUNT = len(FACTORS)


def scores(host: Outcomes) -> Floats:
    """Score on test by factor, the mean of both orders of the data."""
    return np.mean([[plan["test"] for plan in order[:COUNT]] for order in host["plans"]], axis=0)


def costs(host: Outcomes) -> Floats:
    """What the parameters cost by factor."""
    sizes = np.array([plan["parameters"] for plan in host["plans"][0][:COUNT]])
    return host["price"] * np.log(sizes / host["parameters"])


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
    """The rule that ships: the table of gains, minus the price."""
    gains = gains_by_width(hosts)

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


RULES: dict[str, Callable[[list[Outcomes]], Choice]] = {
    "never widened": lambda _: lambda __: 0,
    "best constant": constant,
    "table of gains by width, minus price (ships)": lookup,
    "forest on shape, samples, classes, steps": partial(forest, nothing),
    "the same, and the scores at arrival": partial(forest, arrival),
}
"""How each rule is learned from hosts."""
