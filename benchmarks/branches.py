"""Episodes that branch: an early seed is kept, pruned or replaced some steps after a shift.

The recorder knows when the data shift; the policies that learn from its records are not told.
"""

from pathlib import Path

import torch
from torch import Tensor

from esper.leyline.actions import ALPHA_SPEED_STEPS, CANONICAL_CHOICE, HEADS, Op, Style
from esper.leyline.config import defaults_of, unflatten
from esper.runtime import registry
from esper.runtime.task import Task
from esper.simic.growth.environment import GrowthEnv
from esper.simic.training.vectorized import run_training
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tamiyo.plans import blueprint_of
from esper.tamiyo.policy.features import Observation

EARLY_SLOT, EARLY_SIZE = 0, 2 / 3
"""Slot and size (see ``tamiyo.plans.PlannedSeed``) of the seed that is planted at once. Large seeds
learn too slowly, and their gradients explode too often, to be planted after a shift."""
DELAY = 4
"""Steps between the first step after a shift and the decision. A longer look tells little more and
leaves less time."""
KEEP, PRUNE = "keep", "prune"
BRANCHES: tuple[str | int, ...] = (KEEP, PRUNE, 0, 1, 2)
"""What becomes of the early seed: the smallest seed of a slot replaces it for a number."""
BATCH = "branching"
"""Suite of the draws of one run."""


def decision_step(task: Task) -> int:
    """The step in which the branches of a host part; hosts without a shift have one as well."""
    number = int(task.name.partition(":")[2])
    first = 2 + number % 12
    if task.drift is not None:
        first = int(task.drift.earliest * task.episode_length) + 1
    return first + DELAY


class BranchingActor:
    """Plants the early seed; member m of a group then takes ``BRANCHES[m]``.

    No seed is fossilised before the decision, after which it could not be pruned.

    Args:
        env: the environments, in groups of ``len(BRANCHES)`` members, of three slots each.
    """

    def __init__(self, env: GrowthEnv):
        self.env = env

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``simic.growth.collect.Actor.begin``."""
        self._begun = environments, episode

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``simic.growth.collect.Actor.act``. Tasks are known only after ``begin``."""
        if step == 0:
            self._prepare(self.env.current_tasks, observation.slots.shape[1])
        decided = self._decision <= step
        first, log_prob, value = self._before.act(observation, step)
        then, _, _ = self._after.act(observation, step)
        first = torch.where((first[:, 0] == Op.FOSSILISE)[:, None], _action(Op.WAIT), first)
        actions = torch.where(decided[:, None], then, first)
        legal = observation.masks.slots[:, Op.PRUNE, EARLY_SLOT]
        due = self._leaves & decided & legal & ~self._pruned
        self._pruned |= due
        prune = _action(Op.PRUNE, slot=EARLY_SLOT, alpha_speed=ALPHA_SPEED_STEPS.index(0))
        return torch.where(due[:, None], prune, actions), log_prob, value

    def _prepare(self, tasks: list[Task], slots: int) -> None:
        count = len(tasks)
        before, after = (Schedule.never(count, slots) for _ in range(2))
        for rows in (before, after):
            rows.style[:], rows.tempo[:] = int(Style.LINEAR_ADD), 0
        before.start[:, EARLY_SLOT] = 0
        self._decision = torch.tensor([decision_step(task) for task in tasks])
        self._leaves = torch.zeros(count, dtype=torch.bool)
        self._pruned = torch.zeros(count, dtype=torch.bool)
        for row, task in enumerate(tasks):
            branch = BRANCHES[row % len(BRANCHES)]
            self._leaves[row] = branch != KEEP
            early = blueprint_of(EARLY_SIZE, task.host.slots[EARLY_SLOT])
            before.blueprint[row, EARLY_SLOT] = early
            if isinstance(branch, int):
                # One seed may live, so that it waits until the other is pruned.
                after.start[row, branch] = self._decision[row]
                after.blueprint[row, branch] = blueprint_of(0.0, task.host.slots[branch])
        self._before, self._after = ScheduleActor(before), ScheduleActor(after)
        for actor in (self._before, self._after):
            actor.begin(*self._begun)


def _action(op: Op, slot: int = 0, **heads: int) -> Tensor:
    named = {**CANONICAL_CHOICE, **heads, "op": int(op), "slot": slot}
    return torch.tensor([named[head] for head in HEADS])


def record_branches(family: str, first: int, hosts: int, folder: Path, threads: int) -> Path:
    """Record the branches of ``hosts`` draws from number ``first`` on, in a run of its own.

    Args:
        family: name of the family; one seed may live in its tasks, and hosts have three slots.
        first: number of the first draw.
        hosts: number of draws.
        folder: directory of the runs.
        threads: CPU threads.
    """
    name = f"{family}-{first}"
    registry.SUITES[BATCH] = tuple(f"{family}:{n}" for n in range(first, first + hosts))
    settings = {
        "task": [BATCH],
        "envs": hosts * len(BRANCHES),
        "group_size": len(BRANCHES),
        "common_seeds": True,
        "rounds": 1,
        "seed": 1000 + first,
        "threads": threads,
        "reward": "terminal",
        "record": True,
        "name": name,
        "telemetry_dir": str(folder),
        "telemetry_level": "minimal",
    }
    config = unflatten(settings, defaults_of("heuristic"))
    return run_training(config, "branches", actor=BranchingActor).path
