"""Baselines: what else a task's budget could be spent on, without growing anything.

A baseline trains another task on the same hosts. Its rate is chosen on the training hosts.

Networks that do not grow are trained as well as their size allows, for that is what growing has to
beat. The recipes of built-in tasks were tuned beforehand. A draw of a family keeps the rate and
decay that were drawn, and the ladder tunes a factor of the rate on training hosts.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host, NormedHost
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.runtime.tasks import FAMILIES, Task
from esper.tamiyo.baselines import NeverActor
from esper.tamiyo.policy.features import utility
from esper_lab import evaluation as names
from esper_lab.play import Floats, Outcome, Population, play
from esper_lab.small_copies import CHANGES, SmallCopies

TABLE = Path(__file__).with_name("recipes.json")
"""The table of ``benchmarks/recipes.py``, shipped with the package."""


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a network is trained; the attributes are those of ``Task``."""

    learning_rate: float
    decay: str = "constant"
    max_gradient_norm: float = 1.0
    weight_decay: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.learning_rate:g} {self.decay}"]
        if self.max_gradient_norm != 1.0:
            parts.append(f"clip {self.max_gradient_norm:g}")
        if self.weight_decay:
            parts.append(f"weight decay {self.weight_decay:g}")
        return ", ".join(parts)

    @classmethod
    def of(cls, task: Task) -> "Recipe":
        """The recipe with which ``task`` trains its host."""
        return cls(**{name: getattr(task, name) for name in cls.__struct_fields__})

    def on(self, task: Task) -> Task:
        """``task`` trained by this recipe."""
        return replace(task, **msgspec.structs.asdict(self))


class TunedRecipes(msgspec.Struct, frozen=True):
    """The tuned recipes of a task.

    Attributes:
        host: best for its host, which never grows.
        static: best for the static network.
        shared: loses least against both; the recipe of the task.
        static_parameters: size of the static network.
    """

    host: Recipe
    static: Recipe
    shared: Recipe
    static_parameters: int


@cache
def read_tuned(table: Path = TABLE) -> dict[str, TunedRecipes]:
    """The tuned recipes by name of the task; tasks that were not tuned are absent.

    Raises:
        OSError: there is no such file.
        msgspec.ValidationError: the file does not have the format of the benchmark.
    """
    return msgspec.json.decode(table.read_bytes(), type=dict[str, TunedRecipes])


Baseline = Callable[[Task], Task | None]
"""The task that a baseline trains in place of another; None if it does not apply."""


def _fine_tuning(tuning: str) -> Baseline:
    """Train the host of a task that freezes it, in one of ``runtime.tasks.TUNINGS``."""

    def baseline(task: Task) -> Task | None:
        if task.host_learning_rate != 0.0:
            return None
        return replace(task, tuning=tuning, host_learning_rate=task.learning_rate)

    return baseline


def _small_copy(task: Task) -> Task | None:
    return _fine_tuning("all")(task) if isinstance(task.host, NormedHost) else None


FINE_TUNING: dict[str, Baseline] = {
    names.FULL_TUNING: _fine_tuning("all"),
    names.LAST_LAYER_TUNING: _fine_tuning("last"),
    names.AUTO_RGN: _fine_tuning("auto_rgn"),
    **dict.fromkeys(CHANGES, _small_copy),
}
"""The controls of surgical fine-tuning (Lee et al., "Surgical fine-tuning improves adaptation to
distribution shifts", ICLR 2023), for frozen hosts."""
GROWN = 3
"""Size of a static network, in sizes of the host; growing everything adds about two of them."""


def tuned_twin(task: Task) -> Task | None:
    """``task`` with the recipe that is best for its host if it never grows.

    None for a task with trained hosts and for that of a user.
    """
    recipes = read_tuned().get(task.name)
    if recipes is not None:
        return recipes.host.on(task)
    return task if _drawn_from_scratch(task) else None


def static_network(task: Task) -> Task | None:
    """``task`` with a network ``GROWN`` times as large as its host, trained by its own recipe.

    None as for ``tuned_twin``.
    """
    recipes = read_tuned().get(task.name)
    if recipes is None and not _drawn_from_scratch(task):
        return None
    host = widen(task.host, GROWN * task.host.parameter_count)
    if host is None:
        return None
    wider = replace(task, host=host)
    return wider if recipes is None else recipes.static.on(wider)


def _drawn_from_scratch(task: Task) -> bool:
    return task.family in FAMILIES and task.pretraining is None


