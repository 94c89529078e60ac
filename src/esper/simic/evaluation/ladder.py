"""The ladder: a policy between the controls, all on the same fresh hosts, on the test split.

Rules are tuned on training hosts. The clairvoyant is the plan that is best for each host with one
data order, scored with another order, so that it is not paid for luck.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.runtime.tasks import SUITES, find_all
from esper.simic.evaluation.plans import Plan
from esper.simic.evaluation.play import Floats, Outcome, Population, play_plans
from esper.simic.evaluation.rules import RULES, Known
from esper.simic.run.disk import replace_synced

TRAINING_HOSTS, FRESH_HOSTS = 0, 1 << 20
"""Identities of the first training host and of the first fresh host."""
ORDERS = 1, 2
"""Seeds of the two data orders."""


@dataclass(slots=True)
class Ladder:
    """Test utility of every control and policy on H fresh hosts.

    Attributes:
        suite: name of the suite.
        tasks: task or family of each host, ``[H]``.
        plans: names of the plans of the library.
        rungs: utility by control, ``[H]`` each, in the order in which they are shown.
        chosen: for each control that chooses plans, the plan of each host, ``[H]``.
        validation: validation utility of the same rungs, where it was measured.
    """

    suite: str
    tasks: list[str]
    plans: list[str]
    rungs: dict[str, Floats] = field(default_factory=dict)
    chosen: dict[str, NDArray[np.int_]] = field(default_factory=dict)

    def shares(self) -> dict[str, float]:
        """Share of the hosts on which each plan is the clairvoyant's choice, largest first."""
        counts = np.bincount(self.chosen[CLAIRVOYANT], minlength=len(self.plans))
        order = counts.argsort(kind="stable")[::-1]
        return {self.plans[i]: float(counts[i] / counts.sum()) for i in order if counts[i]}


NEVER_GROW, EVERYTHING = "never grow", "everything at step 0"
BEST_PER_TASK, CLAIRVOYANT = "best plan per task", "clairvoyant per host"


def population(suite: str, hosts: int, fresh: bool, threads: int) -> Population:
    """``hosts`` training hosts or fresh hosts of a suite, its tasks in turn.

    A family's fresh hosts are held-out draws.
    """
    held_out = f"{suite}_held_out"
    name = held_out if fresh and held_out in SUITES else suite
    tasks = find_all([name])
    drawn = tuple(tasks[i % len(tasks)] for i in range(hosts))
    return Population(drawn, FRESH_HOSTS if fresh else TRAINING_HOSTS, threads=threads)


def controls(
    suite: str,
    training: Outcome,
    fresh: tuple[Outcome, Outcome],
    hosts: Population,
    known: Known,
    plans: tuple[Plan, ...],
) -> Ladder:
    """The ladder of all controls.

    Args:
        suite: name of the suite.
        training: the library on the training hosts.
        fresh: the library on the fresh hosts, with either data order; the first is scored.
        hosts: the fresh hosts.
        known: what the rules are tuned on.
        plans: the library.
    """
    first, second = fresh
    names = [task.family or task.name for task in hosts.tasks]
    ladder = Ladder(suite, names, [plan.name for plan in plans])

    def add(name: str, chosen: NDArray[np.int_]) -> None:
        ladder.chosen[name] = chosen
        ladder.rungs[name] = first.members(chosen)

    count = len(names)
    add(NEVER_GROW, np.zeros(count, dtype=int))
    at_once = [i for i, plan in enumerate(plans) if plan.at_once]
    best = at_once[int(training.test_utility.mean(0)[at_once].argmax())]
    add(EVERYTHING, np.full(count, best))
    for name, tuned in RULES.items():
        add(name, tuned(known)(first.features))
    if len(set(names)) > 1:
        own = {name: _best(second, np.array(names) == name) for name in names}
        add(BEST_PER_TASK, np.array([own[name] for name in names]))
    add(CLAIRVOYANT, second.test_utility.argmax(1))
    return ladder


def _best(outcome: Outcome, where: NDArray[np.bool_]) -> int:
    return int(outcome.test_utility[where].mean(0).argmax())


def known_of(outcome: Outcome, hosts: Population, plans: tuple[Plan, ...]) -> Known:
    """What rules are tuned on: the library's outcome on training hosts."""
    length = hosts.tasks[0].episode_length
    starts = np.array([min(length, round(plan.start * length)) for plan in plans])
    return Known(outcome.test_utility, outcome.features, starts, tuple(p.kind for p in plans))


def kept_outcome(path: Path, make: Callable[[], Outcome]) -> Outcome:
    """The outcome stored at ``path``; made and stored there if there is none."""
    if not path.exists():
        outcome = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = _packed(outcome)
        replace_synced(path, buffer)
    with np.load(path) as stored:
        return Outcome(**{name: stored[name].astype(float) for name in Outcome.__slots__})


def _packed(outcome: Outcome) -> bytes:
    buffer = io.BytesIO()
    arrays = {name: getattr(outcome, name).astype(np.float32) for name in Outcome.__slots__}
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def play_controls(
    suite: str,
    hosts: int,
    training_hosts: int,
    plans: tuple[Plan, ...],
    threads: int,
    work: Path,
    on_batch: Callable[[str, int], None] = lambda stage, hosts: None,
) -> Ladder:
    """Play the library on training and fresh hosts and build the ladder of controls.

    Args:
        suite: name of a suite or family.
        hosts: number of fresh hosts.
        training_hosts: number of hosts on which rules are tuned.
        plans: the library.
        threads: CPU threads.
        work: directory in which finished stages are kept; they are not repeated.
        on_batch: called with the stage and the number of hosts of every finished batch.
    """
    training = population(suite, training_hosts, False, threads)
    fresh = population(suite, hosts, True, threads)
    orders = [replace(fresh, data_seed=order) for order in ORDERS]
    stages = {
        f"training-{training_hosts}": replace(training, data_seed=ORDERS[0]),
        **{f"fresh-{hosts}-order-{order}": p for order, p in zip(ORDERS, orders, strict=True)},
    }
    found = []
    for stage, hosts_of in stages.items():

        def make(stage: str = stage, hosts_of: Population = hosts_of) -> Outcome:
            return play_plans(hosts_of, plans, lambda done: on_batch(stage, done))

        found.append(kept_outcome(work / f"{stage}-{len(plans)}-plans.npz", make))
    tuned, *measured = found
    known = known_of(tuned, training, plans)
    return controls(suite, tuned, (measured[0], measured[1]), fresh, known, plans)
