"""Does a task of somebody's own fit, and what will it cost? Found by a short trial of it."""

import time
from dataclasses import dataclass

import torch

from esper.leyline.errors import UsageError
from esper.runtime.data import Dataset
from esper.runtime.tasks import Task
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tolaria.backends.trial import try_host
from esper.tolaria.memory import forget_peak, peak_resident
from esper.tolaria.precision import Precision

CPU = torch.device("cpu")
FEW, MANY = 8, 16
"""Environments of the two trials: one group, with its twin, and two."""
_SETTLED = 14
"""Steps in which a seed comes to act, at the longest; each further slot takes one more."""


@dataclass(frozen=True, slots=True)
class Fitness:
    """What a trial of a task found.

    Attributes:
        data: what it learns from at the start.
        backend: what computed the hosts.
        bytes: memory of an environment with the largest seed in every slot, its share of a twin
            included; None where the system does not tell.
        seconds: of one step of one environment, with the same seeds, on one thread.
    """

    data: Dataset
    backend: str
    bytes: float | None
    seconds: float


def examine(task: Task, backend: str = "auto") -> Fitness:
    """Try every blueprint in every slot, then let the largest grow everywhere for a while.

    Args:
        task: to try.
        backend: of the hosts' arithmetic, one of ``tolaria.backends.choice.NAMES``.

    Raises:
        UsageError: it does not fit; names the task and what is at fault.
    """
    try:
        data = task.datasets()[0]
        if not task.host.slots:
            raise UsageError("slots: the host has none, so nothing can grow")
        try_host(task.host, Precision("cpu"), torch.float32, CPU)
        forget_peak()
        few, _, _ = grown_up(task, FEW, backend)
        many, seconds, name = grown_up(task, MANY, backend)
    except UsageError as error:
        raise UsageError(f"{task.name}: {error}") from error
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{task.name}: a step of it fails ({type(error).__name__}: {reason})"
        ) from error
    slope = None if few is None or many is None else max(0.0, (many - few) / (MANY - FEW))
    return Fitness(data, name, slope, seconds)


def grown_up(task: Task, envs: int, backend: str) -> tuple[int | None, float, str]:
    """Grow the largest seed in every slot until all act.

    One minibatch a step: more of them take longer and not more memory, and how long a minibatch
    takes is found at the end.

    Returns:
        Peak resident memory of this process in bytes, None where the system does not tell; seconds
        of a step of one environment; and the backend.
    """
    config = GrowthConfig(
        seed=1,
        episode_length=max(task.episode_length, _SETTLED + len(task.host.slots) + 1),
        max_batches=1,
        batch_size=task.batch_size,
        one_at_a_time=False,
        backend=backend,
    )
    env = GrowthEnv([task], torch.arange(envs), config, Precision("cpu"), CPU)
    actor = ScheduleActor(Schedule.everything(envs, task.host.slots))
    actor.begin(env.environments, 0)
    observation = env.reset(0)
    for step in range(_SETTLED + len(task.host.slots)):
        begin = time.perf_counter()
        result = env.step(actor.act(observation, step)[0])
        seconds = time.perf_counter() - begin
        observation = result.observation
        if not bool(result.report.scores.loss.isfinite().all()):
            raise UsageError(
                f"learning_rate: the loss is not finite after {step + 1} steps; scale the data or "
                "take a smaller rate"
            )
    peak = peak_resident()
    begin = time.perf_counter()
    for shard in env.shards:
        shard.engine.train(shard.state, 0)
    epoch = time.perf_counter() - begin
    return peak, (seconds + (task.max_batches - 1) * epoch) / envs, env.backend_name
