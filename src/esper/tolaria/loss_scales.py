"""Loss scaling for float16, per environment.

In float16 small gradients underflow, so the loss is multiplied by a scale before the backward
pass and the gradients are divided by it before any use (Micikevicius et al., 2018, "Mixed precision
training"). A scale is halved when a gradient overflows and doubled after ``GROWTH_INTERVAL``
updates without overflow. Unlike ``torch.amp.GradScaler`` there is one scale per row of a stack, so
an overflow in one environment skips no update in another.

Scales are powers of two, so dividing by a scale is exact.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.leyline.errors import UsageError

START = 2.0**10
"""Low enough that untrained hosts do not overflow, which would cost them a minibatch."""
MIN_SCALE, MAX_SCALE = 1.0, 2.0**16
"""Bounds of a scale. An overflow at ``MIN_SCALE`` is not caused by scaling. Scales above
``MAX_SCALE`` gain nothing, and the host of the next episode would overflow at them."""
GROWTH_INTERVAL = 200
"""Updates without overflow after which a scale doubles; an episode has a few hundred updates."""


@dataclass(frozen=True, slots=True)
class ScaleTable:
    """The loss scales of all environments of a run, across all stacks.

    Attributes:
        scale: float32 ``[N]``, within [``MIN_SCALE``, ``MAX_SCALE``].
        clean: minibatches without overflow since the scale last changed, int64 ``[N]``.
        skipped: total minibatches in which an update was skipped, int64 ``[N]``.
    """

    scale: Tensor
    clean: Tensor
    skipped: Tensor

    @classmethod
    def fresh(cls, rows: int, device: torch.device) -> "ScaleTable":
        """A table of ``rows`` environments with every scale at ``START``."""
        counts = torch.zeros(rows, dtype=torch.long, device=device)
        return cls(torch.full((rows,), START, device=device), counts, counts.clone())

    def state(self) -> dict[str, Tensor]:
        """Copies by name, for a checkpoint."""
        return {f.name: getattr(self, f.name).clone() for f in fields(self)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the tensors returned by ``state``, in place.

        Raises:
            UsageError: ``state`` has a different number of environments.
        """
        for f in fields(self):
            mine, theirs = getattr(self, f.name), state[f.name]
            if mine.shape != theirs.shape:
                raise UsageError(
                    f"resume: the checkpoint has loss scales of {len(theirs)} environments and "
                    f"twins, this run has {len(mine)}; give the same --envs and --group-size"
                )
            mine.copy_(theirs)

    def copy_rows(self, target: "ScaleTable", rows: Tensor) -> None:
        """Copy ``rows`` into ``target``, a table of the same size.

        ``rows`` is int64 ``[M]`` on the target's device.
        """
        for f in fields(self):
            to, mine = getattr(target, f.name), getattr(self, f.name)
            to[rows] = mine[rows.to(mine.device)].to(to.device)


class LossScales:
    """The loss scales of the rows of a stack.

    Args:
        table: table of all environments, updated in place.
        rows: rows of the table that belong to this stack, int64 ``[N]``.
    """

    def __init__(self, table: ScaleTable, rows: Tensor):
        self.table, self.rows = table, rows

    @property
    def scale(self) -> Tensor:
        """Scale of each row, float32 ``[N]``."""
        return self.table.scale[self.rows]

    @property
    def adaptable(self) -> Tensor:
        """Where the scale can still be reduced, bool ``[N]``."""
        return self.scale > MIN_SCALE

    def unscale(self, gradient: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The gradient of the unscaled loss, and where it did not overflow.

        Args:
            gradient: gradient of the scaled loss, ``[M, P]``.
            rows: rows of the stack, int64 ``[M]``; all when None.

        Returns:
            gradient ``[M, P]``, finite bool ``[M]``.
        """
        scale = self.scale if rows is None else self.scale[rows]
        return gradient / scale[:, None].to(gradient.dtype), gradient.isfinite().all(1)

    def adjust(self, overflow: Tensor, loss: Tensor) -> None:
        """Update the scales after a minibatch.

        Args:
            overflow: where a gradient was not finite, bool ``[N]``.
            loss: loss of the minibatch, ``[N]``; where it is not finite, the scale is not the
                cause and is kept.
        """
        table, rows = self.table, self.rows
        clean = torch.where(overflow, 0, table.clean[rows] + 1)
        grown = clean == GROWTH_INTERVAL
        factor = torch.where(overflow & loss.isfinite(), 0.5, torch.where(grown, 2.0, 1.0))
        table.scale[rows] = (table.scale[rows] * factor).clamp(MIN_SCALE, MAX_SCALE)
        table.clean[rows] = clean.masked_fill(grown, 0)
        table.skipped[rows] += overflow
