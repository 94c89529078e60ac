"""Families of tasks: populations of hosts whose circumstances are drawn and hidden.

A draw is a task of its own, named by its family and number, such as ``adaptation:17``. Its
circumstances depend on the number alone. The draws of the training suite and those of the held-out
suite have different numbers, as the levels of Procgen do (Cobbe et al., "Leveraging procedural
generation to benchmark reinforcement learning", 2020).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.runtime.data import Dataset, DrawnSplit, digits, mislabelled
from esper.runtime.mnist1d import mnist1d
from esper.runtime.registry import Family
from esper.runtime.shifts import IMAGE_KINDS, LABEL_KINDS, Shift, shifted_digits
from esper.runtime.task import Drift, Pretraining, Task

_ADAPTATION_HOST = CnnHost((6, 10, 12), classes=10, image=(8, 8, 1))
_CLEAN = Pretraining(DrawnSplit(digits), steps=120, learning_rate=2e-2)
PRICES = 0.02, 0.3
"""Least and greatest rent of a drawn task; its logarithm is uniform."""


def adaptation(number: int) -> Task:
    """A trained and frozen host meets a shift of its data, early, late or never.

    Drawn: whether the images shift, the labels, both or neither (in 25 % of the draws); kinds and
    strengths; the time, in the first 60 % of the episode; the number of labelled images; and the
    price of parameters. Before the shift nothing tells whether one will come, or which block it
    will concern.
    """
    draws = np.random.default_rng([1, number])
    chance = draws.random()
    kinds = [str(draws.choice(IMAGE_KINDS))] if chance < 0.6 else []
    kinds += [str(draws.choice(LABEL_KINDS))] if 0.27 <= chance < 0.75 else []
    shifts = tuple(Shift(k, float(draws.random()), int(draws.integers(1 << 31))) for k in kinds)
    time = float(0.6 * draws.random())
    labels, sample = int(draws.integers(80, 200)), int(draws.integers(1 << 31))
    before, after = (
        DrawnSplit(partial(shifted_digits, made, labels, sample)) for made in ((), shifts)
    )
    summary = [f"{shift.kind} {shift.strength:.2f}" for shift in shifts]
    return Task(
        name=f"adaptation:{number}",
        summary=", ".join([*summary, f"{labels} labels"]),
        host=_ADAPTATION_HOST,
        data=before,
        episode_length=24,
        batch_size=32,
        learning_rate=1e-2,
        host_learning_rate=0.0,
        drift=Drift(after, time, time, 0.0) if shifts else None,
        pretraining=_CLEAN,
        rent=_log_uniform(draws, *PRICES),
        family="adaptation",
    )


def from_scratch(number: int) -> Task:
    """Hosts of four layouts learn digits of five kinds from initial weights.

    Layouts and data are crossed, so that no static feature tells what is worth growing. Drawn
    besides: the labelled share of the data, wrong labels, a change to data of another kind (in half
    of the draws), the learning rate and the price of parameters.
    """
    draws = np.random.default_rng([2, number])
    host = _DIGIT_HOSTS[draws.integers(len(_DIGIT_HOSTS))]
    kinds = draws.integers(len(_DIGIT_KINDS), size=2)
    share = float((0.1, 0.3, 1.0)[draws.integers(3)])
    settings = [{"label_fraction": share, **_DIGIT_KINDS[kind]} for kind in kinds]
    return _initial(draws, "from_scratch", number, host, digits, settings)


def sequences(number: int) -> Task:
    """Hosts of three layouts learn MNIST-1D of five kinds from initial weights.

    Drawn as for ``from_scratch``. Needs the package mnist1d.
    """
    draws = np.random.default_rng([3, number])
    host = _SEQUENCE_HOSTS[draws.integers(len(_SEQUENCE_HOSTS))]
    kinds = draws.integers(len(_SEQUENCE_KINDS), size=2)
    labels = (300, 1000, 3500)[draws.integers(3)]
    settings = [{"labels": labels, **_SEQUENCE_KINDS[kind]} for kind in kinds]
    return _initial(draws, "sequences", number, host, mnist1d, settings)


def _initial(
    draws: np.random.Generator,
    family: str,
    number: int,
    host: Host,
    data: Callable[..., Dataset],
    settings: list[dict[str, Any]],
) -> Task:
    """A task that starts from initial weights; ``settings`` are of the data before and after."""
    wrong = float((0.0, 0.3)[int(draws.random() < 0.3)])
    before, after = (DrawnSplit(partial(mislabelled, data, wrong, **kind)) for kind in settings)
    comes, time = draws.random() < 0.5, float(0.6 * draws.random())
    rate = _log_uniform(draws, 5e-3, 4e-2)
    return Task(
        name=f"{family}:{number}",
        summary=f"rate {rate:.3f}, {100 * wrong:.0f} % wrong labels"
        + (f", other data from {time:.2f}" if comes else ""),
        host=host,
        data=before,
        episode_length=24,
        batch_size=32,
        learning_rate=rate,
        decay="cosine",
        drift=Drift(after, time, time, 0.0) if comes else None,
        rent=_log_uniform(draws, *PRICES),
        family=family,
    )


_PIXELS, _SAMPLES = (8, 8, 1), (40, 1, 1)
_DIGIT_HOSTS: tuple[Host, ...] = (
    CnnHost((4, 8), 10, _PIXELS),
    CnnHost((8, 16), 10, _PIXELS, pools=2, slot_names=("r0c1", "r1c1")),
    CnnHost((4, 8, 8), 10, _PIXELS),
    MlpHost((16, 16), 10, _PIXELS),
)
_DIGIT_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"shift": 1, "noise": 0.1},
    {"shift": 2, "noise": 0.1},
    {"rotation": 3, "noise": 0.1},
    {"noise": 0.3},
)
_SEQUENCE_HOSTS: tuple[Host, ...] = (
    CnnHost((8, 8), 10, _SAMPLES),
    CnnHost((4, 8, 8), 10, _SAMPLES),
    MlpHost((16, 16), 10, _SAMPLES),
)
_SEQUENCE_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"translation": 12},
    {"correlated_noise": 0.5},
    {"shear": 1.5},
    {"shuffled": True},
)


def _log_uniform(draws: np.random.Generator, low: float, high: float) -> float:
    return float(low * (high / low) ** draws.random())


ADAPTATION = Family(
    "adaptation",
    "a trained host of 1,860 parameters meets a shift of the digits, or none",
    adaptation,
)
FROM_SCRATCH = Family(
    "from_scratch",
    "layouts crossed with kinds of digits; the hosts start from initial weights",
    from_scratch,
)
SEQUENCES = Family(
    "sequences",
    "layouts crossed with kinds of MNIST-1D; the hosts start from initial weights",
    sequences,
)
