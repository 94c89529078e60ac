"""What an actor is built from, how it acts, and how the rollouts of several become one.

Actors may be on other machines, which have none of the learner's files: they are given settings,
source code of plugins and data, never a path.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from esper.kasmina.transfer import CPU
from esper.leyline.config import TrainConfig, flatten, unflatten
from esper.runtime import plugins
from esper.runtime.data import Dataset, FromDirectory
from esper.runtime.gate import Permission
from esper.runtime.tasks import Task
from esper.simic.actor import PolicyActor
from esper.simic.distributed.wire import on_device
from esper.simic.growth.layout import merge
from esper.simic.normalise import ObservationMoments
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.features import FeatureNames
from esper.tamiyo.policy.interface import ObservationT, Policy, RecurrentState

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

    def actor(
        self, policy: Policy[ObservationT], moments: ObservationMoments[ObservationT], seed: int
    ) -> "PlacedActor[ObservationT]":
        """The actor of these environments; see ``PolicyActor``."""
        count = self.end - self.begin
        rows = (self.begin, self.end, self.total) if self.synchronous else (0, count, count)
        return PlacedActor(policy, moments, seed, CPU, *rows)

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


class PlacedActor(PolicyActor[ObservationT], Generic[ObservationT]):
    """Acts for the environments ``begin`` to ``end`` of ``total`` with the bits of one process.

    The last bits of a matrix product depend on its number of rows and on the place of a row among
    them. The policy therefore computes ``total`` rows, of which those of other environments are
    copies that nothing reads.

    Args:
        policy, moments, seed, device: see ``PolicyActor``.
        begin, end, total: the rows.
    """

    def __init__(
        self,
        policy: Policy[ObservationT],
        moments: ObservationMoments[ObservationT],
        seed: int,
        device: torch.device,
        begin: int,
        end: int,
        total: int,
    ):
        super().__init__(policy, moments, seed, device)
        self._begin, self._count, self._is_alone = begin, end - begin, end - begin == total
        self._source = torch.zeros(total, dtype=torch.int64, device=device)
        self._source[begin:end] = torch.arange(end - begin, device=device)

    def spread(self, x: Tensor, dim: int = 0) -> Tensor:
        """``x`` with its rows, along ``dim``, at their places among ``total``."""
        return x if self._is_alone else x.index_select(dim, self._source)

    def part(self, x: Tensor, dim: int = 0) -> Tensor:
        """The inverse of ``spread``."""
        return x.narrow(dim, self._begin, self._count)

    def _act(
        self, observation: ObservationT, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        wide = {name: self.spread(x) for name, x in observation.tensors().items()}
        actions, log_prob, value, after = super()._act(
            type(observation).from_tensors(wide),
            tuple(self.spread(state, 1) for state in hidden),
            None if noise is None else self.spread(noise),
        )
        outputs = (self.part(x) for x in (actions, log_prob, value))
        return (*outputs, tuple(self.part(state, 1).contiguous() for state in after))  # type: ignore[return-value]


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
    """The parts of a rollout that are called ``name``, of all actors."""
    dim = 0 if name.startswith("last_") else 1
    if parts[0] is None:
        return None
    if isinstance(parts[0], dict):
        return {n: concatenation([part[n] for part in parts], dim) for n in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(concatenation(states, dim) for states in zip(*parts, strict=True))
    return concatenation(parts, dim)


def data_from_files(config: TrainConfig, tasks: Sequence[Task]) -> dict[str, Data]:
    """The data that come from files of this machine, by task."""
    from_anywhere = bool(config.world.plugin) or config.world.text_file is not None
    data = {}
    for task in tasks:
        parts = (task, task.drift, task.pretraining)
        makers = [None if part is None else part.data for part in parts]
        if from_anywhere or any(isinstance(maker, FromDirectory) for maker in makers):
            data[task.name] = tuple(None if maker is None else maker() for maker in makers)
    return data


def with_data(tasks: Sequence[Task], data: dict[str, Data]) -> tuple[Task, ...]:
    """``tasks`` with the data that ``data_from_files`` returned elsewhere."""
    return tuple(_with(task, data[task.name]) if task.name in data else task for task in tasks)


def _with(task: Task, data: Data) -> Task:
    original, later, before = (partial(_constant, dataset) for dataset in data)
    return replace(
        task,
        data=original,
        drift=task.drift and replace(task.drift, data=later),
        pretraining=task.pretraining and replace(task.pretraining, data=before),
    )


def _constant(dataset: Dataset | None) -> Dataset:
    assert dataset is not None, "the task has no such data"
    return dataset
