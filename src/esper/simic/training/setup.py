"""Construction of devices, tasks, environments, learner and control policies from settings.

Also the arithmetic of a device, and the error of one with too little memory.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline.config import TrainConfig, unflatten
from esper.leyline.errors import UsageError
from esper.leyline.laboratory import part
from esper.leyline.memory_need import check_environments
from esper.leyline.notices import notice
from esper.runtime.paths import absolute_path
from esper.runtime.tasks import Task, agree, find_all
from esper.runtime.text import reading
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.layout import GrowthLayout
from esper.simic.growth.step import GrowthConfig
from esper.simic.loss import resolve_mode
from esper.simic.ppo import PPOAgent
from esper.simic.run.checkpoint import Checkpoint, load_latest
from esper.simic.run.run_directory import stored_config
from esper.simic.run.unusable_run import UnusableRun
from esper.tamiyo.baselines import Actor, NeverActor
from esper.tamiyo.heuristic import HeuristicActor
from esper.tamiyo.policy.features import FeatureNames, Observation
from esper.tamiyo.policy_box import learned_path
from esper.tamiyo.random_actor import RandomActor
from esper.tamiyo.try_and_keep import RuleActor
from esper.tolaria.backends.choice import NAMES as BACKENDS
from esper.tolaria.memory import SHARE, stored_bytes
from esper.tolaria.precision import amp_disabled, resolve_precision

_REQUEST = re.compile(r"Tried to allocate ([0-9.]+) (MiB|GiB|KiB|bytes)")
_UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def memory_error(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The out-of-memory error that ``error`` is or was caused by, None if there is none."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error


def what_fits(
    error: torch.OutOfMemoryError, count: int, device: torch.device, setting: str = "envs"
) -> UsageError:
    """The error to report: what was needed, what there is, and about how many fit.

    Nearly all memory is taken in proportion to the environments, or to the episodes of a batch, so
    their number is scaled by the ratio of the memory that there is to that which was needed.

    Args:
        error: the error of torch.
        count: environments of the run, or what ``setting`` counts.
        device: device of the policy.
        setting: the setting that says how many there are.
    """
    match = _REQUEST.search(str(error))
    request = float(match[1]) * _UNITS[match[2]] if match else 0.0
    demand = torch.cuda.max_memory_allocated(device) + request
    available = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    fits = min(count - 1, int(count * SHARE * available / max(demand, 1.0)))
    advice = f"about {fits} fit" if fits > 0 else "not even one fits"
    return UsageError(
        f"{setting}: {count} do not fit into the memory of {device}: "
        f"at least {demand / 2**30:.2f} GiB are needed and {available / 2**30:.2f} GiB available; "
        f"{advice}"
    )


@contextmanager
def arithmetic(device: torch.device, threads: int, tf32: bool = True) -> Iterator[None]:
    """Set the arithmetic of ``device`` within the context, and restore the previous one.

    Args:
        device: a CPU or a CUDA device.
        threads: CPU threads per operation, on a CPU.
        tf32: whether float32 matrix products and convolutions on CUDA may be computed in TF32.
    """
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    if device.type == "cpu":
        torch.set_num_threads(threads)
    else:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.allow_tf32 = convolutions


def resolve_device(name: str, setting: str = "device") -> torch.device:
    """The device called ``name``; ``setting`` is the setting's name for the error message.

    Raises:
        UsageError: this machine has no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"{setting}: {name!r} is not a device; use cpu or cuda:0") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UsageError(f"{setting}: {name!r} is not supported; use cpu or cuda:0")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UsageError(f"{setting}: {name} is not available (this machine has no CUDA); use cpu")
    if (device.index or 0) >= count:
        raise UsageError(
            f"{setting}: {name} is not available; this machine has {count} CUDA devices"
        )
    return device


def resolve_devices(names: Sequence[str]) -> tuple[torch.device, ...]:
    """The devices called ``names``; see ``resolve_device``.

    Raises:
        UsageError: this machine lacks one of them, or they are of different kinds.
    """
    setting = "devices" if len(names) > 1 else "device or devices"
    devices = tuple(resolve_device(name, setting) for name in names)
    if len({device.type for device in devices}) > 1:
        raise UsageError(
            f"devices: {' '.join(names)} are of different kinds, which round differently; "
            "name only CPUs or only CUDA devices"
        )
    return devices


