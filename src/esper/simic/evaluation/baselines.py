"""Baselines: what else a task's budget could be spent on, without growing anything.

A baseline trains another task on the same hosts. Its rate is chosen on the training hosts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from esper.leyline.evaluation import (
    AUTO_RGN,
    FULL_TUNING,
    LAST_LAYER_TUNING,
    STATIC_NETWORK,
    TUNED_TWIN,
)
from esper.runtime.tasks import Task
from esper.simic.evaluation.play import Floats, Outcome, Population, play
from esper.simic.evaluation.tuned import static_network, tuned_twin
from esper.simic.growth.rewards import utility
from esper.tamiyo.baselines import NeverActor

Baseline = Callable[[Task], Task | None]
"""The task that a baseline trains in place of another; None if it does not apply."""


def _tuned(tuning: str) -> Baseline:
    """Train the host of a task that freezes it, in one of ``runtime.tasks.TUNINGS``."""

    def baseline(task: Task) -> Task | None:
        if task.host_learning_rate != 0.0:
            return None
        return replace(task, tuning=tuning, host_learning_rate=task.learning_rate)

    return baseline


FINE_TUNING: dict[str, Baseline] = {
    FULL_TUNING: _tuned("all"),
    LAST_LAYER_TUNING: _tuned("last"),
    AUTO_RGN: _tuned("auto_rgn"),
}
"""The controls of surgical fine-tuning (Lee et al., "Surgical fine-tuning improves adaptation to
distribution shifts", ICLR 2023), for frozen hosts."""
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
    made = [BASELINES[name](task) for task in population.tasks]
    tasks = tuple(_slower(task, factor) for task in made if task is not None)
    return replace(population, tasks=tasks) if len(tasks) == len(made) else None


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
        own = population_of(name, population, factor)
        assert own is not None
        outcome = play(own, lambda env: NeverActor(), 1, on_batch=on_batch)
        added = (_host_sizes(own) - _host_sizes(population)).clamp(min=0.0)
        parts.append(_priced(outcome, population, added))
    return Outcome.join(parts, axis=1)


def tuned_copy(outcome: Outcome, population: Population) -> Outcome:
    """The outcome of full tuning if a tuned copy is kept beside the host: all of it is priced.

    That is the price of full tuning where several tasks share one trained network, which adapters
    leave as it is (Houlsby et al., "Parameter-efficient transfer learning for NLP", ICML 2019).
    """
    return _priced(outcome, population, _host_sizes(population))


def _host_sizes(population: Population) -> Tensor:
    return torch.tensor([[task.host.parameter_count] for task in population.tasks]).double()


def _priced(outcome: Outcome, population: Population, added: Tensor) -> Outcome:
    """The outcome minus the price of ``added`` parameters, ``[H, 1]``, by the tasks' prices."""
    sizes = _host_sizes(population)
    prices = torch.tensor([[task.price] for task in population.tasks]).double()

    def priced(score: Floats) -> Floats:
        return utility(torch.from_numpy(score), added, sizes, prices).numpy()

    return replace(
        outcome,
        test_utility=priced(outcome.test_score),
        validation_utility=priced(outcome.validation_score),
        added=added.numpy(),
    )
