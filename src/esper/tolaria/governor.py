"""The governor: detects hosts that diverge or collapse and restores their last snapshot.

Each environment is checked and restored independently, as rows of tensors on the device.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import log
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.tolaria.results import EpochResult, Scores

if TYPE_CHECKING:
    from esper.tolaria.stores import Stack

if TYPE_CHECKING:
    from esper.tolaria.bank import ChannelMove

HISTORY = 20
"""Number of healthy validation losses kept per host."""
MIN_HISTORY = 10
"""Losses needed in the history before a loss can count as a collapse or a runaway."""
STRIKES = 3
"""Consecutive runaway losses after which a host is rolled back."""


class Reason(IntEnum):
    """Why a host was rolled back."""

    NONE = 0
    NOT_FINITE = 1
    COLLAPSE = 2
    RUNAWAY = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds for a rollback, and the interval between snapshots.

    Attributes:
        snapshot_every: steps between snapshots of a healthy host.
        collapse_mean: a host has learned once its mean loss is below this fraction of
            ``ln(classes)``; only such a host can collapse.
        collapse_band: the loss of a collapsed host differs by less than this fraction from
            ``ln(classes)``, the loss of a host that guesses.
        collapse_expected: the expected accuracy of a collapsed host is at most this multiple of
            chance. A host whose data drifted can meet the other two conditions without collapse.
        runaway_loss, runaway_deviations, runaway_factor: a loss is a runaway when it exceeds all
            of: this many nats, the mean plus this many standard deviations, this multiple of the
            mean.
    """

    snapshot_every: int = 5
    collapse_mean: float = 0.6
    collapse_band: float = 0.065
    collapse_expected: float = 1.25
    runaway_loss: float = 12.0
    runaway_deviations: float = 6.0
    runaway_factor: float = 3.0


class DivergenceDetector:
    """Detects steps after which a host is not finite, collapsed or runs away, for N hosts.

    ``healthy``, bool ``[N]``, is true where the last step of a row was healthy.

    Args:
        rows: number of hosts, N.
        device: device of the measurements.
        classes: number of classes; a host that guesses has the loss ``ln(classes)``. None if the
            task has no classes: then no host counts as collapsed.
        limits: see ``Limits``.
    """

    def __init__(
        self, rows: int, device: torch.device, classes: int | None, limits: Limits | None = None
    ):
        self.classes, self.limits = classes, limits or Limits()
        self.losses = torch.full((rows, HISTORY), float("nan"), device=device)
        self.strikes = torch.zeros(rows, dtype=torch.long, device=device)
        self.healthy = torch.ones(rows, dtype=torch.bool, device=device)

    def check(self, epoch: EpochResult, scores: Scores, computing: Tensor) -> Tensor:
        """Check a step, and append healthy losses to the history.

        Args:
            epoch: training results.
            scores: validation scores.
            computing: seeds that took part in training, bool ``[N, S]``.

        Returns:
            ``Reason`` of every row, int64 ``[N]``.
        """
        limits, loss = self.limits, scores.loss.float()
        gradients = (epoch.seed_gradient_norm.isfinite() | ~computing).all(1)
        gradients &= epoch.host_gradient_norm.isfinite()
        if epoch.unmeasured is not None:
            gradients |= epoch.unmeasured
        finite = torch.stack([loss, epoch.loss.float()]).isfinite().all(0) & gradients

        # The history holds finite losses, and NaN in unused places.
        count = (HISTORY - self.losses.isnan().sum(1)).clamp(min=1)
        has_history = count >= MIN_HISTORY
        mean = self.losses.nansum(1) / count
        squares = (self.losses - mean[:, None]).square().nansum(1)
        deviation = (squares / count).sqrt()

        collapses = torch.zeros_like(has_history)
        if self.classes is not None:
            guessing = log(self.classes)
            collapses = has_history & (mean < limits.collapse_mean * guessing)
            collapses &= (loss - guessing).abs() < limits.collapse_band * guessing
            collapses &= scores.expected <= limits.collapse_expected / self.classes
        usual = torch.maximum(
            mean + limits.runaway_deviations * deviation, limits.runaway_factor * mean
        )
        runaway = has_history & (loss > usual.clamp(min=limits.runaway_loss))
        self.strikes = (self.strikes + 1) * runaway

        reason = (self.strikes >= STRIKES) * int(Reason.RUNAWAY)
        reason = reason.masked_fill_(collapses, int(Reason.COLLAPSE))
        reason = reason.masked_fill_(~finite, int(Reason.NOT_FINITE))
        panic = reason != Reason.NONE
        self.strikes = self.strikes.masked_fill(panic, 0)
        self.healthy = ~(panic | runaway)
        grown = torch.cat([self.losses[:, 1:], loss[:, None]], 1)
        self.losses = torch.where(self.healthy[:, None], grown, self.losses)
        return reason

    @property
    def every(self) -> int:
        """Steps between snapshots."""
        return self.limits.snapshot_every


class Governor(DivergenceDetector):
    """Checks, snapshots and restores the rows of a stack.

    Args:
        stack: stack to restore; the constructor takes the first snapshot, of untrained hosts.
        classes: see ``DivergenceDetector``.
        limits: see ``Limits``.
    """

    def __init__(self, stack: "Stack", classes: int, limits: Limits | None = None):
        super().__init__(len(stack.host), stack.host.device, classes, limits)
        self.stack = stack
        self.copies = [store.clone() for store in self._stores()]

    def snapshot(self, rows: Tensor) -> None:
        """Take a snapshot of the seeds of ``rows``, bool ``[N]``, and of their hosts if healthy.

        A seed that was just fossilised must survive a rollback, but the snapshot of a host must
        not be taken while its loss runs away.
        """
        stack = self.stack
        hosts = (stack.host, stack.buffers)
        choices = [rows & self.healthy] * len(hosts) + [rows] * len(stack.seeds)
        for copy, store, where in zip(self.copies, self._stores(), choices, strict=True):
            copy.copy_(torch.where(where[:, None], store, copy))

    def follow(self, move: "ChannelMove") -> None:
        """Move the channels of the snapshots too: a rollback does not undo a shift."""
        move.of_parameters(self.copies[0])
        move.of_buffers(self.copies[1])

    def restore(self, rows: Tensor) -> None:
        """Restore the snapshot of ``rows``, bool ``[N]``, and clear their optimizer state."""
        for copy, store in zip(self.copies, self._stores(), strict=True):
            store.copy_(torch.where(rows[:, None], copy, store))
        for optimizer in (self.stack.host_optimizer, *self.stack.seed_optimizers):
            optimizer.clear(rows)

    def _stores(self) -> list[Tensor]:
        return [self.stack.host, self.stack.buffers, *self.stack.seeds]