def resolve_tasks(config: TrainConfig) -> tuple[Task, ...]:
    """The tasks of the settings, with their data directory, text file, split and slots.

    Plugins that define some must have been run, see ``plugins.load_all``.

    Raises:
        UsageError: there is no such task or slot.
    """

    def configuration(task: Task) -> Task:
        task = task.in_directory(Path(config.world.data_dir)).with_split(config.world.split_seed)
        if config.world.text_file is not None:
            task = reading(task, config.world.text_file)
        if config.world.host_gradient_norm is not None:
            task = replace(task, max_gradient_norm=config.world.host_gradient_norm)
        task = replace(task, validation_part=config.world.validation_part or task.validation_part)
        return task.with_slots(config.world.slots)

    return tuple(configuration(task) for task in find_all(config.world.task))


def growth_config(config: TrainConfig, tasks: Sequence[Task], device: torch.device) -> GrowthConfig:
    """The settings of growth environments of ``tasks`` whose hosts are on ``device``.

    Raises:
        UsageError: a setting is left to the tasks, and they differ in it.
    """
    world, machine = config.world, config.machine
    episode_length, max_batches, batch_size, max_seeds = agree(
        tasks, world.episode_length, world.max_batches, world.batch_size, world.max_seeds
    )
    threads = machine.threads or torch.get_num_threads()
    return GrowthConfig(
        seed=world.seed,
        group_size=world.group_size,
        common_seeds=world.common_seeds,
        episode_length=episode_length,
        max_batches=max_batches,
        batch_size=batch_size,
        max_seeds=max_seeds,
        **world.rules(),
        backend=machine.backend,
        threads=threads if device.type == "cpu" else 1,
        preload=True if machine.experimental_gpu_preload_gather else machine.gpu_preload,
    )


def build_environment(
    config: TrainConfig,
    devices: Sequence[torch.device],
    tasks: Sequence[Task] | None = None,
    identities: Tensor | None = None,
) -> GrowthEnv:
    """The environments that ``config`` describes, with their hosts distributed over ``devices``.

    If mixed precision was requested but is not available, a line on stderr gives the reason.

    Args:
        config, devices: the settings, and the devices of the hosts.
        tasks: the tasks, those of the settings if None.
        identities: the environments, int64 ``[N]``; all of the settings if None.

    Raises:
        UsageError: there is no such task or slot, or the environments do not fit into memory.
    """
    tasks = resolve_tasks(config) if tasks is None else tasks
    identities = torch.arange(config.world.envs) if identities is None else identities
    machine, device = config.machine, devices[0]
    precision = resolve_precision(machine.use_amp, device, machine.amp_dtype, machine.backend)
    growth = growth_config(config, tasks, device)
    if device.type == "cpu":
        hosts = sum(stored_bytes(task.host) for task in tasks) / len(tasks)
        check_environments(config, hosts, growth.episode_length, len(identities))
    try:
        environment = GrowthEnv(tasks, identities, growth, precision, *devices, digest_data=True)
        environment.reset(0)
    except RuntimeError as error:
        full = memory_error(error)
        if full is None or device.type != "cuda":
            raise
        raise what_fits(full, len(identities), device) from error
    if environment.precision.reason:
        reason = environment.precision.reason
        notice(f"warning: use_amp: {reason}; running in float32")
    return environment


def compile_mode(name: str, device: torch.device) -> str:
    """The mode of compilation; on a CPU any but ``off`` is advised against on stderr."""
    mode = resolve_mode(name, device)
    if mode != "off" and device.type == "cpu":
        notice(
            f"warning: compile: on a CPU {mode} delays the first update by minutes; "
            "leave --compile out"
        )
    return mode


def initial_run(name: str) -> str:
    """Run directory of the initial policy: one in the box by its name, else the path of a run."""
    box_path = learned_path(name)
    if box_path is not None:
        return os.path.realpath(box_path)
    try:
        return absolute_path(name)
    except ValueError:  # a null byte: no path, which initial_checkpoint refuses
        return name


def initial_checkpoint(config: TrainConfig) -> Checkpoint | None:
    """The checkpoint of the policy that learning starts from; None for random weights.

    Raises:
        UsageError: the run has no usable checkpoint, or its network is another.
    """
    if config.learner.initial_policy is None:
        return None
    run = Path(initial_run(config.learner.initial_policy))
    try:
        is_run = (run / "config.json").is_file()
    except (OSError, ValueError):
        is_run = False
    if not is_run:
        raise UsageError(
            f"initial_policy: {config.learner.initial_policy} is not a run directory; esper runs "
            "lists your runs, and esper policies the policies that come with Esper"
        )
    try:
        settings, _ = stored_config(run)
        if settings.gymnasium.gym is not None:
            raise UsageError(
                f"initial_policy: {run} was trained on {settings.gymnasium.gym}; give a growth run"
            )
        width, expectation = settings.learner.lstm_hidden, config.learner.lstm_hidden
        if width != expectation:
            raise UsageError(
                f"initial_policy: the LSTM of {run} has width {width}, not {expectation}; give "
                f"--lstm-hidden {width}"
            )
        return load_latest(run)
    except UnusableRun as error:
        raise UsageError(f"initial_policy: {error.reason}") from error


