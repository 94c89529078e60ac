"""The tasks that come with Esper, and the suites for training and for testing.

``suite`` is for training. ``held_out`` holds variations that no task of ``suite`` has, on which a
policy that merely memorised the suite performs badly. ``cifar`` needs files that do not come with
Esper.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.leyline.laboratory import find_part
from esper.runtime.augmentation import Augmentation
from esper.runtime.cifar import cifar10
from esper.runtime.data import Dataset, DrawnSplit, FromDirectory, digits
from esper.runtime.registry import (
    FAMILIES,
    SUITES,
    TASKS,
    Family,
    add_family,
    agree,
    find,
    find_all,
    task,
)
from esper.runtime.task import TUNINGS, Drift, Pretraining, Task
from esper.runtime.text import SHIPPED_TEXT, text

__all__ = ["FAMILIES", "SUITES", "TASKS", "Drift", "Family", "Pretraining", "Task"]
__all__ += ["TUNINGS", "add_family", "agree", "find", "find_all", "task"]

SUITES["suite"] = (
    "digits_shift",
    "digits",
    "digits_shift_small",
    "digits_noisy",
    "digits_few_labels",
    "digits_drift",
    "digits_mlp",
)
SUITES["held_out"] = (
    "digits_shift_far",
    "digits_shift_near",
    "digits_noisier",
    "digits_clear",
    "digits_five",
    "digits_turned",
    "digits_narrow",
    "digits_wide",
    "digits_deep",
    "digits_long",
)
SUITES["cifar"] = ("cifar_baseline", "cifar_impaired", "cifar_minimal", "cifar_scale")


def _add(name: str, summary: str, host: Host, data: Callable[[], Dataset], **settings: Any) -> None:
    task_object = Task(name, summary, host, data, **settings)
    TASKS[name] = lambda: task_object


def _host(*channels: int, classes: int = 10) -> CnnHost:
    return CnnHost(channels, classes, image=(8, 8, 1))


_SMALL = _host(4, 8)


_COSINE: dict[str, Any] = dict(learning_rate=5e-2, decay="cosine")


def _digits(**settings: Any) -> DrawnSplit:
    return DrawnSplit(partial(digits, **settings))


def _add_digits(
    name: str, summary: str, host: Host = _SMALL, recipe: dict[str, Any] | None = None, **data: Any
) -> None:
    """A task on digits; its recipe is that of the benchmark recipes, unless it names another."""
    _add(name, summary, host, _digits(**data), **_COSINE | (recipe or {}))


def _shift_summary(pixels: int, noise: float) -> str:
    return f"digits shifted by up to {pixels} pixel{'s' * (pixels > 1)}, noise {noise}"


_FAST: dict[str, Any] = dict(learning_rate=1e-1)
_CONSTANT: dict[str, Any] = dict(decay="constant")
# The host is too small for digits at any of these shifts, so growing pays.
_add_digits("digits_shift", _shift_summary(2, 0.1), shift=2, noise=0.1)
# The host is large enough and learns fast, so no seed is worth its price.
_AMPLE = replace(_host(8, 16), pools=2, slot_names=("r0c1", "r1c1"))
_add_digits("digits", "digits as they are", _AMPLE)
# Smaller shifts than digits_shift.
_add_digits("digits_shift_small", _shift_summary(1, 0.1), recipe=_FAST, shift=1, noise=0.1)
# Twice the noise of digits_shift.
_add_digits("digits_noisy", _shift_summary(2, 0.2), shift=2, noise=0.2)
# Few enough training images that a grown host can memorise them.
_FEW_LABELS = "as digits_shift with 30 % of the training images"
_add_digits("digits_few_labels", _FEW_LABELS, shift=2, noise=0.1, label_fraction=0.3)
# Shifts start later or never, so it is not known at the start whether growing will pay.
_drift = Drift(_digits(shift=2, noise=0.1), earliest=0.1, latest=0.6, never=1 / 3)
_add_digits(
    "digits_drift",
    "digits with noise 0.1, later shifted by up to 2 pixels",
    recipe={**_FAST, "drift": _drift},
    noise=0.1,
)
# A host without convolutions.
_PERCEPTRON = MlpHost(widths=(16, 16), classes=10, image=(8, 8, 1))
_add_digits("digits_mlp", _shift_summary(1, 0.1), _PERCEPTRON, shift=1, noise=0.1)

# Held out: larger shifts than any training task.
_add_digits("digits_shift_far", _shift_summary(3, 0.1), recipe=_CONSTANT, shift=3, noise=0.1)
# Held out: a combination of shift and noise that no training task has.
_add_digits("digits_shift_near", _shift_summary(1, 0.2), shift=1, noise=0.2)
# Held out: more noise than any training task.
_add_digits("digits_noisier", _shift_summary(2, 0.3), recipe=_CONSTANT, shift=2, noise=0.3)
# Held out: less noise than any training task with shifts.
_add_digits("digits_clear", _shift_summary(2, 0.05), shift=2, noise=0.05)
# Held out: fewer classes, so chance is 20 % instead of 10 %.
_FIVE = "digits 0 to 4 shifted by up to 2 pixels, noise 0.1"
_add_digits("digits_five", _FIVE, _host(4, 8, classes=5), _FAST, shift=2, noise=0.1, classes=5)
# Held out: a transformation that no training task has.
_QUARTER_TURNS = "digits turned by 0 to 3 quarter turns, noise 0.1"
_add_digits("digits_turned", _QUARTER_TURNS, noise=0.1, rotation=3)
# Held out: a host of half the width.
_add_digits("digits_narrow", "as digits_shift", _host(2, 4), shift=2, noise=0.1)
# Held out: a host of twice the width.
_add_digits("digits_wide", "as digits_shift", _host(8, 16), shift=2, noise=0.1)
# Held out: a host with one more block and thus one more slot.
_add_digits("digits_deep", "as digits_shift", _host(4, 8, 8), shift=2, noise=0.1)
# Held out: episodes 1.5 times as long.
_LONG = {"episode_length": 60}
_add_digits("digits_long", "as digits_shift", recipe=_LONG, shift=2, noise=0.1)


def _add_cifar(name: str, *channels: int, kernel: int, pools: int) -> None:
    _add(
        name,
        "CIFAR-10, random crops and flips",
        CnnHost(channels, classes=10, image=(32, 32, 3), kernel=kernel, pools=pools),
        FromDirectory(cifar10),
        episode_length=75,
        max_batches=50,
        batch_size=128,
        learning_rate=1e-2,
        augmentation=Augmentation(reach=4, flip=True),
    )


# A small host that learns without seeds, with room to grow.
_add_cifar("cifar_baseline", 8, 16, 32, kernel=3, pools=3)
# 1x1 convolutions of few channels: nearly all capacity must be grown.
_add_cifar("cifar_impaired", 1, 2, 4, kernel=1, pools=3)
# 1x1 convolutions without pooling: the host sees only the colours of single pixels.
_add_cifar("cifar_minimal", 2, 4, 8, kernel=1, pools=0)
# Ten slots in five blocks: the policy must choose where to grow.
_add_cifar("cifar_scale", 8, 16, 32, 64, 128, kernel=3, pools=5)


def _add_text(name: str, heads: int) -> None:
    host = TransformerHost(layers=2, width=32, heads=heads, context=16)
    _add(
        name,
        "next byte of Esper's licence and documentation",
        host,
        partial(text, SHIPPED_TEXT, host.context),
        max_batches=16,
        batch_size=16,
        learning_rate=3e-3,
    )


# A GPT without attention: it predicts from a single byte until it grows.
_add_text("text_bytes", heads=0)
# A GPT with attention, which does not reach its capacity within one episode.
_add_text("text_gpt", heads=2)

for family in find_part("families") or ():
    add_family(family)
