"""From settings to the things they describe: device, task, environments, controls."""

from dataclasses import replace

import torch

from esper.kasmina.hosts.host import resolve_slots
from esper.leyline.config import TrainConfig, unflatten
from esper.leyline.errors import UsageError
from esper.runtime.tasks import Task, find
from esper.simic.environment import GrowthConfig, GrowthEnv
from esper.simic.rollout import Actor
from esper.tamiyo.baselines import NeverActor, RandomActor
from esper.tamiyo.heuristic import HeuristicActor
from esper.tolaria.precision import Precision


def resolve_device(name: str) -> torch.device:
    """The device called ``name``.

    Raises:
        UsageError: there is none here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device: {name!r} is no device; use cpu or cuda:0") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UsageError(f"device: {name!r} is not supported; use cpu or cuda:0")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UsageError(f"device: {name} is not available, this machine has no CUDA; use cpu")
    if (device.index or 0) >= count:
        raise UsageError(f"device: {name} is not available; this machine has {count} CUDA devices")
    return device


def resolve_task(config: TrainConfig) -> Task:
    """The task with the slots that were asked for.

    Raises:
        UsageError: there is no such task or slot.
    """
    task = find(config.world.task)
    slots = resolve_slots(task.host, config.world.slots)
    return replace(task, host=replace(task.host, slot_names=slots))


def build_environment(config: TrainConfig, precision: Precision, device: torch.device) -> GrowthEnv:
    """The environments that ``config`` describes.

    Raises:
        UsageError: there is no such task or slot, or they do not fit into memory.
    """
    task, world = resolve_task(config), config.world
    growth = GrowthConfig(
        seed=world.seed,
        group_size=world.group_size,
        episode_length=world.episode_length or task.episode_length,
        max_batches=world.max_batches or task.max_batches,
        batch_size=world.batch_size or task.batch_size,
        max_seeds=world.max_seeds or len(task.host.slots),
        reward=world.reward,
    )
    try:
        return GrowthEnv(task, torch.arange(world.envs), growth, precision, device)
    except (RuntimeError, MemoryError) as error:
        raise UsageError(
            f"envs: {world.envs} do not fit into memory ({str(error).splitlines()[0]}); take fewer"
        ) from error


def resolved(config: TrainConfig, environment: GrowthEnv) -> TrainConfig:
    """The settings with everything filled in that was left to the task or the machine."""
    growth = environment.config
    settings = {
        "slots": [slot.name for slot in environment.slots],
        "max_seeds": growth.max_seeds,
        "episode_length": growth.episode_length,
        "max_batches": growth.max_batches,
        "batch_size": growth.batch_size,
        "threads": torch.get_num_threads(),
    }
    return unflatten(settings, config)


def control(policy: str, environment: GrowthEnv) -> Actor:
    """A policy that does not learn: ``heuristic``, ``random`` or ``never``."""
    if policy == "heuristic":
        return HeuristicActor(environment.config.episode_length)
    if policy == "random":
        return RandomActor(environment.config.seed)
    assert policy == "never", policy
    return NeverActor()
