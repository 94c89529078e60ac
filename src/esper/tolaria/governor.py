"""The governor: sees hosts that diverge or collapse, and puts them back to their last snapshot.

Each environment is judged and restored by itself, as rows of tensors on the device.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import log

import torch
from torch import Tensor

from esper.kasmina.stack import Stack
from esper.tolaria.backends import EpochResult, Scores

HISTORY = 20
"""Healthy validation losses that are remembered."""
LEAST_HISTORY = 10
"""Losses that must be known before one can be called a collapse or a runaway."""
STRIKES = 3
"""Runaway losses in a row that make a panic."""


class Reason(IntEnum):
    """Why a host was rolled back."""

    NONE = 0
    NOT_FINITE = 1
    COLLAPSE = 2
    RUNAWAY = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as a disaster, and how old a snapshot may be.

    Attributes:
        snapshot_every: steps between snapshots of a healthy host.
        collapse_mean: a host has learned something once its mean loss is below this part of
            ``ln(classes)``.
        collapse_band: it has collapsed when its loss is then within this part of ``ln(classes)``.
        collapse_expected: and its expected accuracy is at most this multiple of chance. A host
            whose data changed may have such a loss without having forgotten everything.
        runaway_loss, runaway_deviations, runaway_factor: a loss runs away when it is above all of
            this many nats, the mean plus so many standard deviations, and so many means.
    """

    snapshot_every: int = 5
    collapse_mean: float = 0.6
    collapse_band: float = 0.065
    collapse_expected: float = 1.25
    runaway_loss: float = 12.0
    runaway_deviations: float = 6.0
    runaway_factor: float = 3.0


class Governor:
    """Watches the rows of a stack.

    ``healthy``, bool ``[N]``, says of each row whether its last step was.

    Args:
        stack: what it restores; the first snapshot is taken here, of newborn hosts.
        classes: of the task, for the loss of a host that guesses.
        limits: see ``Limits``.
    """

    def __init__(self, stack: Stack, classes: int, limits: Limits | None = None):
        self.stack, self.classes, self.limits = stack, classes, limits or Limits()
        rows, device = len(stack.host), stack.host.device
        self.losses = torch.full((rows, HISTORY), float("nan"), device=device)
        self.strikes = torch.zeros(rows, dtype=torch.long, device=device)
        self.healthy = torch.ones(rows, dtype=torch.bool, device=device)
        self.kept = [store.clone() for store in self._stores()]

    # Native twin: step/governor.h, check_row.
    def check(self, epoch: EpochResult, scores: Scores, computing: Tensor) -> Tensor:
        """Judge a step, and remember its losses where they are healthy.

        Args:
            epoch: what training measured.
            scores: what validation found.
            computing: seeds that took part in training, bool ``[N, S]``.

        Returns:
            ``Reason`` of every row, int64 ``[N]``.
        """
        limits, loss = self.limits, scores.loss.float()
        seeds = epoch.seed_gradient_norm.masked_fill(~computing, 0.0)
        norms = torch.cat([epoch.host_gradient_norm[:, None].to(seeds.dtype), seeds], 1)
        gradients = norms.isfinite().all(1)
        if epoch.unmeasured is not None:
            gradients |= epoch.unmeasured
        finite = torch.stack([loss, epoch.loss.float()]).isfinite().all(0) & gradients

        # What is remembered is finite, or NaN where there is nothing yet.
        count = (HISTORY - self.losses.isnan().sum(1)).clamp(min=1)
        experienced = count >= LEAST_HISTORY
        mean = self.losses.nansum(1) / count
        squares = (self.losses - mean[:, None]).square().nansum(1)
        deviation = (squares / count).sqrt()

        guessing = log(self.classes)
        collapsed = experienced & (mean < limits.collapse_mean * guessing)
        collapsed &= (loss - guessing).abs() < limits.collapse_band * guessing
        collapsed &= scores.expected <= limits.collapse_expected / self.classes
        runaway = experienced & (loss > limits.runaway_loss)
        runaway &= loss > mean + limits.runaway_deviations * deviation
        runaway &= loss > limits.runaway_factor * mean
        self.strikes = (self.strikes + 1) * runaway

        reason = (self.strikes >= STRIKES) * int(Reason.RUNAWAY)
        reason = reason.masked_fill(collapsed, int(Reason.COLLAPSE))
        reason = reason.masked_fill(~finite, int(Reason.NOT_FINITE))
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

    def snapshot(self, rows: Tensor) -> None:
        """Keep the numbers of ``rows``, bool ``[N]``; those of seeds alone where a host runs away.

        A seed that was just fossilised has to be there after a rollback, but a host that is on the
        run would be put back to where it was running.
        """
        stack = self.stack
        hosts = (stack.host, stack.buffers)
        wanted = [rows & self.healthy] * len(hosts) + [rows] * len(stack.seeds)
        for kept, store, where in zip(self.kept, self._stores(), wanted, strict=True):
            kept.copy_(torch.where(where[:, None], store, kept))

    def restore(self, rows: Tensor) -> None:
        """Put ``rows``, bool ``[N]``, back to their snapshot, with no optimizer state."""
        for kept, store in zip(self.kept, self._stores(), strict=True):
            store.copy_(torch.where(rows[:, None], kept, store))
        for optimizer in (self.stack.host_optimizer, *self.stack.seed_optimizers):
            optimizer.clear(rows)

    def _stores(self) -> list[Tensor]:
        return [self.stack.host, self.stack.buffers, *self.stack.seeds]
