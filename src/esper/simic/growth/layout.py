"""Which environments there are and which tasks they draw: what is known of them without hosts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.kasmina.rng import Purpose, random_bits
from esper.kasmina.slots import SlotSpec
from esper.runtime.tasks import Task
from esper.simic.growth.rewards import utility
from esper.simic.growth.step import GrowthConfig


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
        """Utility of each environment's host in this episode, ``[N]``; see ``rewards.utility``."""
        hosts, prices = self._host_parameters[self.task_of], self._prices[self.task_of]
        return utility(score, added_parameters, hosts, prices.to(score.dtype))
