"""What an actor is built from, and how the rollouts of several become one.

Actors may be on other machines, which have none of the learner's files: they are given settings,
source code of plugins and data, never a path.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline.config import TrainConfig, flatten, unflatten
from esper.runtime import plugins
from esper.runtime.data import Dataset, FromDirectory
from esper.runtime.gate import Permission
from esper.runtime.tasks import Task
from esper.simic.distributed.wire import on_device
from esper.simic.growth.layout import merge
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.features import FeatureNames
from esper.tamiyo.policy.interface import ObservationT


def joined_rollout(
    kind: type[ObservationT], states: Sequence[dict[str, Any]], device: torch.device
) -> Rollout[ObservationT]:
    """One rollout of the environments of all actors.

    Args:
        kind: class of the observations.
        states: what ``Rollout.state`` returned, of each actor in order.
        device: device of the result, except for ``valid``.
    """
    contents = {name: _concatenation(name, [state[name] for state in states]) for name in states[0]}
    tensors = {n: x if n == "valid" else on_device(x, device) for n, x in contents.items()}
    return Rollout.from_state(kind, tensors)


def concatenation(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The parts along ``dim``; hosts with fewer slots are padded to the widest with 0."""
    first = [part.movedim(dim, 0) for part in parts]
    order = torch.arange(sum(len(part) for part in first))
    return merge(first, order).movedim(0, dim).contiguous()


def _concatenation(name: str, parts: Sequence[Any]) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, dict):
        dim = 0 if name.startswith("last_") else 1
        return {n: concatenation([part[n] for part in parts], dim) for n in first}
    if isinstance(first, tuple):
        return tuple(concatenation(states, 1) for states in zip(*parts, strict=True))
    return concatenation(parts, 0 if name.startswith("last_") else 1)


Data = tuple[Dataset | None, ...]
"""Data of a task: its own, those after its drift, and those of its pretraining."""

_OF_THE_LEARNER = (
    *("data_dir", "text_file", "plugin", "initial_policy", "actors", "ray_address"),
    *("compile", "device", "devices", "telemetry_dir", "tensorboard", "wandb", "record"),
    *("record_last", "name"),
)
"""Settings that actors do not have: paths, the learner's device, and what the learner writes."""


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """What an actor needs to know to collect rollouts of its environments.

    Attributes:
        settings: settings of the run, flat.
        begin, end: its environments, of all of the run.
        total: number of all environments.
        synchronous: whether results must be those of one process, to the last bit.
        plugins: name and source code of each plugin.
        features: the features that the policy observes; all of this version if None.
    """

    settings: dict[str, Any]
    begin: int
    end: int
    total: int
    synchronous: bool
    plugins: tuple[tuple[str, str], ...] = ()
    features: FeatureNames | None = None

    def config(self) -> TrainConfig:
        """The settings; its plugins are run."""
        config = unflatten(self.settings)
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for i, (name, source) in enumerate(self.plugins):
                file = Path(folder) / str(i) / name
                file.parent.mkdir()
                file.write_text(source)
                files.append(str(file))
            # What the learner was permitted to run, its actors are.
            permission = Permission(tuple(files), config.gymnasium.gym)
            world = replace(config.world, plugin=permission.files)
            plugins.load_all(replace(config, world=world), permission, "the learner")
        return config


def data_from_files(config: TrainConfig, tasks: Sequence[Task]) -> dict[str, Data]:
    """The data that come from files of this machine, by task."""
    all_of_them = bool(config.world.plugin) or config.world.text_file is not None
    return {
        task.name: _data(task)
        for task in tasks
        if all_of_them or any(isinstance(maker, FromDirectory) for maker in _makers(task))
    }


def with_data(tasks: Sequence[Task], data: dict[str, Data]) -> tuple[Task, ...]:
    """``tasks`` with the data that ``data_from_files`` returned elsewhere."""
    return tuple(_with(task, data[task.name]) if task.name in data else task for task in tasks)


def actor_specs(
    config: TrainConfig,
    cuts: Sequence[int],
    synchronous: bool,
    features: FeatureNames | None = None,
) -> list[ActorSpec]:
    """The specifications of the actors, whose numbers of environments are ``cuts``."""
    settings = flatten(config)
    for name in _OF_THE_LEARNER:
        settings.pop(name, None)
    settings |= {"threads": 1, "telemetry_level": "off"}
    files = [Path(plugins.file_of(path)) for path in config.world.plugin]
    sources = tuple((file.name, file.read_text()) for file in files)
    ends = [sum(cuts[: i + 1]) for i in range(len(cuts))]
    return [
        ActorSpec(settings, end - count, end, ends[-1], synchronous, sources, features)
        for count, end in zip(cuts, ends, strict=True)
    ]


def _makers(task: Task) -> list[Callable[[], Dataset] | None]:
    parts = (task, task.drift, task.pretraining)
    return [None if part is None else part.data for part in parts]


def _data(task: Task) -> Data:
    return tuple(None if maker is None else maker() for maker in _makers(task))


def _with(task: Task, data: Data) -> Task:
    original, later, before = (_ConstantDataset(dataset) for dataset in data)
    return replace(
        task,
        data=original,
        drift=task.drift and replace(task.drift, data=later),
        pretraining=task.pretraining and replace(task.pretraining, data=before),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _ConstantDataset:
    """Makes a data set by returning it."""

    dataset: Dataset | None

    def __call__(self) -> Dataset:
        assert self.dataset is not None, "the task has no such data"
        return self.dataset
