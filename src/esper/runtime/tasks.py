"""The tasks, suites and families by name, and those that come with Esper.

``suite`` is for training. ``held_out`` holds variations that no task of ``suite`` has, on which a
policy that merely memorised the suite performs badly. ``cifar`` needs files that do not come with
Esper.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.leyline import former_names
from esper.leyline.errors import UsageError, suggestion
from esper.leyline.laboratory import MISSING, find_part
from esper.runtime.cifar import cifar10
from esper.runtime.data import Augmentation, Dataset, DrawnSplit, FromDirectory, digits
from esper.runtime.task import TUNINGS, Drift, Family, Pretraining, Task
from esper.runtime.text import SHIPPED_TEXT, text

__all__ = ["FAMILIES", "SUITES", "TASKS", "Drift", "Family", "Pretraining", "Task"]
__all__ += ["TUNINGS", "add_family", "agree", "find", "find_all", "task"]

TASKS: dict[str, Callable[[], Task]] = {}
"""The factories of all tasks, by name."""

SUITES: dict[str, tuple[str, ...]] = {}
"""Names of tasks by the name of their suite."""


FAMILIES: dict[str, Family] = {}
"""Families of tasks by name."""


def add_family(family: Family) -> None:
    """Register a family, and its training and held-out draws as suites.

    Raises:
        UsageError: a name is taken, or the task of a draw has another name or family.
    """
    suites = {
        family.name: family.names(held_out=False),
        f"{family.name}_held_out": family.names(held_out=True),
    }
    for name in suites:
        if name in TASKS or name in SUITES:
            raise UsageError(
                f"family: {name!r} is the name of a task or suite; give the family another name"
            )
    first = family.draw(0)
    if (first.name, first.family) != (f"{family.name}:0", family.name):
        raise UsageError(
            f"family: draw 0 of {family.name!r} is called {first.name!r} and has the family "
            f"{first.family!r}; give it the name '{family.name}:0' and the family {family.name!r}"
        )
    FAMILIES[family.name] = family
    SUITES.update(suites)


def task(factory: Callable[[], Task]) -> Callable[[], Task]:
    """Register a task under the name of its factory.

    Raises:
        UsageError: the name is taken, or differs from the name of the task.
    """
    name = factory.__name__
    if name in TASKS:
        raise UsageError(f"task: {name!r} is already registered; give the new one another name")
    if name in SUITES:
        raise UsageError(f"task: {name!r} is the name of a suite; give the task another name")
    first = factory()
    if first.name != name:
        raise UsageError(
            f"task: the factory {name!r} makes a task called {first.name!r}; "
            "give both the same name"
        )
    TASKS[name] = factory
    return factory


def find(name: str) -> Task:
    """The task called ``name``.

    Raises:
        UsageError: there is no such task, or it is a suite.
    """
    if name in TASKS:
        return TASKS[name]()
    family, _, number = name.partition(":")
    if family in FAMILIES and number.isdecimal() and len(number) < 10:
        return FAMILIES[family].draw(int(number))
    if family in FAMILIES and ":" in name:
        raise UsageError(
            f"task: {name!r} is no draw of the family {family!r}; give a number of at most nine "
            f"digits, such as {family}:17"
        )
    if name in SUITES:
        names = SUITES[name] if len(SUITES[name]) <= 20 else (*SUITES[name][:3], "...")
        raise UsageError(f"task: {name!r} is a suite; name one of {', '.join(names)}")
    every = [*TASKS, *SUITES]
    hint = suggestion(name, every, f"choose from {', '.join(sorted(every))}")
    if name in former_names.TASKS:
        hint = f"a task of the prior system; {former_names.TASKS[name]!r} is the nearest"
    if find_part("families") is None:
        hint += f". Families are not offered: {MISSING}"
    raise UsageError(f"task: there is no task {name!r}; {hint}")


def find_all(names: Sequence[str]) -> tuple[Task, ...]:
    """The tasks called ``names`` in order; the name of a suite stands for all its tasks.

    Raises:
        UsageError: there are no names, a name is unknown, or a task appears twice.
    """
    if not names:
        raise UsageError(
            f"task: no task is given; name at least one task or suite ({', '.join(SUITES)})"
        )
    tasks = tuple(find(member) for name in names for member in SUITES.get(name, (name,)))
    task_names = [task.name for task in tasks]
    for name in task_names:
        if task_names.count(name) > 1:
            raise UsageError(
                f"task: {name!r} is given twice, possibly as part of a suite; name it once"
            )
    return tasks


def agree(
    tasks: Sequence[Task],
    episode_length: int | None = None,
    max_batches: int | None = None,
    batch_size: int | None = None,
    max_seeds: int | None = None,
) -> tuple[int, int, int, int | None]:
    """Episode length, minibatches per step, their size and the limit of seeds of tasks together.

    A given value applies to all tasks; None means the value on which the tasks, at least one,
    agree, which may be None for ``max_seeds`` alone: no limit.

    Raises:
        UsageError: a value is None, and the tasks differ in it.
    """
    settings = {
        "episode_length": episode_length,
        "max_batches": max_batches,
        "batch_size": batch_size,
        "max_seeds": max_seeds,
    }
    length, batches, size, seeds = (_common(tasks, *setting) for setting in settings.items())
    return length, batches, size, seeds


def _common(tasks: Sequence[Task], field: str, setting: int | None) -> Any:
    if setting is not None:
        return setting
    owners: dict[int | None, dict[str, None]] = {}
    for task in tasks:
        owners.setdefault(getattr(task, field), {})[task.label] = None
    if len(owners) > 1:
        parts = " but ".join(
            f"{'no limit' if value is None else value} in {', '.join(names)}"
            for value, names in owners.items()
        )
        raise UsageError(
            f"{field}: tasks that train together must agree (it is {parts}); "
            f"give --{field.replace('_', '-')}"
        )
    (value,) = owners
    return value


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
