"""A library of fixed schedules that fits every host, and an actor that follows all of them.

Controls choose among these plans: the best for all hosts, the best after one look, the best for
each host in hindsight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from esper.leyline.actions import Style
from esper.runtime.tasks import Task
from esper.tamiyo.baselines import blueprint_of
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tamiyo.policy.features import Observation

STARTS = 0.0, 0.3, 0.6
"""Parts of the episode after which the systematic plans begin to grow."""
SIZES = 0.0, 1 / 3, 2 / 3
"""Sizes of seeds in the systematic plans, see ``PlannedSeed``."""
POSITIONS = {"first": 0.0, "middle": 0.5, "last": 1.0}
"""Slots of the systematic plans, whose observations rules see; of two slots the first one is also
the middle one."""


@dataclass(frozen=True, slots=True)
class PlannedSeed:
    """A seed of a plan, in terms that fit every host.

    Attributes:
        position: slot, from 0 for the first to 1 for the last.
        size: blueprint, from 0 for the smallest that the slot accepts to 1 for the largest.
        start: part of the episode after which it germinates.
        style, tempo: indices of these heads.
    """

    position: float
    size: float
    start: float
    style: int = int(Style.LINEAR_ADD)
    tempo: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A fixed schedule.

    Attributes:
        name: what it grows, in words.
        seeds: its seeds; of two in one slot the later one counts.
        at_once: whether its seeds germinate without waiting for each other.
    """

    name: str
    seeds: tuple[PlannedSeed, ...] = ()
    at_once: bool = False

    @property
    def start(self) -> float:
        """Part of the episode after which it first acts; 1 if it never does."""
        return min((seed.start for seed in self.seeds), default=1.0)

    @property
    def kind(self) -> str:
        """What it grows, whenever it begins: plans of one kind differ in their start alone."""
        seeds = [(s.position, s.size, s.style, s.tempo, s.start - self.start) for s in self.seeds]
        return f"{seeds}{self.at_once}"


NEVER = Plan("never")


def library() -> tuple[Plan, ...]:
    """The systematic plans, the first of which is ``NEVER``."""
    plans = [NEVER]
    for start in STARTS:
        for size in SIZES:
            for name, position in POSITIONS.items():
                seed = PlannedSeed(position, size, start)
                plans.append(Plan(f"size {size:.2f} in the {name} slot from {start:.2f}", (seed,)))
    for start in STARTS[:2]:
        for size in SIZES[:2]:
            seeds = tuple(PlannedSeed(position, size, start) for position in POSITIONS.values())
            name = f"size {size:.2f} in every slot at once from {start:.2f}"
            plans.append(Plan(name, seeds, at_once=True))
    return tuple(plans)


def schedule(plans: tuple[Plan, ...], task: Task, episode_length: int | None = None) -> Schedule:
    """The plans for the host of ``task``, a row each.

    Args:
        plans: the plans.
        task: the task.
        episode_length: steps per episode; those of the task if None.
    """
    length = episode_length or task.episode_length
    slots = task.host.slots
    rows = Schedule.never(len(plans), len(slots))
    for row, plan in enumerate(plans):
        for seed in plan.seeds:
            s = slot_at(seed.position, len(slots))
            rows.start[row, s] = round(seed.start * length)
            rows.blueprint[row, s] = blueprint_of(seed.size, slots[s])
            rows.style[row, s], rows.tempo[row, s] = seed.style, seed.tempo
    return rows


def slot_at(position: float, slots: int) -> int:
    """Index of the slot at ``position``, from 0 for the first to 1 for the last."""
    return round(position * (slots - 1))


class LibraryActor:
    """Follows the plans of ``library`` in turn: each environment another one in every episode.

    Args:
        tasks: returns the task of each environment in the current episode.
        episode_length: steps per episode.
    """

    def __init__(self, tasks: Callable[[], Sequence[Task]], episode_length: int):
        self.tasks, self.episode_length = tasks, episode_length
        self.plans = library()

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self._environments, self._episode = environments, episode

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``. Tasks are known only after ``begin``."""
        if step == 0:
            first, plans = self._episode * len(self._environments), self.plans
            rows = [
                schedule((plans[i % len(plans)],), task, self.episode_length)
                for i, task in enumerate(self.tasks(), first)
            ]
            self._actor = ScheduleActor(Schedule.concatenate(rows))
            self._actor.begin(self._environments, self._episode)
        return self._actor.act(observation, step)
