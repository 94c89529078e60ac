"""Episodes that branch: seeds that were planted at once are kept, pruned or replaced after a shift.

The recorder knows when the data shift; the policies that learn from its records are not told.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline.actions import ALPHA_SPEED_STEPS, CANONICAL_CHOICE, HEADS, Op, Style
from esper.leyline.config import defaults_of, unflatten
from esper.runtime.task import Task
from esper.runtime.tasks import SUITES
from esper.simic.growth.environment import GrowthEnv
from esper.simic.training.vectorized import RunSummary, run_training
from esper.tamiyo.baselines import blueprint_of
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tamiyo.policy.features import Observation

BATCH = "branching"
"""Suite of the draws of one run."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What becomes of the early seeds at the decision.

    Attributes:
        name: in words.
        pruned: slots whose early seeds are pruned; the others are kept.
        planted: slot that gets the smallest seed afterwards, None if none does.
    """

    name: str
    pruned: tuple[int, ...] = ()
    planted: int | None = None


@dataclass(frozen=True, slots=True)
class Branching:
    """How the episodes of a family branch.

    Attributes:
        family: name of the family; its hosts have three slots.
        early: size (see ``esper_lab.plans.PlannedSeed``) of the seed that each slot gets at once,
            None if it gets none.
        delay: steps between the first step after a shift and the decision. A longer look tells
            little more and leaves less time.
        branches: the branches; the first keeps all early seeds.
        quiet: first steps of imagined shifts, where nothing shifts.
        at_once: whether seeds germinate without waiting for each other.
        words: the first move and the branches, as a clause about a group of episodes, with the
            delay as ``{delay}``.
    """

    family: str
    early: tuple[float | None, ...]
    delay: int
    branches: tuple[Branch, ...]
    quiet: range
    at_once: bool
    words: str

    def decision_step(self, task: Task) -> int:
        """The step in which the branches of a host part; hosts without a shift have one as well."""
        number = int(task.name.partition(":")[2])
        first = self.quiet[number % len(self.quiet)]
        if task.drift is not None:
            first = int(task.drift.earliest * task.episode_length) + 1
        return first + self.delay


LARGE = 2 / 3
"""Size of the early seed of the first slot. Larger seeds learn too slowly, and the gradients of
large seeds explode too often for them to be planted after a shift."""


def _of_all_slots() -> tuple[Branch, ...]:
    """The seed of the first slot is kept, pruned or replaced, the others are kept or pruned."""
    first = Branch("keep"), Branch("prune", (0,)), Branch("replace", (0,), 0)
    found = []
    for last, middle, branch in product((False, True), (False, True), first):
        others = (1,) * middle + (2,) * last
        name = branch.name + "".join(f", prune {slot}" for slot in others)
        found.append(replace(branch, name=name, pruned=branch.pruned + others))
    return tuple(found)


ONE_SEED = Branching(
    family="one_seed",
    early=(LARGE, None, None),
    delay=4,
    branches=(
        Branch("keep"),
        Branch("prune", (0,)),
        *(Branch(f"slot {slot}", (0,), slot) for slot in range(3)),
    ),
    quiet=range(2, 14),
    at_once=False,
    words="a large seed is planted in the first slot at once, and {delay} steps after the first "
    "step of the shift it is kept, pruned, or replaced by the smallest seed of one of the three "
    "slots",
)
ADAPTATION = Branching(
    family="adaptation",
    early=(LARGE, 0.0, 0.0),
    delay=2,
    branches=_of_all_slots(),
    quiet=range(1, 15),
    at_once=True,
    words="a large seed is planted in the first slot at once and the smallest in the others, and "
    "{delay} steps after the first step of the shift the first is kept, pruned or replaced by the "
    "smallest of its slot, and the others are kept or pruned",
)
BRANCHINGS = {branching.family: branching for branching in (ONE_SEED, ADAPTATION)}


class BranchingActor:
    """Plants the early seeds; member m of a group then takes the branch m.

    No seed is fossilised before the decision, after which it could not be pruned.

    Args:
        branching: how the episodes branch.
        env: the environments, in groups of as many members as there are branches.
    """

    def __init__(self, branching: Branching, env: GrowthEnv):
        self.branching, self.env = branching, env

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self._begun = environments, episode

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``. Tasks are known only after ``begin``."""
        if step == 0:
            self._prepare(self.env.current_tasks, observation.slots.shape[1])
        decided, masks = self._decision <= step, observation.masks
        legal = masks.slots.clone()
        legal[:, Op.FOSSILISE] &= decided[:, None]
        reversible = replace(observation, masks=replace(masks, slots=legal))
        first, log_prob, value = self._before.act(reversible, step)
        then, _, _ = self._after.act(reversible, step)
        actions = torch.where(decided[:, None], then, first)
        due = self._pruned & legal[:, Op.PRUNE] & decided[:, None]
        slot = due.int().argmax(1)
        chosen = torch.arange(due.shape[1]) == slot[:, None]
        self._pruned &= ~(due & chosen)
        prune = _action(Op.PRUNE, alpha_speed=ALPHA_SPEED_STEPS.index(0)).repeat(len(slot), 1)
        prune[:, HEADS.index("slot")] = slot
        return torch.where(due.any(1)[:, None], prune, actions), log_prob, value

    def _prepare(self, tasks: list[Task], slots: int) -> None:
        count, branches = len(tasks), self.branching.branches
        before, after = (Schedule.never(count, slots) for _ in range(2))
        for rows in (before, after):
            rows.style[:], rows.tempo[:] = int(Style.LINEAR_ADD), 0
        self._decision = torch.tensor([self.branching.decision_step(task) for task in tasks])
        self._pruned = torch.zeros(count, slots, dtype=torch.bool)
        for row, task in enumerate(tasks):
            branch, hosts = branches[row % len(branches)], task.host.slots
            for slot, size in enumerate(self.branching.early):
                if size is not None:
                    before.start[row, slot] = 0
                    before.blueprint[row, slot] = blueprint_of(size, hosts[slot])
            self._pruned[row, list(branch.pruned)] = True
            if branch.planted is not None:
                after.start[row, branch.planted] = self._decision[row]
                after.blueprint[row, branch.planted] = blueprint_of(0.0, hosts[branch.planted])
        self._before, self._after = ScheduleActor(before), ScheduleActor(after)
        for actor in (self._before, self._after):
            actor.begin(*self._begun)


def _action(op: Op, **heads: int) -> Tensor:
    named = {**CANONICAL_CHOICE, **heads, "op": int(op), "slot": 0}
    return torch.tensor([named[head] for head in HEADS])


def record_branches(
    branching: Branching, first: int, hosts: int, folder: Path, threads: int
) -> RunSummary:
    """Record the branches of ``hosts`` draws from number ``first`` on, in a run of its own.

    Args:
        branching: how the episodes branch.
        first: number of the first draw.
        hosts: number of draws.
        folder: directory of the runs.
        threads: CPU threads.
    """
    family, members = branching.family, len(branching.branches)
    SUITES[BATCH] = tuple(f"{family}:{n}" for n in range(first, first + hosts))
    settings = {
        "task": [BATCH],
        "envs": hosts * members,
        "group_size": members,
        "common_seeds": True,
        "one_at_a_time": not branching.at_once,
        "rounds": 1,
        "seed": 1000 + first,
        "threads": threads,
        "reward": "terminal",
        "record": True,
        "name": f"{family}-{first}",
        "telemetry_dir": str(folder),
        "telemetry_level": "minimal",
    }
    config = unflatten(settings, defaults_of("heuristic"))
    return run_training(config, "branches", actor=partial(BranchingActor, branching))
