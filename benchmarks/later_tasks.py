"""Families that were made after a first policy was frozen: what policies meet for the first time.

As in ``one_seed`` and ``adaptation``, a trained and frozen host meets a shift, or none. Hosts are
wider, or have a block and a slot more, or read sequences instead of images.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime.data import DrawnSplit
from esper.runtime.task import ChannelShift, Drift, Pretraining, Task
from esper.runtime.tasks import FAMILIES, Family, add_family
from esper_lab.data import mislabelled, mnist1d
from esper_lab.families import ONE_SEED_STEPS, adaptation, one_seed

SEEDS = "conv_small", "conv_light", "bottleneck", "conv_heavy"
IMAGE, SAMPLES = (8, 8, 1), (40, 1, 1)
SEQUENCE_SHIFTS: tuple[dict[str, object], ...] = (
    {"translation": 8},
    {"correlated_noise": 0.5},
    {"shear": 1.5},
    {"shuffled": True},
)
ARRIVALS = 12
"""Number of different times of a shift in the family of sequences."""


def wider(base: Callable[[int], Task], number: int) -> Task:
    """Draws of ``base`` on hosts of 2.2 times the parameters."""
    host = CnnHost((8, 16, 18), classes=10, image=IMAGE, seeds=SEEDS)
    return replace(base(number), host=host)


def deeper(base: Callable[[int], Task], number: int) -> Task:
    """Draws of ``base`` on hosts of four blocks, which have four slots."""
    host = CnnHost((6, 8, 10, 12), classes=10, image=IMAGE, seeds=SEEDS)
    return replace(base(number), host=host)


def sequences(base: Callable[[int], Task], number: int) -> Task:
    """Hosts that read MNIST-1D meet another kind of it, a change of channels, or nothing."""
    draws = np.random.default_rng([4, number])
    labels = int(draws.integers(200, 600))
    kind = int(draws.integers(len(SEQUENCE_SHIFTS)))
    moved, comes = draws.random() < 0.3, draws.random() < 0.7
    time = _times(base, int(draws.integers(ARRIVALS)))
    block, share, seed = int(draws.integers(2)), float(0.3 + 0.7 * draws.random()), int(number)
    shifted: dict[str, object] = {} if moved else SEQUENCE_SHIFTS[kind]
    before, after = (
        DrawnSplit(partial(mislabelled, mnist1d, 0.0, labels=labels, **settings))
        for settings in ({}, shifted)
    )
    channels = ChannelShift(block, share, seed) if moved else None
    return replace(
        base(number),
        summary=f"{labels} labels",
        host=CnnHost((8, 12, 12), classes=10, image=SAMPLES, seeds=SEEDS),
        data=before,
        drift=Drift(after, time, time, 0.0, channels) if comes else None,
        pretraining=Pretraining(
            DrawnSplit(partial(mislabelled, mnist1d, 0.0)), steps=120, learning_rate=2e-2
        ),
    )


def _times(base: Callable[[int], Task], arrival: int) -> float:
    """The time of a shift, spread over the times of ``base``."""
    if base is one_seed:
        return (1.5 + arrival) / ONE_SEED_STEPS
    return 0.6 * (0.5 + arrival) / ARRIVALS


MADE = (
    (wider, "{} on wider hosts"),
    (deeper, "{} on hosts of four blocks"),
    (sequences, "hosts of MNIST-1D, otherwise as {}"),
)
BASES = {"one_seed": one_seed, "adaptation": adaptation}
NAMES = {
    "one_seed": ("later_wider", "later_deeper", "later_sequences"),
    "adaptation": (
        "later_wider_adaptation",
        "later_deeper_adaptation",
        "later_sequences_adaptation",
    ),
}


def later_families(base: str) -> list[Family]:
    """The later families that resemble ``base``, registered."""
    found = []
    for name, (draw, text) in zip(NAMES[base], MADE, strict=True):
        family = Family(name, text.format(base), partial(_named, name, partial(draw, BASES[base])))
        if name not in FAMILIES:
            add_family(family)
        found.append(FAMILIES[name])
    return found


def _named(family: str, draw: Callable[[int], Task], number: int) -> Task:
    return replace(draw(number), name=f"{family}:{number}", family=family)
