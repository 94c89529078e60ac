"""Families of tasks: populations of hosts whose circumstances are drawn and hidden.

A draw is a task of its own, named by its family and number, such as ``adaptation:17``. Its
circumstances depend on the number alone. The draws of the training suite and those of the held-out
suite have different numbers, as the levels of Procgen do (Cobbe et al., "Leveraging procedural
generation to benchmark reinforcement learning", 2020).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.runtime.data import Dataset, DrawnSplit, digits
from esper.runtime.task import ChannelShift, Drift, Family, Pretraining, Task
from esper_lab.data import IMAGE_KINDS, LABEL_KINDS, Shift, mislabelled, mnist1d, shifted_digits

_CONVOLUTIONS = "conv_small", "conv_light", "bottleneck", "conv_heavy"
_ADAPTATION_HOST = CnnHost((6, 10, 12), classes=10, image=(8, 8, 1), seeds=_CONVOLUTIONS)
_CLEAN = Pretraining(DrawnSplit(digits), steps=120, learning_rate=2e-2)
ONE_SEED_STEPS = 48
"""Steps of an episode of ``one_seed``."""
PRICES = 0.02, 0.3
"""Least and greatest price of a drawn task; its logarithm is uniform."""


def adaptation(number: int) -> Task:
    """A trained and frozen host meets a shift of its data or of its features, or none.

    Drawn: the levels of the shift, which are the input (images), the features (channels of a block)
    and the output (labels), with no shift in 30 % of the draws and two levels in 18 %; kinds and
    strengths; the time, in the first 60 % of the episode; when training ends, in the last 30 %; the
    number of labelled images; and the price of parameters. Before the shift nothing tells whether
    one will come, or which block it will concern. Channels of the last block do not shift: only the
    head reads them, so that would be a shift of the output. Only convolutions may grow: seeds that
    merely rescale channels raise the confidence of any host, shifted or not, so that they would pay
    nearly everywhere.
    """
    draws = np.random.default_rng([1, number])
    count = int(draws.choice(3, p=(0.3, 0.52, 0.18)))
    levels = draws.choice(("input", "features", "output"), count, False, (0.25, 0.45, 0.3))
    shifts = tuple(
        Shift(str(draws.choice(kinds)), float(draws.random()), _seed(draws))
        for level, kinds in (("input", IMAGE_KINDS), ("output", LABEL_KINDS))
        if level in levels
    )
    channels = None
    if "features" in levels:
        blocks = len(_ADAPTATION_HOST.channels) - 1
        share = float(0.3 + 0.7 * draws.random())
        channels = ChannelShift(int(draws.integers(blocks)), share, _seed(draws))
    time, deadline = float(0.6 * draws.random()), float(0.7 + 0.3 * draws.random())
    labels, sample = int(draws.integers(80, 200)), _seed(draws)
    before, after = (
        DrawnSplit(partial(shifted_digits, changes, labels, sample)) for changes in ((), shifts)
    )
    summary = [f"{shift.kind} {shift.strength:.2f}" for shift in shifts]
    if channels is not None:
        summary.append(f"channels of block {channels.block} {channels.share:.2f}")
    return Task(
        name=f"adaptation:{number}", summary=", ".join([*summary, f"{labels} labels"]),
        host=_ADAPTATION_HOST, data=before, episode_length=24, batch_size=32, learning_rate=1e-2,
        host_learning_rate=0.0, deadline=deadline,
        drift=Drift(after, time, time, 0.0, channels) if count else None, pretraining=_CLEAN,
        price=log_uniform(draws, *PRICES), family="adaptation",
    )  # fmt: skip


def one_seed(number: int) -> Task:
    """A host of ``adaptation`` meets its shift early in a longer episode, and one seed may live.

    All that ``adaptation`` draws is drawn alike, except the time: a shift comes in one of the steps
    1 to 12 of 48. So there is time to look first and then to grow, and no budget to grow in every
    slot and keep what pays.
    """
    base = adaptation(number)
    drift = base.drift
    if drift is not None:
        # ``adaptation`` draws times in the first 60 % of an episode. The middle of a step is safe
        # from rounding.
        time = (1.5 + int(12 * drift.earliest / 0.6)) / ONE_SEED_STEPS
        drift = replace(drift, earliest=time, latest=time)
    return replace(
        base, name=f"one_seed:{number}", family="one_seed", episode_length=ONE_SEED_STEPS,
        max_seeds=1, drift=drift,
    )  # fmt: skip


def from_scratch(number: int) -> Task:
    """Hosts of four layouts learn digits of five kinds from initial weights.

    Layouts and data are crossed, so that no static feature tells what is worth growing. Drawn
    besides: the classes that occur (all or one half, which the host's ten outputs do not show), the
    labelled share of the data, wrong labels, a change to data of another kind (in half of the
    draws), when training ends, the learning rate and the price of parameters.
    """
    draws = np.random.default_rng([2, number])
    host = _DIGIT_HOSTS[draws.integers(len(_DIGIT_HOSTS))]
    kinds = draws.integers(len(_DIGIT_KINDS), size=2)
    share = float((0.1, 0.3, 1.0)[draws.integers(3)])
    only = _DIGIT_CLASSES[draws.integers(len(_DIGIT_CLASSES))]
    settings = [{"label_fraction": share, "only": only, **_DIGIT_KINDS[kind]} for kind in kinds]
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
    rate, deadline = log_uniform(draws, 5e-3, 4e-2), float(0.7 + 0.3 * draws.random())
    later = f", other data from {time:.2f}" if comes else ""
    return Task(
        name=f"{family}:{number}", host=host, data=before, family=family,
        summary=f"rate {rate:.3f}, {100 * wrong:.0f} % wrong labels{later}", episode_length=24,
        batch_size=32, learning_rate=rate, decay="cosine", deadline=deadline,
        drift=Drift(after, time, time, 0.0) if comes else None, price=log_uniform(draws, *PRICES),
    )  # fmt: skip


_PIXELS, _SAMPLES = (8, 8, 1), (40, 1, 1)
_DIGIT_HOSTS: tuple[Host, ...] = (
    CnnHost((4, 8), 10, _PIXELS),
    CnnHost((8, 16), 10, _PIXELS, pools=2, slot_names=("r0c1", "r1c1")),
    CnnHost((4, 8, 8), 10, _PIXELS),
    MlpHost((16, 16), 10, _PIXELS),
)
_DIGIT_KINDS: tuple[dict[str, Any], ...] = (
    {}, {"shift": 1, "noise": 0.1}, {"shift": 2, "noise": 0.1}, {"rotation": 3, "noise": 0.1},
    {"noise": 0.3},
)  # fmt: skip
_DIGIT_CLASSES = None, (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)
_SEQUENCE_HOSTS: tuple[Host, ...] = (
    CnnHost((8, 8), 10, _SAMPLES),
    CnnHost((4, 8, 8), 10, _SAMPLES),
    MlpHost((16, 16), 10, _SAMPLES),
)
_SEQUENCE_KINDS: tuple[dict[str, Any], ...] = (
    {}, {"translation": 12}, {"correlated_noise": 0.5}, {"shear": 1.5}, {"shuffled": True},
)  # fmt: skip


def _seed(draws: np.random.Generator) -> int:
    return int(draws.integers(1 << 31))


def log_uniform(draws: np.random.Generator, low: float, high: float) -> float:
    """A number whose logarithm is uniform."""
    return float(low * (high / low) ** draws.random())


_MEETS = "a trained host of 1,860 parameters meets"
_LAYOUTS = "layouts crossed with kinds of {}; the hosts start from initial weights"
FAMILIES = ADAPTATION, ONE_SEED, FROM_SCRATCH, SEQUENCES = (
    Family("adaptation", f"{_MEETS} a shift of the digits or of its features, or none", adaptation),
    Family(
        "one_seed",
        f"{_MEETS} an early shift, or none, and one seed may live",
        one_seed,
        training=512,
    ),
    Family("from_scratch", _LAYOUTS.format("digits"), from_scratch),
    Family("sequences", _LAYOUTS.format("MNIST-1D"), sequences),
)
"""What Esper registers, see ``esper.leyline.laboratory``."""
