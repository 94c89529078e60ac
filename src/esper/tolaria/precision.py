"""Mixed precision of hosts and seeds, and the loss scales of float16, per environment.

In float16 small gradients underflow, so the loss is multiplied by a scale before the backward
pass and the gradients are divided by it before any use (Micikevicius et al., 2018, "Mixed precision
training"). A scale is halved when a gradient overflows and doubled after ``GROWTH_INTERVAL``
updates without overflow. Unlike ``torch.amp.GradScaler`` there is one scale per row of a stack, so
an overflow in one environment skips no update in another.

Scales are powers of two, so dividing by a scale is exact.
"""

import contextlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.leyline.switches import switched_on
from esper.native.library import multiplies_bfloat16

DISABLE_VARIABLE = "ESPER_DISABLE_AMP"
AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """Mixed precision of hosts and seeds.

    Parameters, optimizer state and running statistics are float32 for every autocast dtype.

    Attributes:
        device_type: ``cpu`` or ``cuda``.
        amp_dtype: dtype of the autocast region, None for full precision.
        reason: why mixed precision is off although it was requested, None otherwise.
    """

    device_type: str
    amp_dtype: torch.dtype | None = None
    reason: str | None = None

    @property
    def enabled(self) -> bool:
        """Whether mixed precision is on."""
        return self.amp_dtype is not None

    @property
    def scales_losses(self) -> bool:
        """Whether losses are scaled (see ``LossScales``), because float16 gradients underflow."""
        return self.amp_dtype == torch.float16

    @property
    def dtype_name(self) -> str | None:
        """``bfloat16`` or ``float16``, None for full precision."""
        return str(self.amp_dtype).removeprefix("torch.") if self.amp_dtype else None

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Context for forward passes and losses; backward passes run outside it."""
        if self.amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.amp_dtype)


def resolve_precision(
    use_amp: bool, device: torch.device, amp_dtype: str = "auto", backend: str = "auto"
) -> Precision:
    """Mixed precision if it is requested and available, float32 otherwise.

    If it is requested but not available, ``reason`` says why, for one warning.

    Args:
        use_amp: whether it is requested.
        device: device of the hosts.
        amp_dtype: ``bfloat16``, ``float16``, or ``auto``: bfloat16 if the device supports it.
        backend: one of ``backends.choice.NAMES``; on a CPU ``torch`` has both dtypes, and the
            native one bfloat16 if the processor multiplies it.
    """
    if not use_amp:
        return Precision(device.type)
    reason = _obstacle(device, amp_dtype, backend)
    if reason is not None:
        return Precision(device.type, reason=reason)
    if amp_dtype == "auto":
        amp_dtype = "bfloat16" if has_bfloat16(device) else "float16"
    return Precision(device.type, AMP_DTYPES[amp_dtype])


def _obstacle(device: torch.device, amp_dtype: str, backend: str) -> str | None:
    if amp_disabled():
        return f"{DISABLE_VARIABLE} is set"
    is_native = backend in ("auto", "native") and amp_dtype != "float16"
    if device.type == "cpu" and backend != "torch" and not (is_native and multiplies_bfloat16()):
        lacking = "float16" if amp_dtype == "float16" else "mixed precision"
        return f"backend {backend} has no {lacking} on {device}; use --backend torch"
    if amp_dtype == "bfloat16" and not has_bfloat16(device):
        return f"{device} has no bfloat16; use --amp-dtype float16"
    return None


def has_bfloat16(device: torch.device) -> bool:
    """True for every CPU, at least by emulation, and for CUDA devices with hardware support."""
    return device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


def amp_disabled() -> bool:
    """Whether ``ESPER_DISABLE_AMP`` turns mixed precision off."""
    return switched_on(DISABLE_VARIABLE)


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
