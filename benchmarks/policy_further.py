"""The rules of a ladder and the controllers on further draws, and on later families."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from branches import LARGE
from later_tasks import later_families
from numpy.typing import NDArray
from reporting import kept
from torch import Tensor

from esper.runtime.task import HELD_OUT_DRAWS
from esper.runtime.tasks import FAMILIES, Task
from esper.simic.growth.environment import GrowthEnv
from esper.simic.tools.grow import GrowingPolicy
from esper.tamiyo.baselines import Actor, blueprint_of
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tamiyo.try_and_keep import TryAndKeepActor, trial_of
from esper.tamiyo.try_in_turn import TryInTurnActor, turns_of
from esper_lab.controls import ORDERS, TurnPlan, training_outcomes
from esper_lab.evaluation import CLAIRVOYANT
from esper_lab.hosts import FRESH_HOSTS, evaluation_hosts, tasks_in_turn
from esper_lab.plans import NEVER, Plan, library, schedule
from esper_lab.play import (
    Hosts,
    Outcome,
    Population,
    Rules,
    Stages,
    play,
    play_plans,
    tasks_of_groups,
)
from esper_lab.rules import RULES
from esper_lab.shipped_controls import ShippedControls, shipped_controls

FURTHER = range(HELD_OUT_DRAWS + 2000, HELD_OUT_DRAWS + 2256)
"""Draws beyond those of the ladder. 256 others, on which an earlier policy was scored, serve
``policy_online.py``."""
FURTHER_SPLITS = tuple(range(100, 116))
LATER_TRAINING, LATER_DRAWS = 32, 64
"""Draws of a later family on which rules are tuned, and on which everything is scored."""
TURN = TurnPlan(size=0.0, start=0.0, patience=0.45, order="backwards")
"""The variant of try-and-keep that is best on the training hosts of the ladder of ``one_seed``."""
TURN_LARGE = replace(TURN, order="forwards")
"""The best variant that plants a large seed in the first slot, as the controllers do."""
Played = dict[str, list[float]]


def work_of(family: str, work: Path | None) -> Path:
    """Where finished stages of a family are kept: ``work`` if it is given."""
    return (Path("runs/policy") / family if work is None else work).absolute()


def tell(stage: str, done: int, total: int) -> None:
    """Print a line per finished batch."""
    print(f"{stage}: {done} more of {total} episodes", flush=True)


def population(
    family: str, draws: range, splits: tuple[int, ...], first: int, threads: int
) -> Population:
    """Hosts of draws of a family, whose data are split with ``splits`` in turn."""
    draw = FAMILIES[family].draw
    tasks = tasks_in_turn([draw(number) for number in draws], len(draws), splits)
    return Population(tasks, first, data_seed=ORDERS[0], threads=threads)


def ladder_hosts(family: str, threads: int) -> tuple[ShippedControls, Hosts]:
    """The controls of a family that come with Esper, and the hosts on which they were played."""
    stored = shipped_controls(family)
    assert stored is not None, f"the controls come from benchmarks/world.py --families {family}"
    (hosts,) = evaluation_hosts(family, stored.training_hosts, stored.hosts, threads)
    fresh, training = (replace(one, data_seed=ORDERS[0]) for one in (hosts.fresh, hosts.training))
    return stored, replace(hosts, fresh=fresh, training=training)


def further_splits(hosts: int) -> list[int | None]:
    """The split of each of ``hosts`` further hosts."""
    return [FURTHER_SPLITS[i % len(FURTHER_SPLITS)] for i in range(hosts)]


def further_hosts(family: str, threads: int, draws: range = FURTHER) -> Population:
    """The hosts of the further draws of a family."""
    return population(family, draws, FURTHER_SPLITS, FRESH_HOSTS + 10_000, threads)


def turn_actor(env: GrowthEnv, turn: TurnPlan, first: float) -> Actor:
    """Try in turn, with a seed of size ``first`` in the first slot."""
    tasks = tasks_of_groups(env)
    turns = turns_of(
        [task.host.slots for task in tasks],
        env.slot_count,
        env.config.episode_length,
        turn.size,
        turn.start,
        turn.patience,
        turn.order,
    )
    plant_first(turns.blueprint, tasks, first)
    return TryInTurnActor(turns)


def plant_first(blueprint: Tensor, tasks: Sequence[Task], size: float) -> None:
    """Put seeds of ``size`` into the first slot: column 0 of ``blueprint [N, S]``, in place."""
    for row, task in enumerate(tasks):
        blueprint[row, 0] = blueprint_of(size, task.host.slots[0])


def trial_actor(env: GrowthEnv, first: float) -> Actor:
    """Try and keep, decided as late as possible: the smallest seeds, but in the first slot."""
    tasks = tasks_of_groups(env)
    trial = trial_of([task.host.slots for task in tasks], env.slot_count, env.config.episode_length)
    plant_first(trial.blueprint, tasks, first)
    return TryAndKeepActor(trial)


@dataclass(frozen=True, slots=True)
class Trying:
    """A rule that tries seeds and keeps what pays.

    Attributes:
        actor: makes its actor.
        at_once: whether seeds germinate without waiting for each other.
    """

    actor: Callable[[GrowthEnv], Actor]
    at_once: bool = False


TRYING = {
    "one_seed": {
        "try in turn": Trying(partial(turn_actor, turn=TURN, first=TURN.size)),
        "try in turn, large first": Trying(partial(turn_actor, turn=TURN_LARGE, first=LARGE)),
    },
    "adaptation": {
        "try and keep": Trying(partial(trial_actor, first=0.0)),
        "try and keep, large first": Trying(partial(trial_actor, first=LARGE), True),
    },
}
"""Rules of this kind by family, in the variants that are best on its training hosts."""


class InOrder:
    """Makes the actors of consecutive batches of hosts, which follow the rows of a schedule."""

    def __init__(self, rows: Schedule):
        self.rows, self.begin = rows, 0

    def __call__(self, env: GrowthEnv) -> Actor:
        """The actor of the next ``env.count`` hosts."""
        own = torch.arange(self.begin, self.begin + env.count)
        self.begin += env.count
        return ScheduleActor(self.rows.take(own))


def utilities(
    hosts: Population,
    actor: Callable[[GrowthEnv], Actor],
    validation: bool = False,
    at_once: bool = False,
) -> list[float]:
    """Utility of a policy on each host.

    Args:
        hosts: the hosts.
        actor: makes its actor.
        validation: whether utility is taken on the validation split.
        at_once: whether seeds germinate without waiting for each other.
    """
    found = play(hosts, actor, 1, Rules(one_at_a_time=not at_once))
    return (found.validation_utility if validation else found.test_utility)[:, 0].tolist()


def greedy_utilities(
    hosts: Population, grower: GrowingPolicy, validation: bool = False
) -> list[float]:
    """Utility of a trained policy on each host, with its most probable actions."""
    at_once = not grower.settings.world.one_at_a_time
    return utilities(hosts, lambda env: grower.actor(env, greedy=True), validation, at_once)


def tuning(training: Population, work: Path) -> Outcome:
    """The outcomes of all plans of the library on the training hosts, ``[hosts, plans]``."""
    plans = library()
    return Stages(work, tell).load_or_play(
        "tuning", training, plans, lambda done: play_plans(training, plans, done)
    )


def played_rules(training: Population, hosts: Population, work: Path) -> dict[str, list[float]]:
    """Utility of never growing and of the rules of the ladder, tuned on the training hosts."""
    plans = library()
    known = training_outcomes(tuning(training, work), hosts.tasks[0].episode_length, plans)
    never = play_plans(hosts, (NEVER,))
    found = {"never": never.test_utility[:, 0].tolist()}
    played: Played = {}  # rules may choose alike
    for name, tuned in RULES.items():
        chosen = tuned(known)(never.features)
        same = str(chosen.tolist())
        if same not in played:
            played[same] = planned_utilities(hosts, chosen, plans)
        found[name] = played[same]
    return found


def planned_utilities(
    hosts: Population, chosen: NDArray[np.int_], plans: Sequence[Plan]
) -> list[float]:
    """Utility of the plan that is chosen for each host."""
    rows = followed(chosen, plans, hosts, hosts.tasks[0].episode_length)
    together = [plans[plan].at_once for plan in chosen]
    found = {at_once: utilities(hosts, InOrder(rows), at_once=at_once) for at_once in set(together)}
    return [found[at_once][host] for host, at_once in enumerate(together)]


def clairvoyant(hosts: Population, work: Path) -> list[float]:
    """Utility of the plan that is best on each host, chosen with another order of its data."""
    plans = library()
    again = replace(hosts, data_seed=ORDERS[1])
    known = Stages(work, tell).load_or_play(
        "clairvoyant", again, plans, lambda done: play_plans(again, plans, done)
    )
    best = known.test_utility.argmax(1)
    return planned_utilities(hosts, best, plans)


def followed(
    chosen: NDArray[np.int_], plans: Sequence[Plan], hosts: Population, length: int
) -> Schedule:
    """The schedules of the plans that are chosen for each host."""
    rows = zip(chosen, hosts.tasks, strict=True)
    return Schedule.concatenate([schedule((plans[plan],), task, length) for plan, task in rows])


def further(
    runs: dict[int, Path],
    work: Path,
    hosts: Population,
    training: Population,
    trying: Mapping[str, Trying],
) -> Played:
    """Utility of the rules, and of the controllers greedily, on each host, by name."""
    found: Played = kept(work / "rules.json", lambda: played_rules(training, hosts, work))
    for name, rule in trying.items():
        play_rule = partial(utilities, hosts, rule.actor, at_once=rule.at_once)
        found[name] = kept(work / f"{name}.json", play_rule)
    for seed, run in runs.items():
        grower = GrowingPolicy.named(str(run))
        path = work / f"controller-{seed}.json"
        found[str(seed)] = kept(path, partial(greedy_utilities, hosts, grower))
    return found


def further_and_clairvoyant(
    runs: dict[int, Path], family: str, training: Population, work: Path
) -> Played:
    """``further`` on the further draws of ``family``, with the clairvoyant."""
    hosts, folder = further_hosts(family, training.threads), work / "further"
    found = further(runs, folder, hosts, training, TRYING[family])
    found[CLAIRVOYANT] = kept(folder / "best_plans.json", partial(clairvoyant, hosts, folder))
    return found


def everywhere(
    runs: dict[int, Path], family: str, training: Population, work: Path
) -> dict[str, Played]:
    """``further`` on further draws of ``family`` and on the later families, by name.

    Args:
        runs: run directory of each controller.
        family: the family on which they learned.
        training: hosts of that family on which its rules are tuned.
        work: directory in which finished stages are kept.
    """
    threads, trying = training.threads, TRYING[family]
    found = {family: further_and_clairvoyant(runs, family, training, work)}
    for number, later in enumerate(later_families(family)):
        draws = range(HELD_OUT_DRAWS + 1000, HELD_OUT_DRAWS + 1000 + LATER_DRAWS)
        first = FRESH_HOSTS + 30_000
        new = population(later.name, draws, FURTHER_SPLITS, first + 1000 * number, threads)
        known = population(later.name, range(LATER_TRAINING), (0, 1, 2, 3), 1000 * number, threads)
        found[later.name] = further(runs, work / later.name, new, known, trying)
    return found
