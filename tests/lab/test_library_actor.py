"""The policy that follows the library of plans plays the plans themselves."""

import torch

from esper.runtime.tasks import find
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.fixed_schedule import NEVER, Schedule, ScheduleActor
from esper.tolaria.precision import Precision
from esper_lab.plans import LibraryActor, library, schedule
from synthetic import CPU

LENGTH = 12
COUNT = 6


def environment() -> GrowthEnv:
    tasks = [find("digits_shift"), find("digits_deep")]
    config = GrowthConfig(
        seed=3, group_size=1, episode_length=LENGTH, max_batches=1, batch_size=8, threads=1
    )
    return GrowthEnv(tasks, torch.arange(COUNT), config, Precision("cpu"), CPU)


def test_each_environment_follows_its_plan_for_the_task_it_drew() -> None:
    env = environment()
    actor = LibraryActor(lambda: env.current_tasks, LENGTH)
    plans = library()
    seen = []
    for episode in range(6):
        found = collect(env, actor, episode).actions
        tasks = env.current_tasks
        assert {task.name for task in tasks} == {"digits_shift", "digits_deep"}
        numbers = [(episode * COUNT + i) % len(plans) for i in range(COUNT)]
        rows = [schedule((plans[n],), task, LENGTH) for n, task in zip(numbers, tasks, strict=True)]
        alone = collect(env, ScheduleActor(Schedule.concatenate(rows)), episode).actions
        assert torch.equal(found, alone), [plans[number].name for number in numbers]
        seen += numbers
    assert set(seen) == set(range(len(plans))), "all plans are played"


def test_starts_are_parts_of_the_episode_that_is_played() -> None:
    task = find("digits_shift")
    later = tuple(plan for plan in library() if plan.start == 0.3)
    for length, expected in ((10, 3), (100, 30)):
        starts = schedule(later, task, length).start
        assert set(starts[starts < NEVER].tolist()) == {expected}
    assert torch.equal(
        schedule(later, task).start, schedule(later, task, task.episode_length).start
    )
