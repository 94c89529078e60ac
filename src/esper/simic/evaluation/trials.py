"""The variants of try-and-keep among which the ladder chooses on training hosts."""

from dataclasses import dataclass
from itertools import product

import torch

from esper.simic.evaluation.play import tasks_of_groups
from esper.simic.growth.collect import Actor
from esper.simic.growth.environment import GrowthEnv
from esper.tamiyo.plans import SIZES, blueprint_of
from esper.tamiyo.try_and_keep import Trial, TryAndKeepActor, last_decision


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """A variant of try-and-keep.

    Attributes:
        size: size of the seeds, see ``plans.PlannedSeed``.
        start: part of the episode after which it plants.
        keep: most seeds that it keeps.
        decision: part of the episode after which it prunes and fossilises, one slot a step; it
            begins in time for all slots, see ``last_decision``.
    """

    size: float
    start: float
    keep: int
    decision: float

    def decision_step(self, length: int, slots: int) -> int:
        """The first step of the decision in an episode of ``length`` steps."""
        return max(1, min(round(self.decision * length), last_decision(length, slots)))


TRIALS = tuple(TrialPlan(*chosen) for chosen in product(SIZES, (0.0, 0.25), (1, 99), (0.5, 1.0)))


def trial_actor(env: GrowthEnv) -> Actor:
    """Member m of every group plays ``TRIALS[m]``."""
    length, members = env.config.episode_length, len(TRIALS)
    tasks = tasks_of_groups(env)
    blueprint = torch.zeros(env.count, env.slot_count, dtype=torch.long)
    decision = [p.decision_step(length, len(t.host.slots)) for t in tasks for p in TRIALS]
    for group, task in enumerate(tasks):
        for member, plan in enumerate(TRIALS):
            for s, slot in enumerate(task.host.slots):
                blueprint[group * members + member, s] = blueprint_of(plan.size, slot)
    count = len(tasks)

    def repeated(values: list[int]) -> torch.Tensor:
        return torch.tensor(values * count)

    return TryAndKeepActor(
        Trial(
            blueprint=blueprint,
            start=repeated([round(plan.start * length) for plan in TRIALS]),
            decision=torch.tensor(decision),
            keep=repeated([plan.keep for plan in TRIALS]),
        )
    )
