"""Families of tasks: populations of hosts whose circumstances are drawn and hidden.

A draw is a task of its own, named by its family and number, such as ``adaptation:17``. Its
circumstances depend on the number alone. The draws of the training suite and those of the held-out
suite have different numbers, as the levels of Procgen do (Cobbe et al., "Leveraging procedural
generation to benchmark reinforcement learning", 2020).
"""

from functools import partial

import numpy as np

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime.data import DrawnSplit, digits
from esper.runtime.registry import Drift, Family, Pretraining, Task
from esper.runtime.shifts import KINDS, Shift, shifted_digits

_ADAPTATION_HOST = CnnHost((6, 10, 12), classes=10, image=(8, 8, 1))
_CLEAN = Pretraining(DrawnSplit(digits), steps=120, learning_rate=2e-2)
PRICES = 0.02, 0.3
"""Least and greatest rent of a drawn task; its logarithm is uniform."""


def adaptation(number: int) -> Task:
    """A trained and frozen host meets a shift of its data, early, late or never.

    Drawn: whether there is a shift (in 70 % of the draws), its kind, strength and time in the first
    60 % of the episode, the number of labelled images, and the price of parameters. Before the
    shift nothing tells whether one will come, or which block it will concern.
    """
    draws = np.random.default_rng([1, number])
    kind = KINDS[draws.integers(len(KINDS))]
    shift = Shift(kind, float(draws.random()), int(draws.integers(1 << 31)))
    comes, time = draws.random() < 0.7, float(0.6 * draws.random())
    labels, sample = int(draws.integers(80, 200)), int(draws.integers(1 << 31))
    before = DrawnSplit(partial(shifted_digits, None, labels, sample))
    after = DrawnSplit(partial(shifted_digits, shift, labels, sample))
    return Task(
        name=f"adaptation:{number}",
        summary=f"{kind} {shift.strength:.2f}, {labels} labels" if comes else f"{labels} labels",
        host=_ADAPTATION_HOST,
        data=before,
        episode_length=24,
        batch_size=32,
        learning_rate=1e-2,
        host_learning_rate=0.0,
        drift=Drift(after, time, time, 0.0) if comes else None,
        pretraining=_CLEAN,
        rent=_log_uniform(draws, *PRICES),
        family="adaptation",
    )


def _log_uniform(draws: np.random.Generator, low: float, high: float) -> float:
    return float(low * (high / low) ** draws.random())


ADAPTATION = Family(
    "adaptation",
    "a trained host of 1,860 parameters meets a shift of the digits, or none",
    adaptation,
)
