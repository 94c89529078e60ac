"""Three families that were made after the policy was frozen: what it meets for the first time.

As in ``one_seed``, a trained and frozen host meets an early shift, or none, and one seed may live.
Hosts are wider, or have a block and a slot more, or read sequences instead of images.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime.data import DrawnSplit, mislabelled
from esper.runtime.families import ONE_SEED_STEPS, one_seed
from esper.runtime.mnist1d import mnist1d
from esper.runtime.registry import FAMILIES, Family, add_family
from esper.runtime.task import ChannelShift, Drift, Pretraining, Task

SEEDS = "conv_small", "conv_light", "bottleneck", "conv_heavy"
IMAGE, SAMPLES = (8, 8, 1), (40, 1, 1)
SEQUENCE_SHIFTS: tuple[dict[str, object], ...] = (
    {"translation": 8},
    {"correlated_noise": 0.5},
    {"shear": 1.5},
    {"shuffled": True},
)


def wider(number: int) -> Task:
    """Draws of ``one_seed`` on hosts of 2.2 times the parameters."""
    host = CnnHost((8, 16, 18), classes=10, image=IMAGE, seeds=SEEDS)
    return replace(one_seed(number), name=f"later_wider:{number}", family="later_wider", host=host)


def deeper(number: int) -> Task:
    """Draws of ``one_seed`` on hosts of four blocks, which have four slots."""
    host = CnnHost((6, 8, 10, 12), classes=10, image=IMAGE, seeds=SEEDS)
    task = one_seed(number)
    return replace(task, name=f"later_deeper:{number}", family="later_deeper", host=host)


def sequences(number: int) -> Task:
    """Hosts that read MNIST-1D meet another kind of it, a change of channels, or nothing."""
    draws = np.random.default_rng([4, number])
    labels = int(draws.integers(200, 600))
    kind = int(draws.integers(len(SEQUENCE_SHIFTS)))
    moved, comes = draws.random() < 0.3, draws.random() < 0.7
    time = (1.5 + int(draws.integers(12))) / ONE_SEED_STEPS
    block, share, seed = int(draws.integers(2)), float(0.3 + 0.7 * draws.random()), int(number)
    shifted: dict[str, object] = {} if moved else SEQUENCE_SHIFTS[kind]
    before, after = (
        DrawnSplit(partial(mislabelled, mnist1d, 0.0, labels=labels, **settings))
        for settings in ({}, shifted)
    )
    channels = ChannelShift(block, share, seed) if moved else None
    return replace(
        one_seed(number),
        name=f"later_sequences:{number}",
        family="later_sequences",
        summary=f"{labels} labels",
        host=CnnHost((8, 12, 12), classes=10, image=SAMPLES, seeds=SEEDS),
        data=before,
        drift=Drift(after, time, time, 0.0, channels) if comes else None,
        pretraining=Pretraining(
            DrawnSplit(partial(mislabelled, mnist1d, 0.0)), steps=120, learning_rate=2e-2
        ),
    )


LATER = (
    Family("later_wider", "one_seed on wider hosts", wider),
    Family("later_deeper", "one_seed on hosts of four blocks", deeper),
    Family("later_sequences", "trained hosts of MNIST-1D, an early shift and one seed", sequences),
)


def register() -> None:
    """Register the families, once."""
    for family in LATER:
        if family.name not in FAMILIES:
            add_family(family)
