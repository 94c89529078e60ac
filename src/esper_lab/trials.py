"""The variants of try-and-keep among which the ladder chooses on training hosts."""

from dataclasses import dataclass
from itertools import product

import torch

from esper.simic.growth.environment import GrowthEnv
from esper.tamiyo.baselines import Actor, blueprint_of
from esper.tamiyo.try_and_keep import RuleSettings, Trial, TryAndKeepActor
from esper.tamiyo.try_in_turn import ORDERS, TryInTurnActor, Turns, turns_of
from esper_lab.plans import SIZES
from esper_lab.play import Population, tasks_of_groups


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """A variant of try-and-keep.

    Attributes:
        size: size of the seeds, see ``plans.PlannedSeed``.
        start: part of the episode after which it plants.
        keep: most seeds that it keeps.
        decision: part of the episode after which it prunes and fossilises, one slot a step; it
            begins in time for all slots, see ``RuleSettings``.
    """

    size: float
    start: float
    keep: int
    decision: float

    def decision_step(self, length: int, slots: int) -> int:
        """The first step of the decision in an episode of ``length`` steps."""
        return RuleSettings(decision=self.decision).decision_step(length, slots)


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """A variant of try-and-keep where one seed may live: slots are tried in turn.

    Attributes:
        size, start, patience, order: see ``try_in_turn.turns_of``.
    """

    size: float
    start: float
    patience: float
    order: str


TRIALS = tuple(TrialPlan(*values) for values in product(SIZES, (0.0, 0.25), (1, 99), (0.5, 1.0)))
TURNS = tuple(TurnPlan(*values) for values in product(SIZES[:2], (0.0, 0.25), (0.3, 0.45), ORDERS))


def variants_of(population: Population) -> tuple[TrialPlan, ...] | tuple[TurnPlan, ...]:
    """The variants for hosts of one horizon: ``TURNS`` where one seed may live."""
    return TURNS if population.tasks[0].max_seeds == 1 else TRIALS


def trial_actor(env: GrowthEnv) -> Actor:
    """Member m of every group plays variant m of those of its hosts, see ``variants_of``."""
    return _turns(env) if env.config.max_seeds == 1 else _trials(env)


def _turns(env: GrowthEnv) -> Actor:
    slots = [task.host.slots for task in tasks_of_groups(env)]
    length = env.config.episode_length
    rows = [
        turns_of(slots, env.slot_count, length, p.size, p.start, p.patience, p.order) for p in TURNS
    ]

    def by_member(name: str) -> torch.Tensor:
        return torch.stack([getattr(row, name) for row in rows], 1).flatten(0, 1)

    return TryInTurnActor(Turns(*map(by_member, Turns.__slots__)))


def _trials(env: GrowthEnv) -> Actor:
    length, members = env.config.episode_length, len(TRIALS)
    tasks = tasks_of_groups(env)
    blueprint = torch.zeros(env.count, env.slot_count, dtype=torch.long)
    decision = [p.decision_step(length, len(t.host.slots)) for t in tasks for p in TRIALS]
    for group, task in enumerate(tasks):
        for member, plan in enumerate(TRIALS):
            for s, slot in enumerate(task.host.slots):
                blueprint[group * members + member, s] = blueprint_of(plan.size, slot)
    count = len(tasks)

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values * count)

    return TryAndKeepActor(
        Trial(
            blueprint=blueprint,
            start=column([round(plan.start * length) for plan in TRIALS]),
            decision=torch.tensor(decision),
            keep=column([plan.keep for plan in TRIALS]),
        )
    )
