"""Baselines: what else a task's budget could be spent on, without growing anything.

A baseline trains another task on the same hosts. Its rate is chosen on the training hosts.

Networks that do not grow are trained as well as their size allows, for that is what growing has to
beat. The recipes of built-in tasks were tuned beforehand. A draw of a family keeps the rate and
decay that were drawn, and the ladder tunes a factor of the rate on training hosts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from esper.runtime.tasks import FAMILIES, Task
from esper.tamiyo.baselines import NeverActor
from esper.tamiyo.policy.features import utility
from esper_lab.evaluation import (
    AUTO_RGN,
    FULL_TUNING,
    LAST_LAYER_TUNING,
    STATIC_NETWORK,
    TUNED_TWIN,
)
from esper_lab.play import Floats, Outcome, Population, play
from esper_lab.recipes import read_tuned
from esper_lab.widening import widen

Baseline = Callable[[Task], Task | None]
"""The task that a baseline trains in place of another; None if it does not apply."""


def _fine_tuning(tuning: str) -> Baseline:
    """Train the host of a task that freezes it, in one of ``runtime.tasks.TUNINGS``."""

    def baseline(task: Task) -> Task | None:
        if task.host_learning_rate != 0.0:
            return None
        return replace(task, tuning=tuning, host_learning_rate=task.learning_rate)

    return baseline


FINE_TUNING: dict[str, Baseline] = {
    FULL_TUNING: _fine_tuning("all"),
    LAST_LAYER_TUNING: _fine_tuning("last"),
    AUTO_RGN: _fine_tuning("auto_rgn"),
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


FROM_SCRATCH: dict[str, Baseline] = {
    TUNED_TWIN: tuned_twin,
    STATIC_NETWORK: static_network,
}
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
        outcome = play(stand_in, lambda env: NeverActor(), 1, on_batch=on_batch)
        parameters = (_host_sizes(stand_in) - _host_sizes(population)).clamp(min=0.0)
        parts.append(_after_price(outcome, population, parameters))
    return Outcome.join(parts, axis=1)


def tuned_copy(outcome: Outcome, population: Population) -> Outcome:
    """The outcome of full tuning if a tuned copy is kept beside the host: all of it is priced.

    That is the price of full tuning where several tasks share one trained network, which adapters
    leave as it is (Houlsby et al., "Parameter-efficient transfer learning for NLP", ICML 2019).
    """
    return _after_price(outcome, population, _host_sizes(population))


def _host_sizes(population: Population) -> Tensor:
    return torch.tensor([[task.host.parameter_count] for task in population.tasks]).double()


def _after_price(outcome: Outcome, population: Population, parameters: Tensor) -> Outcome:
    """The outcome minus the price of added parameters, ``[H, 1]``, at the prices of the tasks."""
    sizes = _host_sizes(population)
    prices = torch.tensor([[task.price] for task in population.tasks]).double()

    def utilities(score: Floats) -> Floats:
        return utility(torch.from_numpy(score), parameters, sizes, prices).numpy()

    return replace(
        outcome,
        test_utility=utilities(outcome.test_score),
        validation_utility=utilities(outcome.validation_score),
        added=parameters.numpy(),
    )
