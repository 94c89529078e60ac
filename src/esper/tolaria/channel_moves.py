"""Shifts of hosts at the feature level: channels of a block change places in mid-episode."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
