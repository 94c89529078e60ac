"""Hosts on which rules of widening are learned; those of the suite have other data."""

from functools import partial

import numpy as np
import torch
from sklearn.datasets import (
    load_digits,
    make_classification,
    make_friedman1,
    make_friedman2,
    make_friedman3,
)

from esper_lab.capacity.hosts import (
    TEST,
    VALIDATION,
    Architecture,
    Host,
    Split,
    convolutions,
    drawn_circumstances,
    perceptron,
    residual,
    wrong_labels,
)
from esper_lab.families import log_uniform


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


def draw(number: int) -> Host:
    """Host ``number``; an even one is trained from scratch, an odd one arrives trained."""
    draws = np.random.default_rng([41, number])
    data = (noisy_digits, functions, clusters)[int(draws.choice(3, p=[0.5, 0.25, 0.25]))]
    architecture: Architecture = perceptron
    if data is noisy_digits and draws.random() < 0.6:
        architecture = (convolutions, residual)[int(draws.integers(2))]
    samples = round(log_uniform(draws, 100, 600 if data is noisy_digits else 1500) / 50) * 50
    is_image = architecture in (convolutions, residual)
    more = drawn_circumstances(draws, is_image, number % 2 == 1)
    drawn_data, seed = partial(data, samples, number), number
    return Host(architecture, drawn_data, data.__name__, samples, seed=seed, **more)
