"""Baselines: what else a task's budget could be spent on, without growing anything.

A baseline trains another task on the same hosts. Its rate is chosen on the training hosts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

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
    "full tuning": _tuned("all"),
    "last-layer tuning": _tuned("last"),
    "Auto-RGN": _tuned("auto_rgn"),
}
"""The controls of surgical fine-tuning (Lee et al., "Surgical fine-tuning improves adaptation to
distribution shifts", ICLR 2023), for frozen hosts."""
FROM_SCRATCH: dict[str, Baseline] = {
    "never grow, tuned": tuned_twin,
    "static network of three times the size": static_network,
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

    The parameters of a host that is larger than that of the task count as added: they pay rent.

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
        parts.append(_priced(outcome, population, own))
    return Outcome.join(parts, axis=1)


def _priced(outcome: Outcome, before: Population, own: Population) -> Outcome:
    """The outcome of the hosts of ``own`` with the rent that the tasks of ``before`` ask."""
    sizes, larger = (
        torch.tensor([[task.host.parameter_count] for task in population.tasks]).double()
        for population in (before, own)
    )
    rents = torch.tensor([[task.rent] for task in before.tasks]).double()
    added = (larger - sizes).clamp(min=0.0)

    def priced(score: Floats) -> Floats:
        return utility(torch.from_numpy(score), added, sizes, rents).numpy()

    return replace(
        outcome,
        test_utility=priced(outcome.test_score),
        validation_utility=priced(outcome.validation_score),
        added=added.numpy(),
    )
