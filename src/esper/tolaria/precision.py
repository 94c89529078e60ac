"""Arithmetic precision of hosts and seeds."""

import contextlib
from dataclasses import dataclass

import torch

from esper.leyline.switches import switched_on

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
        """Whether losses are scaled (see ``loss_scales``), because float16 gradients underflow."""
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
        use_amp: whether mixed precision is requested.
        device: device of the hosts.
        amp_dtype: ``bfloat16``, ``float16``, or ``auto``: bfloat16 if the device supports it.
        backend: one of ``tolaria.backends.choice.NAMES``; on a CPU only ``torch`` has
            mixed precision.
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
    if device.type == "cpu" and backend != "torch":
        return f"backend {backend} has no mixed precision on {device}; use --backend torch"
    if amp_dtype == "bfloat16" and not has_bfloat16(device):
        return f"{device} has no bfloat16; use --amp-dtype float16"
    return None


def has_bfloat16(device: torch.device) -> bool:
    """True for every CPU, at least by emulation, and for CUDA devices with hardware support."""
    return device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


def amp_disabled() -> bool:
    """Whether ``ESPER_DISABLE_AMP`` turns mixed precision off."""
    return switched_on(DISABLE_VARIABLE)
