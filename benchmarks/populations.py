"""Hosts of the benchmarks on growing, on several splits of their data, and the controls on them.

Hosts that are played together must agree in their horizon, so a suite whose tasks differ is played
in parts. Rules are tuned on training hosts with other splits than those of the fresh hosts, so that
no rule is scored on the split on which it was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline.errors import UsageError
from esper.leyline.evaluation import Evaluation, Rung
from esper.runtime.tasks import SUITES, find_all
from esper.simic.evaluation.ladder import (
    FRESH_HOSTS,
    RULE,
    TRAINING_HOSTS,
    evaluate,
    tasks_in_turn,
)
from esper.simic.evaluation.play import Hosts, Population

SPLITS = 8
"""Default number of splits."""


@dataclass(frozen=True, slots=True)
class Part:
    """Hosts of one horizon.

    Attributes:
        hosts: training hosts of the rules, and the fresh hosts.
    """

    hosts: Hosts


def held_out_of(suite: str) -> str | None:
    """Return the suite of held-out tasks that belongs to a training suite, if there is one."""
    name = "held_out" if suite == "suite" else f"{suite}_held_out"
    return name if name in SUITES else None


def parts(
    training: str, fresh: str, counts: tuple[int, int], splits: int, threads: int
) -> list[Part]:
    """Return the hosts of an evaluation, by horizon.

    Args:
        training: suite of the training hosts.
        fresh: suite of the fresh hosts.
        counts: numbers of training hosts and of fresh hosts.
        splits: number of splits, the same for both; 0 for the tasks as they are.
        threads: CPU threads.

    Raises:
        UsageError: the tasks of ``training`` differ in their horizon.
    """
    tuned = tasks_in_turn(find_all([training]), counts[0], range(splits, 2 * splits))
    if len({task.horizon for task in tuned}) > 1:
        raise UsageError(f"suites: the tasks of {training} differ in horizon; name one task")
    tasks = tasks_in_turn(find_all([fresh]), counts[1], range(splits))
    population = Population(tuned, TRAINING_HOSTS, threads=threads)
    found, first = [], FRESH_HOSTS
    for horizon in dict.fromkeys(task.horizon for task in tasks):
        own = tuple(task for task in tasks if task.horizon == horizon)
        found.append(Part(Hosts(population, Population(own, first, threads=threads))))
        first += len(own)
    return found


def controls(suite: str, found: list[Part], random_plans: int, work: Path) -> Evaluation:
    """Play the controls on all parts; finished stages in ``work`` are not repeated.

    A single task's rung "best plan per task" would be missing in a part that holds no other task,
    so it is only there if every part has it.
    """

    def tell(stage: str, done: int, total: int) -> None:
        print(f"{suite} {stage}: {done} more of {total} episodes", flush=True)

    return joined(
        [evaluate(RULE, suite, part.hosts, random_plans, 1, work, tell) for part in found]
    )


def joined(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluations of several parts as one; rungs that a part lacks are left out."""
    first = evaluations[0]
    names = [{rung.name for rung in found.rungs} for found in evaluations]
    common = [rung.name for rung in first.rungs if all(rung.name in own for own in names)]
    tables = [{rung.name: rung for rung in found.rungs} for found in evaluations]
    return Evaluation(
        policy=first.policy,
        suite=first.suite,
        training_hosts=first.training_hosts,
        tasks=[task for found in evaluations for task in found.tasks],
        plans=first.plans,
        rungs=[joined_rungs([own[name] for own in tables]) for name in common],
        splits=[split for found in evaluations for split in found.splits],
    )


def joined_rungs(rungs: Sequence[Rung]) -> Rung:
    """Return the same rung on the hosts of several parts as one."""

    def column(name: str) -> list[Any]:
        return [value for rung in rungs for value in getattr(rung, name)]

    first = rungs[0]
    chosen = None if first.chosen is None else column("chosen")
    return Rung(
        first.name, first.policy, column("utility"), column("validation"), column("added"), chosen
    )
