"""In which precision hosts and seeds compute."""

import contextlib
import os
from dataclasses import dataclass

import torch

DISABLE_VARIABLE = "ESPER_DISABLE_AMP"


@dataclass(frozen=True, slots=True)
class Precision:
    """Mixed precision of the host path.

    Attributes:
        device_type: ``cpu`` or ``cuda``.
        amp_dtype: dtype of the autocast region, None for full precision.
        reason: why mixed precision was asked for and is off, None otherwise.
    """

    device_type: str
    amp_dtype: torch.dtype | None = None
    reason: str | None = None

    @property
    def enabled(self) -> bool:
        return self.amp_dtype is not None

    @property
    def dtype_name(self) -> str | None:
        """``bfloat16`` or ``float16``, None for full precision."""
        return str(self.amp_dtype).removeprefix("torch.") if self.amp_dtype else None

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The region for forward passes; backward and loss stay outside."""
        if self.amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.amp_dtype)


def resolve_precision(use_amp: bool, device: torch.device) -> Precision:
    """Mixed precision where it was asked for and the device gains from it.

    bfloat16 on a CUDA device that has it. Elsewhere float32, with ``reason`` set for one warning.
    """
    if not use_amp:
        return Precision(device.type)
    if disabled():
        return Precision(device.type, reason=f"{DISABLE_VARIABLE} is set")
    if device.type != "cuda":
        return Precision(device.type, reason=f"mixed precision gains nothing on {device}")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return Precision(device.type, reason=f"{device} has no bfloat16")
    return Precision(device.type, torch.bfloat16)


def disabled() -> bool:
    """Whether the environment forbids mixed precision."""
    return os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0")
