"""The hosts of an evaluation: training hosts of the rules and fresh hosts, by horizon.

Hosts that are played together must agree in their horizon, so a suite whose tasks differ in it is
played in parts. Rules are tuned on training hosts with other splits of the data than those of the
fresh hosts; splits are drawn from one set of images, so they share test images.
"""

from collections.abc import Sequence
from math import lcm

from esper.leyline.errors import UsageError
from esper.runtime.tasks import FAMILIES, SUITES, Task, find_all
from esper_lab.play import Hosts, Population

TRAINING_HOSTS, FRESH_HOSTS = 0, 1 << 20
"""Identities of the first training host and of the first fresh host."""
SPLITS = tuple(range(16))
"""Seeds of the splits of the fresh hosts' data, in turn."""
MIN_TRAINING = 20
"""Fewest hosts of one horizon on which rules are tuned, if the training hosts differ in it."""

Horizon = tuple[int, int, int, int | None]
"""See ``Task.horizon``."""


def held_out_of(suite: str) -> str | None:
    """The suite of held-out tasks or draws that belongs to a training suite, if there is one."""
    name = "held_out" if suite == "suite" else f"{suite}_held_out"
    return name if name in SUITES else None


def training_of(suite: str) -> str:
    """The suite on which rules for ``suite`` are tuned: itself, unless it is held out."""
    return next((name for name in SUITES if held_out_of(name) == suite), suite)


def evaluation_hosts(
    suite: str,
    training: int,
    fresh: int,
    threads: int,
    splits: Sequence[int] = SPLITS,
    slots: Sequence[str] = (),
) -> list[Hosts]:
    """The hosts of an evaluation on a suite, see ``hosts_by_horizon``.

    A family's fresh hosts are held-out draws. Rules for held-out tasks are tuned on the training
    suite, and all others on the tasks on which they are scored.

    Args:
        suite: a suite, a family or a task.
        training, fresh: numbers of hosts.
        threads, splits, slots: see ``hosts_by_horizon``.

    Raises:
        UsageError: see ``hosts_by_horizon``.
    """
    held_out = held_out_of(suite) if suite in FAMILIES else None
    return hosts_by_horizon(
        training_of(suite), held_out or suite, (training, fresh), splits, threads, slots
    )


def hosts_by_horizon(
    training: str,
    fresh: str,
    counts: tuple[int, int],
    splits: Sequence[int],
    threads: int,
    slots: Sequence[str] = (),
) -> list[Hosts]:
    """The hosts of an evaluation in parts of one horizon; the tasks of a suite in turn.

    The training hosts of a part are those of its horizon. If there are none, they are all of them,
    provided that they agree in theirs and that it is not longer: a rule must not look at a step
    that fresh hosts do not reach.

    Args:
        training, fresh: suites of the training hosts and of the fresh hosts.
        counts: numbers of training hosts and of fresh hosts.
        splits: seeds of the splits of the fresh hosts' data, in turn, see ``Task.with_split``; the
            training hosts have as many other seeds. Without seeds the tasks stay as they are.
        threads, slots: CPU threads, and see ``Task.with_slots``.

    Raises:
        UsageError: there is no such suite, or too few of the hosts have one horizon.
    """
    training_splits = [(max(splits) + 1 + i) % (1 << 32) for i in range(len(splits))]
    lessons, tasks = (
        tuple(t.with_slots(slots) for t in find_all([name])) for name in (training, fresh)
    )
    lessons = tasks_in_turn(lessons, counts[0], training_splits)
    training_hosts = _populations(lessons, TRAINING_HOSTS, threads)
    fresh_hosts = _populations(tasks_in_turn(tasks, counts[1], splits), FRESH_HOSTS, threads)
    parts = []
    for horizon, population in fresh_hosts.items():
        if len(population.tasks) == 1 < counts[1]:
            raise UsageError(
                f"hosts: only one of {counts[1]} fresh hosts has the horizon of "
                f"{population.tasks[0].name}, which leaves no host for its misled twin; "
                f"give at least {2 * len(tasks)}"
            )
        parts.append(
            Hosts(_training_of_part(training, training_hosts, horizon, population), population)
        )
    return parts


def _populations(tasks: Sequence[Task], first: int, threads: int) -> dict[Horizon, Population]:
    """Populations by horizon, whose identities follow one another from ``first``."""
    groups: dict[Horizon, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.horizon, []).append(task)
    populations = {}
    for horizon, members in groups.items():
        populations[horizon] = Population(tuple(members), first, threads=threads)
        first += len(members)
    return populations


def _training_of_part(
    suite: str, populations: dict[Horizon, Population], horizon: Horizon, fresh: Population
) -> Population:
    """The training hosts for fresh hosts of one horizon."""
    name, training = fresh.tasks[0].name, populations.get(horizon)
    if training is None:
        (length, *_), population = next(iter(populations.items()))
        if len(populations) > 1 or length > horizon[0]:
            raise UsageError(
                f"suite: no rule can be tuned for {name}, because the horizons of the training "
                f"hosts of {suite} differ from its own; name one task"
            )
        return population
    count, total = len(training.tasks), sum(len(each.tasks) for each in populations.values())
    if count < min(total, MIN_TRAINING):
        raise UsageError(
            f"training_hosts: only {count} of {total} training hosts have the horizon of {name}, "
            f"and rules need {MIN_TRAINING}; give more, or name one task"
        )
    return training


def tasks_in_turn(tasks: Sequence[Task], count: int, splits: Sequence[int]) -> tuple[Task, ...]:
    """The tasks of ``count`` hosts.

    Both tasks and splits come in turn; once all pairs that this gives are there, the splits move on
    by one. Without ``splits`` the tasks stay as they are.
    """
    hosts = [(host, tasks[host % len(tasks)]) for host in range(count)]
    if not splits:
        return tuple(task for _, task in hosts)
    period = lcm(len(tasks), len(splits))
    return tuple(task.with_split(splits[(n + n // period) % len(splits)]) for n, task in hosts)