FROM_SCRATCH = {names.TUNED_TWIN: tuned_twin, names.STATIC_NETWORK: static_network}
"""Networks that do not grow, for hosts that start from initial weights."""
BASELINES = FROM_SCRATCH | FINE_TUNING
"""The baselines of the ladder."""

FACTORS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(FROM_SCRATCH, (0.3, 1.0, 3.0)),
    **dict.fromkeys(FINE_TUNING, (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)),
}
"""Factors of the hosts' learning rate among which each baseline chooses; one that is not named
trains its task as it is."""


def factors_of(name: str) -> tuple[float, ...]:
    """The factors among which the baseline ``name`` chooses."""
    return FACTORS.get(name, (1.0,))


def population_of(name: str, population: Population, factor: float = 1.0) -> Population | None:
    """The hosts on which the baseline ``name`` is played; None unless it applies to all of them.

    Args:
        name: one of ``BASELINES``.
        population: hosts of the tasks that it stands in for.
        factor: factor of the hosts' learning rate.
    """
    stand_ins = [BASELINES[name](task) for task in population.tasks]
    tasks = tuple(_slower(task, factor) for task in stand_ins if task is not None)
    return replace(population, tasks=tasks) if len(tasks) == len(stand_ins) else None


def _slower(task: Task, factor: float) -> Task:
    if factor == 1.0:
        return task
    rate = task.learning_rate if task.host_learning_rate is None else task.host_learning_rate
    return replace(task, host_learning_rate=factor * rate)


def play_baseline(
    name: str,
    population: Population,
    factors: tuple[float, ...],
    on_batch: Callable[[int], None] = lambda episodes: None,
) -> Outcome:
    """Play a baseline on every host, as the host would be played without growing.

    The parameters of a host that is larger than that of the task count as added.

    Args:
        name: one of ``BASELINES``; it must apply to every host.
        population: the hosts of the tasks that it stands in for.
        factors: factors of the hosts' learning rate; member m has the factor m.
        on_batch: as for ``play``.
    """
    parts = []
    for factor in factors:
        stand_in = population_of(name, population, factor)
        assert stand_in is not None
        trained_by = partial(SmallCopies, name) if name in CHANGES else None
        outcome = play(
            stand_in, lambda env: NeverActor(), 1, on_batch=on_batch, trained_by=trained_by
        )
        parameters = np.maximum(_host_sizes(stand_in.tasks) - _host_sizes(population.tasks), 0.0)
        price = partial(after_price, parameters=parameters, tasks=population.tasks)
        test, validation = map(price, (outcome.test_score, outcome.validation_score))
        changes = {"test_utility": test, "validation_utility": validation, "added": parameters}
        parts.append(replace(outcome, **changes))
    return Outcome.join(parts, axis=1)


def _host_sizes(tasks: Sequence[Task]) -> Floats:
    return np.array([[task.host.parameter_count] for task in tasks], dtype=float)


def after_price(score: Floats, parameters: Floats, tasks: Sequence[Task]) -> Floats:
    """Scores ``[H, 1]`` minus the price of parameters ``[H, 1]`` that are added to hosts."""
    columns = score, parameters, _host_sizes(tasks), np.array([[task.price] for task in tasks])
    return utility(*map(torch.from_numpy, columns)).numpy()


_STEP = 1 / 64
"""Difference between two factors by which widths are multiplied, relative to the first."""


def widen(host: Host, parameters: int) -> Host | None:
    """``host`` with all widths multiplied by one factor, nearest in size to a number of parameters.

    Depth, kernels, pools, slots and attention heads stay as they are. Of two sizes equally near,
    the smaller one is taken.

    Args:
        host: any host.
        parameters: wanted number of parameters; the result has at least one channel per block.

    Returns:
        The wider or narrower host; None for a host of the user's own kind, whose width is unknown.
    """
    if not isinstance(host, CnnHost | MlpHost | TransformerHost):
        return None
    hosts, end = partial(_scale, host), 1
    while hosts(end).parameter_count < parameters:
        end *= 2
    first = bisect_left(range(end), parameters, key=lambda step: hosts(step).parameter_count)
    nearest = map(hosts, (max(0, first - 1), first))
    return min(nearest, key=lambda each: abs(each.parameter_count - parameters))


def _scale(host: CnnHost | MlpHost | TransformerHost, step: int) -> Host:
    factor = step * _STEP
    if isinstance(host, CnnHost):
        return replace(host, channels=tuple(max(1, round(factor * c)) for c in host.channels))
    if isinstance(host, MlpHost):
        return replace(host, widths=tuple(max(1, round(factor * w)) for w in host.widths))
    unit = max(1, host.heads)
    return replace(host, width=unit * max(1, round(factor * host.width / unit)))
