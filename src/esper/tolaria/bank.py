"""Data sets of all tasks that share one host shape, so that rows of a stack may differ in task."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.hosts.host import Host, NormedHost
from esper.kasmina.rng import Purpose, to_integers, uniform
from esper.leyline.errors import UsageError
from esper.runtime.data import Augmentation, Dataset, map_elements, stored_elements
from esper.runtime.tasks import TUNINGS, Task
from esper.tolaria.backends import HeldBack

Orders = tuple[Tensor, Tensor]
"""Indices that gather the parameters ``[P]`` and the buffers ``[Q]`` of a shifted host, int64."""


@dataclass(frozen=True, slots=True)
class ChannelMove:
    """A change of the places of channels in some of N hosts.

    Attributes:
        rows: the hosts, int64 ``[R]``.
        parameters, buffers: indices that gather their parameters ``[R, P]`` and their buffers
            ``[R, Q]``, int64.
    """

    rows: Tensor
    parameters: Tensor
    buffers: Tensor

    def of_parameters(self, *stores: Tensor) -> None:
        """Move the channels in stores with the parameters of all hosts, ``[N, P]``."""
        for store in stores:
            store[self.rows] = store[self.rows].gather(1, self.parameters)

    def of_buffers(self, *stores: Tensor) -> None:
        """Move the channels in stores with the buffers of all hosts, ``[N, Q]``."""
        for store in stores:
            store[self.rows] = store[self.rows].gather(1, self.buffers)


def channel_moves(
    shifts: Mapping[int, Orders], task: Tensor, switch_step: Tensor, length: int
) -> dict[int, ChannelMove]:
    """The moves of an episode, by step.

    Args:
        shifts: places of the channels after the shift of a task, by its index.
        task: index of each host's task, int64 ``[N]``.
        switch_step: step of each host's drift, int64 ``[N]``.
        length: steps of the episode; a later drift does not come.
    """
    if not shifts:
        return {}
    rows_at: dict[int, list[int]] = {}
    tasks, steps = task.tolist(), switch_step.tolist()
    for row, step in enumerate(steps):
        if tasks[row] in shifts and step < length:
            rows_at.setdefault(step, []).append(row)
    moves = {}
    for step, rows in rows_at.items():
        parameters, buffers = zip(*(shifts[tasks[row]] for row in rows), strict=True)
        hosts = torch.tensor(rows, device=task.device)
        moves[step] = ChannelMove(hosts, torch.stack(parameters), torch.stack(buffers))
    return moves


@dataclass(frozen=True, slots=True)
class StackKey:
    """What rows must have in common to share a stack: shapes and common hyperparameters."""

    host: Host
    validation: int
    test: int
    weight_decay: float
    momentum: float | None
    max_gradient_norm: float
    validation_part: int | None
    augmentation: Augmentation | None

    @classmethod
    def of(cls, task: Task, data: Sequence[Dataset]) -> "StackKey":
        """The key of ``task``; ``data`` is ``task.datasets()``.

        Raises:
            UsageError: the data before and after a drift have validation or test sets of
                different sizes.
        """
        sizes = {(len(part.validation_labels), len(part.test_labels)) for part in data}
        if len(sizes) > 1:
            raise UsageError(
                f"drift: the task {task.name!r} has validation and test sets of sizes "
                f"{sorted(sizes)}; make them the same before and after it"
            )
        return cls(
            task.host,
            *sizes.pop(),
            task.weight_decay,
            task.momentum,
            task.max_gradient_norm,
            task.validation_part,
            task.augmentation,
        )


@dataclass(frozen=True, slots=True)
class TrainedHosts:
    """Weights of K hosts of one shape that were trained before the episode.

    Attributes:
        parameters: ``[K, P]``.
        buffers: running statistics, ``[K, Q]``.
    """

    parameters: Tensor
    buffers: Tensor


SMALL = 64 << 20
"""If ``preload`` is None, training images of at most this many bytes are kept on the device."""


class DataBank:
    """Data sets of one or more tasks with the same ``StackKey``.

    Args:
        tasks: at least one, all with the same key, each with its ``datasets()``.
        dtype: dtype of the images.
        device: device that holds the data.
        preload: whether the device also holds the training images; otherwise they stay in CPU
            memory, page-locked for a CUDA device. None preloads up to ``SMALL`` bytes.

    Attributes:
        tasks: as given; rows refer to a task by its index here.
        trained_hosts: hosts that the episodes of a task start from, by index of the task; tasks
            that start from initial weights have none.
        tunings: index of each task's tuning in ``TUNINGS``, int64 ``[tasks]``; None if all are 0.
        channel_shifts: indices that gather the parameters and the buffers of a host after the shift
            of its channels, by index of the task; see ``NormedHost.channels_moved``.
        streamed: whether training images stay in CPU memory.
        train_images: images of all data sets, concatenated, ``[samples, H, W, C]``.
        validation_images, validation_labels: ``[D, V, H, W, C]`` and
            ``[D, V, *label_shape]``; likewise for ``test``.
    """

    def __init__(
        self,
        tasks: Sequence[tuple[Task, Sequence[Dataset]]],
        dtype: torch.dtype,
        device: torch.device,
        preload: bool | None = True,
    ):
        self.tasks = tuple(task for task, _ in tasks)
        self.device = device
        self.trained_hosts: dict[int, TrainedHosts] = {}
        sets: list[Dataset] = []

        def index(data: Dataset) -> int:
            index_of_set = next((i for i, each in enumerate(sets) if each is data), len(sets))
            sets.extend([data] if index_of_set == len(sets) else [])
            return index_of_set

        def tensor_of(values: Sequence[Any], kind: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=kind, device=device)

        before = [index(data[0]) for _, data in tasks]
        after = [index(data[-1]) for _, data in tasks]
        drifts = [
            (t.drift.earliest, t.drift.latest, t.drift.never) if t.drift else (0.0, 0.0, 1.0)
            for t in self.tasks
        ]
        sizes = [len(data.train_labels) for data in sets]
        self.before, self.after = tensor_of(before, torch.long), tensor_of(after, torch.long)
        self.drifts = tensor_of(drifts, torch.float32)
        self.sizes = tensor_of(sizes, torch.long)
        self.offsets = self.sizes.cumsum(0) - self.sizes
        self.seed_rates = tensor_of([task.learning_rate for task in self.tasks], dtype)
        self.host_rates = tensor_of([_host_rate(task) for task in self.tasks], dtype)
        tunings = [TUNINGS.index(task.tuning) for task in self.tasks]
        self.tunings = tensor_of(tunings, torch.long) if any(tunings) else None
        self.prices = tensor_of([task.price for task in self.tasks], dtype)
        self.deadlines = tensor_of([task.deadline for task in self.tasks], torch.float64)
        self.cosine = tensor_of([task.decay == "cosine" for task in self.tasks], torch.bool)
        self.channel_shifts = {
            index: (parameters.to(device), buffers.to(device))
            for index, task in enumerate(self.tasks)
            for parameters, buffers in _places_after_shift(task)
        }
        size = sum(map(stored_elements, (data.train_images for data in sets))) * dtype.itemsize
        self.streamed = not (size <= SMALL if preload is None else preload)
        storage = torch.device("cpu") if self.streamed else device

        def stored_copy(images: Tensor) -> Tensor:
            return images.to(storage, dtype)

        self.train_images = _concatenate([map_elements(d.train_images, stored_copy) for d in sets])
        if self.streamed and device.type == "cuda":
            self.train_images = map_elements(self.train_images, Tensor.pin_memory)
        labels = [map_elements(d.train_labels, lambda x: x.to(device)) for d in sets]
        self.train_labels = _concatenate(labels)
        for split in ("validation", "test"):
            images = [getattr(data, f"{split}_images").to(device, dtype) for data in sets]
            labels = [getattr(data, f"{split}_labels").to(device) for data in sets]
            setattr(self, f"{split}_images", torch.stack(images))
            setattr(self, f"{split}_labels", torch.stack(labels))
        # Kept, because backends keep what they make of a set.
        self.parts = self._validation_parts(self.tasks[0].validation_part)

    def _validation_parts(self, size: int | None) -> list[tuple[Tensor, Tensor]]:
        """Images and labels of parts of ``size`` images, drawn without replacement."""
        images, labels = (getattr(self, f"validation_{part}") for part in ("images", "labels"))
        count = images.shape[1]
        if size is None or size >= count:
            return [(images, labels)]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(self.device)
        indices = order[: count // size * size].view(-1, size)
        return [(images[:, part], labels[:, part]) for part in indices]

    def rate_factors(self, step: int, length: int) -> Tensor:
        """Factor of each task's learning rates at a step, ``[tasks]``; see ``DECAYS``.

        It is 0 from the deadline on.
        """
        time = step / length / self.deadlines
        cosine = (1.0 + (math.pi * time.clamp(max=1.0)).cos()) / 2.0
        over = (time >= 1.0) & (self.deadlines < 1.0)
        factors = torch.where(self.cosine, cosine, 1.0).masked_fill(over, 0.0)
        return factors.to(self.seed_rates.dtype)

    @property
    def augmentation(self) -> Augmentation | None:
        """Augmentation of the training images, the same for all tasks."""
        return self.tasks[0].augmentation

    def switch_steps(
        self, seed: int, groups: Tensor, task: Tensor, episode: int, length: int
    ) -> Tensor:
        """The step at which each group switches to the data after its task's drift, int64 ``[G]``.

        Groups whose data never change get ``length``, the number of steps per episode.
        """
        draws = uniform(seed, groups, Purpose.DRIFT, episode, 0, 2)
        earliest, latest, never = self.drifts[task].unbind(1)
        step = ((earliest + (latest - earliest) * draws[:, 1]) * length).long()
        return torch.where(draws[:, 0] < never, length, step)

    def poses(self, bits: Tensor) -> Tensor | None:
        """Poses selected by random words, None without augmentation; words and poses are int64."""
        return None if self.augmentation is None else to_integers(bits, self.augmentation.poses)

    def samples(self, bits: Tensor, dataset: Tensor) -> Tensor:
        """Indices into ``train_images``, selected from each group's data set by random words.

        Samples with replacement; words and indices are int64 ``[G, count]``.
        """
        indices = to_integers(bits, self.sizes[dataset][:, None])
        return indices + self.offsets[dataset][:, None]

    def held_back(self, split: str, dataset: Tensor) -> HeldBack:
        """Images and labels of ``split``; ``dataset``, int64 ``[R]``, is each row's data set."""
        return HeldBack(getattr(self, f"{split}_images"), getattr(self, f"{split}_labels"), dataset)

    def validation_part(self, step: int, dataset: Tensor) -> HeldBack:
        """The part of the validation split that is the turn of ``step``; see ``Task``."""
        images, labels = self.parts[step % len(self.parts)]
        return HeldBack(images, labels, dataset)


def _host_rate(task: Task) -> float:
    return task.learning_rate if task.host_learning_rate is None else task.host_learning_rate


def _places_after_shift(task: Task) -> list[Orders]:
    """Where the host's channels are after the shift of the task; empty if it has none."""
    shift = task.drift and task.drift.channels
    if not shift or not isinstance(task.host, NormedHost):
        return []
    width = task.host.weights[shift.block].shape[0]
    return [task.host.channels_moved(shift.block, shift.order(width))]


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate the parts.

    A single part is not copied: it may be large, or consist of overlapping windows.
    """
    return parts[0] if len(parts) == 1 else torch.cat(parts)
