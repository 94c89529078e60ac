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
from esper.simic.evaluation.play import Floats, Outcome, Population, play, play_plans
from esper.simic.evaluation.rules import RULES, Known
from esper.simic.evaluation.trials import TRIALS, trial_actor
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
TRY_AND_KEEP = "try and keep"
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


@dataclass(frozen=True, slots=True)
class Played:
    """Outcomes of the library of plans and of the variants of try-and-keep.

    Attributes:
        tuning: plans on the training hosts.
        fresh: plans on the fresh hosts.
        again: plans on the fresh hosts with another data order.
        tuning_trials, fresh_trials: try-and-keep on either.
    """

    tuning: Outcome
    fresh: Outcome
    again: Outcome
    tuning_trials: Outcome
    fresh_trials: Outcome


def play_library(
    training: Population,
    fresh: Population,
    plans: tuple[Plan, ...],
    work: Path,
    on_batch: Callable[[str, int], None] = lambda stage, hosts: None,
) -> Played:
    """Play the plans and the variants of try-and-keep.

    Args:
        training: hosts on which rules are tuned.
        fresh: hosts on which they are scored.
        plans: the library.
        work: directory in which finished stages are kept; they are not repeated.
        on_batch: called with the stage and the number of hosts of every finished batch.
    """
    scored, again = (replace(fresh, data_seed=order) for order in ORDERS)
    tuning = replace(training, data_seed=ORDERS[0])

    def stage(name: str, hosts: Population, trials: bool) -> Outcome:
        def make() -> Outcome:
            def done(count: int) -> None:
                on_batch(name, count)

            if trials:
                return play(hosts, trial_actor, len(TRIALS), on_batch=done)
            return play_plans(hosts, plans, done)

        return kept_outcome(work / f"{name}-{len(hosts.tasks)}.npz", make)

    return Played(
        tuning=stage("tuning", tuning, False),
        fresh=stage("fresh", scored, False),
        again=stage("again", again, False),
        tuning_trials=stage("tuning-trials", tuning, True),
        fresh_trials=stage("fresh-trials", scored, True),
    )


def controls(suite: str, played: Played, hosts: Population, plans: tuple[Plan, ...]) -> Ladder:
    """The ladder of all controls on the fresh hosts ``hosts``."""
    names = np.array([task.family or task.name for task in hosts.tasks])
    ladder = Ladder(suite, names.tolist(), [plan.name for plan in plans])
    known = known_plans(played.tuning, hosts.tasks[0].episode_length, plans)

    def add(name: str, chosen: NDArray[np.int_]) -> None:
        ladder.chosen[name] = chosen
        ladder.rungs[name] = played.fresh.members(chosen)

    add(NEVER_GROW, np.zeros(len(names), dtype=int))
    at_once = [i for i, plan in enumerate(plans) if plan.at_once]
    largest = at_once[int(played.tuning.test_utility.mean(0)[at_once].argmax())]
    add(EVERYTHING, np.full(len(names), largest))
    for name, tuned in RULES.items():
        add(name, tuned(known)(played.fresh.features))
    variant = int(played.tuning_trials.test_utility.mean(0).argmax())
    ladder.rungs[TRY_AND_KEEP] = played.fresh_trials.test_utility[:, variant]
    if len(set(names)) > 1:
        utility = played.again.test_utility
        best = {name: int(utility[names == name].mean(0).argmax()) for name in set(names)}
        add(BEST_PER_TASK, np.array([best[name] for name in names]))
    add(CLAIRVOYANT, played.again.test_utility.argmax(1))
    return ladder


def known_plans(outcome: Outcome, length: int, plans: tuple[Plan, ...]) -> Known:
    """What rules are tuned on: the outcome of the plans on training hosts.

    Args:
        outcome: outcome of the plans.
        length: steps per episode.
        plans: the library.
    """
    starts = np.array([min(length, round(plan.start * length)) for plan in plans])
    return Known(outcome.test_utility, outcome.features, starts, tuple(p.kind for p in plans))


def kept_outcome(path: Path, make: Callable[[], Outcome]) -> Outcome:
    """The outcome stored at ``path``; made and stored there if there is none."""
    if not path.exists():
        outcome = make()
        buffer = io.BytesIO()
        arrays = {name: getattr(outcome, name).astype(np.float32) for name in Outcome.__slots__}
        np.savez_compressed(buffer, **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(path, buffer.getvalue())
    with np.load(path) as stored:
        return Outcome(**{name: stored[name].astype(float) for name in Outcome.__slots__})
