"""The data of tasks whose hosts have one shape, side by side, so that rows may differ in task."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.rng import Purpose, to_integers, uniform
from esper.leyline.errors import UsageError
from esper.runtime.data import Dataset
from esper.runtime.tasks import Task
from esper.tolaria.backends import HeldBack


@dataclass(frozen=True, slots=True)
class StackKey:
    """What rows must have in common to share a stack: shapes, and what is one number for all."""

    host: object
    validation: int
    test: int
    weight_decay: float
    momentum: float | None

    @classmethod
    def of(cls, task: Task, data: Sequence[Dataset]) -> "StackKey":
        """The key of ``task`` with ``task.datasets()``.

        Raises:
            UsageError: the data before and after a drift have validation or test sets of
                different sizes.
        """
        sizes = {(len(part.validation_labels), len(part.test_labels)) for part in data}
        if len(sizes) > 1:
            raise UsageError(
                f"drift: the task {task.name!r} has validation and test sets of sizes "
                f"{sorted(sizes)}; make them the same before and after"
            )
        return cls(task.host, *sizes.pop(), task.weight_decay, task.momentum)


class DataBank:
    """Data sets of one or more tasks of one ``StackKey``.

    Args:
        tasks: at least one, all of one key, each with its ``datasets()``.
        dtype: of images.
        device: where the data live.

    Attributes:
        tasks: as given; rows name their task by its index here.
        train_images: of all data sets one after another, ``[samples, H, W, C]``.
        validation_images, validation_labels: ``[D, V, H, W, C]`` and ``[D, V]``; so for ``test``.
    """

    def __init__(
        self,
        tasks: Sequence[tuple[Task, Sequence[Dataset]]],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.tasks = tuple(task for task, _ in tasks)
        found: list[Dataset] = []

        def index(data: Dataset) -> int:
            place = next((i for i, known in enumerate(found) if known is data), len(found))
            found.extend([data] if place == len(found) else [])
            return place

        def numbers(values: Sequence[Any], kind: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=kind, device=device)

        before = [index(data[0]) for _, data in tasks]
        after = [index(data[-1]) for _, data in tasks]
        drifts = [
            (t.drift.earliest, t.drift.latest, t.drift.never) if t.drift else (0.0, 0.0, 1.0)
            for t in self.tasks
        ]
        sizes = [len(data.train_labels) for data in found]
        self.before, self.after = numbers(before, torch.long), numbers(after, torch.long)
        self.drifts = numbers(drifts, torch.float32)
        self.sizes = numbers(sizes, torch.long)
        self.offsets = self.sizes.cumsum(0) - self.sizes
        self.learning_rates = numbers([task.learning_rate for task in self.tasks], dtype)
        moved = [data.to(dtype, device) for data in found]
        self.train_images = _joined([data.train_images for data in moved])
        self.train_labels = _joined([data.train_labels for data in moved])
        self.validation_images = torch.stack([data.validation_images for data in moved])
        self.validation_labels = torch.stack([data.validation_labels for data in moved])
        self.test_images = torch.stack([data.test_images for data in moved])
        self.test_labels = torch.stack([data.test_labels for data in moved])

    def switch_steps(
        self, seed: int, groups: Tensor, task: Tensor, episode: int, length: int
    ) -> Tensor:
        """The step from which each group's data are those after its task's drift, int64 ``[G]``.

        ``length``, the steps of an episode, where they never change.
        """
        drawn = uniform(seed, groups, Purpose.DRIFT, episode, 0, 2)
        earliest, latest, never = self.drifts[task].unbind(1)
        step = ((earliest + (latest - earliest) * drawn[:, 1]) * length).long()
        return torch.where(drawn[:, 0] < never, length, step)

    def picked(self, bits: Tensor, dataset: Tensor) -> Tensor:
        """Indices into ``train_images`` that random words pick of each group's data set.

        With replacement; words and indices are int64 ``[G, count]``.
        """
        drawn = to_integers(bits, self.sizes[dataset][:, None])
        return drawn + self.offsets[dataset][:, None]

    def held_back(self, split: str, dataset: Tensor) -> HeldBack:
        """A split for rows of ``dataset``, int64 ``[R]``."""
        return HeldBack(getattr(self, f"{split}_images"), getattr(self, f"{split}_labels"), dataset)


def _joined(parts: list[Tensor]) -> Tensor:
    """All of ``parts``; a single one as it is, for it may be views that a copy would unfold."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
