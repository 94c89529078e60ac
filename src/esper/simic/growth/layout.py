"""Which environments there are and which tasks they draw; cutting into and merging of shards."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.rng import Purpose, random_bits
from esper.kasmina.slots import SlotSpec
from esper.runtime.tasks import Task
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.policy.features import utility


def span(environments: list[int]) -> str:
    """Environments for a message: the identity of one, or the number and range of several."""
    if len(environments) == 1:
        return f"environment {environments[0]}"
    return f"{len(environments)} environments from {min(environments)} to {max(environments)}"


def cut(runs: list[int], parts: int) -> list[int]:
    """Sizes of at most ``parts`` parts of about equal size, each of whole consecutive runs."""
    total, sizes, position = sum(runs), [0] * parts, 0
    for run in runs:
        sizes[min(parts - 1, (position + run // 2) * parts // total)] += run
        position += run
    return [size for size in sizes if size]


class GrowthLayout:
    """N environments of one or more tasks, without their hosts.

    Args:
        tasks: the tasks; each group draws one of them for every episode.
        environments: identities, int64 ``[N]``.
        config: see ``GrowthConfig``.
        device: device of the tensors.
        assignment: index in ``tasks`` of each environment's task in all episodes, int64 ``[N]``,
            equal within a group; None to draw the task of each group anew for every episode.

    Attributes:
        count: N.
        groups: group of each environment, int64 ``[N]``.
        task_of: index in ``tasks`` of each environment's task in this episode, int64 ``[N]``.
        task_numbers: the same as a list, for which a GPU need not be waited for.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        environments: Tensor,
        config: GrowthConfig,
        device: torch.device,
        assignment: Tensor | None = None,
    ):
        self.tasks, self.config, self.device = tuple(tasks), config, device
        self.environments = environments.to(device)
        self.count: int = len(environments)
        self.groups = self.environments // config.group_size
        self.assignment = None if assignment is None else assignment.to(device)
        counts = [task.host.parameter_count for task in self.tasks]
        prices = [task.price for task in self.tasks]
        self._host_parameters = torch.tensor(counts, device=device)
        self._prices = torch.tensor(prices, dtype=torch.float64, device=device)

    def draw_tasks(self, episode: int) -> None:
        """Begin episode number ``episode``, for which every group draws a task."""
        self.task_of = self._draw(episode) if self.assignment is None else self.assignment
        self.task_numbers: list[int] = self.task_of.tolist()

    def _draw(self, episode: int) -> Tensor:
        """Draw the task of each environment, int64 ``[N]``.

        Consecutive groups get different tasks; the order of the tasks is random per episode.
        """
        bits = random_bits(
            self.config.seed,
            torch.tensor([episode], device=self.device),
            Purpose.TASK,
            0,
            0,
            len(self.tasks),
        )
        return bits[0].argsort()[self.groups % len(self.tasks)]

    @property
    def current_tasks(self) -> list[Task]:
        """The task of each environment in this episode."""
        return [self.tasks[task] for task in self.task_numbers]

    @property
    def current_slots(self) -> list[tuple[SlotSpec, ...]]:
        """The slots of each environment's host in this episode."""
        return [task.host.slots for task in self.current_tasks]

    def utility(self, score: Tensor, added_parameters: Tensor) -> Tensor:
        """Utility of each environment's host in this episode, ``[N]``; see ``features.utility``."""
        hosts, prices = self._host_parameters[self.task_of], self._prices[self.task_of]
        return utility(score, added_parameters, hosts, prices.to(score.dtype))


_UNKNOWN = frozenset(
    {
        "contribution",
        "health",
        "previous_health",
        "gradient_norm",
        "gradient_ratio",
        "baseline",
        "improvement",
        "birth_accuracy",
        "shapley",
        "interactions",
    }
)
"""Fields padded with NaN for slots that a host does not have; others with 0 or false."""


def merge(parts: Sequence[Any], order: Tensor, name: str = "") -> Any:
    """Merge the shards' values into one, with the rows in the given order.

    Args:
        parts: the value of each shard: dataclasses of one type, tensors ``[n, ...]``, or other
            values, of which the first is taken. Tensors of hosts with fewer slots are padded to the
            widest.
        order: for each row of the result, its index in the concatenated rows of the shards, int64
            ``[N]``; the result is on its device.
        name: name of the field, which selects the padding.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        parts = [part.to(order.device) for part in parts]
        return _stack(parts, float("nan") if name in _UNKNOWN else 0.0).index_select(0, order)
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{
                f.name: merge([getattr(part, f.name) for part in parts], order, f.name)
                for f in fields(first)
            }
        )
    return first


def _stack(parts: Sequence[Tensor], fill: float) -> Tensor:
    """The parts concatenated along the first axis, padded at the end of every other axis."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    if all(list(part.shape[1:]) == shape for part in parts):
        return torch.cat(list(parts))
    wide = []
    for part in parts:
        padding = [
            x for size, most in zip(part.shape[1:], shape, strict=True) for x in (most - size, 0)
        ]
        value = fill if part.is_floating_point() else 0
        wide.append(torch.nn.functional.pad(part, padding[::-1], value=value))
    return torch.cat(wide)