def build_agent(
    config: TrainConfig,
    device: torch.device,
    initial: Checkpoint | None = None,
    features: FeatureNames | None = None,
) -> PPOAgent[Observation]:
    """The learner that ``config`` describes.

    Args:
        config: the settings.
        device: device of the policy.
        initial: the checkpoint whose weights and moments are taken; None for random weights.
        features: the features that the policy observes, unless those of ``initial``.

    Raises:
        UsageError: the checkpoint is that of another network.
    """
    return growth_agent(
        config.learner,
        config.world.seed,
        device,
        policy_dtype(config, device),
        compile_mode(config.machine.compile, device),
        config.algorithm.learner_arguments(config.learner),
        None if initial is None else initial.parts,
        config.baseline_group,
        initial.features if initial else features,
    )


def policy_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The dtype of the policy's trunk, None for full precision.

    ``auto`` is bfloat16 where the device has it, else float16, as for hosts.

    Raises:
        UsageError: see ``half_precision``.
    """
    if not config.learner.amp_policy:
        return None
    return half_precision(config.machine.amp_dtype, device, "amp_policy")


def half_precision(name: str, device: torch.device, setting: str) -> torch.dtype | None:
    """The dtype of a policy in mixed precision, None if the environment switches that off.

    Args:
        name: ``bfloat16``, ``float16``, or ``auto``: bfloat16 if the device has it.
        device: device of the policy.
        setting: the setting that asked for it, for the error message.

    Raises:
        UsageError: the device does not have this dtype.
    """
    if amp_disabled():
        return None
    precision = resolve_precision(True, device, name, "torch")
    if precision.reason is not None:
        raise UsageError(f"{setting}: {precision.reason}")
    if precision.scales_losses and device.type != "cuda":
        raise UsageError(f"{setting}: float16 needs a CUDA device; take --amp-dtype bfloat16")
    return precision.amp_dtype


def plugin_paths(config: TrainConfig) -> list[str]:
    """Absolute paths of the plug-ins, so that the run can be resumed from any directory."""
    return [absolute_path(path) for path in config.world.plugin]


def complete_config(config: TrainConfig, environment: GrowthLayout, backend: str) -> TrainConfig:
    """The settings, completed with the values that depend on the task or the machine.

    ``backend`` is that of the hosts, see ``GrowthEnv.backend_name``.
    """
    growth = environment.config
    slots = [tuple(slot.name for slot in task.host.slots) for task in environment.tasks]
    slots_differ = len(set(slots)) > 1
    settings = {
        "task": [task.name for task in environment.tasks],
        "plugin": plugin_paths(config),
        "text_file": config.world.text_file and absolute_path(config.world.text_file),
        "initial_policy": config.learner.initial_policy
        and initial_run(config.learner.initial_policy),
        "slots": config.world.slots if slots_differ else slots[0],
        "max_seeds": growth.max_seeds or (None if slots_differ else len(slots[0])),
        "episode_length": growth.episode_length,
        "max_batches": growth.max_batches,
        "batch_size": growth.batch_size,
        "threads": config.machine.threads or torch.get_num_threads(),
        **config.algorithm.resolved(),
    }
    if config.machine.backend == "auto" and backend in BACKENDS:
        settings["backend"] = backend
    return unflatten(settings, config)


def control(policy: str, environment: GrowthEnv) -> Actor:
    """The actor of a policy that does not learn.

    Args:
        policy: ``heuristic``, ``rule``, ``random``, ``schedule`` or ``never``.
        environment: where it acts.
    """
    if policy == "heuristic":
        return HeuristicActor(environment.config.episode_length)
    if policy == "rule":
        config = environment.config
        return RuleActor(lambda: environment.current_slots, config.episode_length, config.max_seeds)
    if policy == "random":
        return RandomActor(environment.config.seed)
    if policy == "schedule":
        library_actor = part("library_actor", "policy: schedule")
        return library_actor(lambda: environment.current_tasks, environment.config.episode_length)
    assert policy == "never", policy
    return NeverActor()
