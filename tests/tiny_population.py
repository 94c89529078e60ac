"""A tiny population: trained and frozen hosts, half of which meet permuted labels."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime.data import digits
from esper.runtime.tasks import Pretraining, Task
from esper.simic.growth.environment import GrowthEnv
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tamiyo.fixed_schedule import NEVER, Schedule, ScheduleActor
from esper.tamiyo.policy.features import HOST_FEATURES, Observation
from esper_lab.data import Shift, shifted_digits
from esper_lab.evaluation import Evaluation, Rung
from esper_lab.plans import Plan, PlannedSeed, schedule
from esper_lab.play import Population, tasks_of_groups
from small_runs import SMALL

CLEAN = Pretraining(digits, steps=60, learning_rate=5e-2, hosts=2)
LARGE = Plan("large in the last slot", (PlannedSeed(1.0, 1.0, 0.0),))


def tiny(number: int) -> Task:
    """Odd numbers have permuted labels, so that growing pays; on the others it costs its price."""
    shift = Shift("permuted", 1.0, 3) if number % 2 else None
    return Task(
        name=f"tiny:{number}", summary="tiny", host=CnnHost((6, 8), classes=10, image=(8, 8, 1)),
        data=partial(shifted_digits, () if shift is None else (shift,), 200, 0), episode_length=12,
        max_batches=4, batch_size=32, learning_rate=3e-2, host_learning_rate=0.0, pretraining=CLEAN,
        price=0.1, family="tiny", validation_part=60,
    )  # fmt: skip


TASKS = tiny(0), tiny(1)


def hosts(count: int, **settings: int) -> Population:
    """``count`` hosts, with and without permuted labels in turn."""
    return Population(tuple(TASKS[i % 2] for i in range(count)), **settings)


class Looking(ScheduleActor):
    """Grows a large seed where the accuracy at step 1 is low."""

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        if step == 1:
            accuracy = observation.host[:, HOST_FEATURES.index("expected_accuracy")]
            self._plan.start[accuracy > 0.4] = NEVER
        return super().act(observation, step)


def planned(env: GrowthEnv) -> Schedule:
    """A large seed in every host."""
    rows = [schedule((LARGE,), task) for task in tasks_of_groups(env)]
    one = Schedule(*(torch.cat([getattr(r, n) for r in rows]) for n in Schedule.__slots__))
    return one.take(torch.arange(env.count) // env.config.group_size)


def looking(env: GrowthEnv) -> Looking:
    """See ``Looking``."""
    made = planned(env)
    made.start[made.start < NEVER] = 1
    return Looking(made)


def growing(env: GrowthEnv) -> ScheduleActor:
    """Grows a large seed in every host, without a look."""
    return ScheduleActor(planned(env))


def trained_run(folder: Path, **settings: Any) -> Path:
    """A policy of very short training in a run below ``folder``."""
    place = {"telemetry_dir": str(folder), "telemetry_level": "normal"}
    return train_ppo_vectorized(**SMALL | place | settings).path


def evaluation_of(rungs: list[Rung], **more: Any) -> Evaluation:
    """An evaluation with these rungs on hosts of one family and no plan but one."""
    hosts = len(rungs[0].utility)
    tasks, splits = ["tiny"] * hosts, [None] * hosts
    return Evaluation("runs/mine", "tiny", 128, tasks, ["never"], rungs, splits, **more)
