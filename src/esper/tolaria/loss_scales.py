"""Loss scaling for float16, each environment by itself.

In float16 small gradients underflow, so the loss is multiplied by a scale before backward and the
gradients divided by it before anything looks at them (Micikevicius et al., 2018, "Mixed precision
training"). The scale follows the gradients: halved when one overflows, doubled after a while
without. Unlike ``torch.amp.GradScaler`` there is one scale for each row of a stack, so that an
overflow in one environment skips no update of another.

Scales are powers of two: dividing by one loses nothing.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.leyline.errors import UsageError

START = 2.0**10
"""Low enough that newborn hosts do not overflow: a skipped minibatch is lost to them."""
LEAST, MOST = 1.0, 2.0**16
"""At ``LEAST`` a gradient that overflows is no matter of scaling; above ``MOST`` nothing is won,
and the next fresh host would have to come down again."""
GROWTH_INTERVAL = 200
"""Updates without overflow after which a scale doubles; an episode has a few hundred."""


@dataclass(frozen=True, slots=True)
class ScaleTable:
    """The loss scales of all environments, whichever stacks these are in.

    Attributes:
        scale: float32 ``[N]``, within [``LEAST``, ``MOST``].
        clean: minibatches without overflow since the scale last changed, int64 ``[N]``.
        skipped: minibatches so far in which an update was skipped, int64 ``[N]``.
    """

    scale: Tensor
    clean: Tensor
    skipped: Tensor

    @classmethod
    def fresh(cls, rows: int, device: torch.device) -> "ScaleTable":
        """Every scale at ``START``."""
        counts = torch.zeros(rows, dtype=torch.long, device=device)
        return cls(torch.full((rows,), START, device=device), counts, counts.clone())

    def state(self) -> dict[str, Tensor]:
        """Copies by name, for a checkpoint."""
        return {f.name: getattr(self, f.name).clone() for f in fields(self)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take up what ``state`` gave, in place.

        Raises:
            UsageError: it is of another number of environments.
        """
        for f in fields(self):
            mine, stored = getattr(self, f.name), state[f.name]
            if mine.shape != stored.shape:
                raise UsageError(
                    f"resume: the checkpoint has loss scales of {len(stored)} environments and "
                    f"twins, here are {len(mine)}; give the same --envs and --group-size"
                )
            mine.copy_(stored)

    def copy_rows(self, target: "ScaleTable", rows: Tensor) -> None:
        """Put ``rows``, int64 ``[M]`` on the target's device, into a table of the same size."""
        for f in fields(self):
            to, mine = getattr(target, f.name), getattr(self, f.name)
            to[rows] = mine[rows.to(mine.device)].to(to.device)


class LossScales:
    """The loss scales of the rows of a stack.

    Args:
        table: where they are kept, and brought up to date in place.
        rows: which of them are these, int64 ``[N]``.
    """

    def __init__(self, table: ScaleTable, rows: Tensor):
        self.table, self.rows = table, rows

    @property
    def scale(self) -> Tensor:
        """Float32 ``[N]``."""
        return self.table.scale[self.rows]

    @property
    def adaptable(self) -> Tensor:
        """Where a smaller scale is left to try, bool ``[N]``."""
        return self.scale > LEAST

    def unscaled(self, gradient: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The gradient of the loss itself, and where it did not overflow.

        Args:
            gradient: of the scaled loss, ``[M, P]``.
            rows: of the stack, int64 ``[M]``; all when None.

        Returns:
            gradient ``[M, P]``, finite bool ``[M]``.
        """
        scale = self.scale if rows is None else self.scale[rows]
        return gradient / scale[:, None].to(gradient.dtype), gradient.isfinite().all(1)

    def adjust(self, skipped: Tensor, loss: Tensor) -> None:
        """Bring the scales up to date after a minibatch.

        Args:
            skipped: where some gradient was not finite, bool ``[N]``.
            loss: of the minibatch, ``[N]``; where it is not finite itself, the scale is not to
                blame and stays.
        """
        table, rows = self.table, self.rows
        clean = torch.where(skipped, 0, table.clean[rows] + 1)
        grown = clean == GROWTH_INTERVAL
        factor = torch.where(skipped & loss.isfinite(), 0.5, torch.where(grown, 2.0, 1.0))
        table.scale[rows] = (table.scale[rows] * factor).clamp(LEAST, MOST)
        table.clean[rows] = clean.masked_fill(grown, 0)
        table.skipped[rows] += skipped
