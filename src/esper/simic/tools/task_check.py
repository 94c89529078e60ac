"""Checks a user's task by a short trial: whether it runs, and how much memory and time it takes."""

import time
from dataclasses import dataclass

import torch

from esper.kasmina.transfer import CPU
from esper.leyline.errors import UsageError, first_line
from esper.runtime.data import Dataset
from esper.runtime.tasks import Task
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tolaria.backends.choice import try_host
from esper.tolaria.memory import forget_peak, peak_resident
from esper.tolaria.precision import Precision

SMALL_COUNT, LARGE_COUNT = 8, 16
"""Environments of the two trials: one group and two groups, each with its twin."""
_SETTLING_STEPS = 14
"""Upper bound of the steps until the first seed acts; each further slot takes one more step."""


@dataclass(frozen=True, slots=True)
class TaskTrial:
    """Result of a trial of a task.

    Attributes:
        data: the task's data at the start of an episode.
        backend: backend of the hosts.
        bytes: memory per environment with the largest seed in every slot, including its share of a
            twin; None if the system does not report it.
        seconds: duration of a step per environment with the same seeds, on one thread.
    """

    data: Dataset
    backend: str
    bytes: float | None
    seconds: float


def try_task(task: Task, backend: str = "auto") -> TaskTrial:
    """Try every blueprint in every slot, then grow the largest one in all slots.

    Args:
        task: the task to try.
        backend: backend of the hosts' arithmetic, one of ``tolaria.backends.choice.NAMES``.

    Raises:
        UsageError: the task does not run; the message names the task and the cause.
    """
    try:
        data = task.datasets()[0]
        if not task.host.slots:
            raise UsageError("slots: the host has none, so nothing can grow")
        try_host(task.host, Precision("cpu"), torch.float32, CPU)
        forget_peak()
        few_bytes, _, _ = measure_grown(task, SMALL_COUNT, backend)
        many_bytes, seconds, name = measure_grown(task, LARGE_COUNT, backend)
    except UsageError as error:
        raise UsageError(f"{task.name}: {error}") from error
    except Exception as error:
        reason = first_line(error)
        raise UsageError(f"{task.name}: a step fails ({type(error).__name__}: {reason})") from error
    if few_bytes is None or many_bytes is None:
        return TaskTrial(data, name, None, seconds)
    per_environment = max(0.0, (many_bytes - few_bytes) / (LARGE_COUNT - SMALL_COUNT))
    return TaskTrial(data, name, per_environment, seconds)


def measure_grown(task: Task, envs: int, backend: str) -> tuple[int | None, float, str]:
    """Grow the largest seed in every slot until all act.

    Steps have one minibatch, because further minibatches take more time but not more memory. At the
    end the time of a minibatch is measured and added for every further minibatch of the task.

    Returns:
        peak resident memory of this process in bytes, None if the system does not report it;
        seconds per step and environment; and the name of the backend.
    """
    config = GrowthConfig(
        seed=1,
        episode_length=max(task.episode_length, _SETTLING_STEPS + len(task.host.slots) + 1),
        max_batches=1,
        batch_size=task.batch_size,
        one_at_a_time=False,
        backend=backend,
    )
    env = GrowthEnv([task], torch.arange(envs), config, Precision("cpu"), CPU)
    actor = ScheduleActor(Schedule.everything(envs, task.host.slots))
    actor.begin(env.environments, 0)
    observation = env.reset(0)
    for step in range(_SETTLING_STEPS + len(task.host.slots)):
        begin = time.perf_counter()
        result = env.step(actor.act(observation, step)[0])
        seconds = time.perf_counter() - begin
        observation = result.observation
        if not bool(result.report.scores.loss.isfinite().all()):
            raise UsageError(
                f"learning_rate: the loss is not finite after {step + 1} steps; scale the data or "
                "use a smaller rate"
            )
    peak = peak_resident()
    begin = time.perf_counter()
    for shard in env.shards:
        shard.engine.train(shard.state, 0)
    epoch = time.perf_counter() - begin
    return peak, (seconds + (task.max_batches - 1) * epoch) / envs, env.backend_name
