"""In which precision hosts and seeds compute."""

import contextlib
from dataclasses import dataclass

import torch

from esper.leyline.switches import switched_on

DISABLE_VARIABLE = "ESPER_DISABLE_AMP"
AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """Mixed precision of the host path.

    Parameters, optimizer state and running statistics are float32 whatever the autocast dtype.

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
    def scaled(self) -> bool:
        """Whether losses are scaled (``tolaria.loss_scales``): float16 gradients underflow."""
        return self.amp_dtype == torch.float16

    @property
    def dtype_name(self) -> str | None:
        """``bfloat16`` or ``float16``, None for full precision."""
        return str(self.amp_dtype).removeprefix("torch.") if self.amp_dtype else None

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The region for forward passes and losses; backward stays outside."""
        if self.amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.amp_dtype)


def resolve_precision(
    use_amp: bool, device: torch.device, amp_dtype: str = "auto", backend: str = "auto"
) -> Precision:
    """Mixed precision where it was asked for and can be had.

    Where it cannot, float32, with ``reason`` set for one warning.

    Args:
        use_amp: whether it is asked for.
        device: where hosts live.
        amp_dtype: ``bfloat16``, ``float16``, or ``auto``: bfloat16 where the device has it.
        backend: one of ``tolaria.backends.choice.NAMES``; on a CPU only ``torch`` can do it.
    """
    if not use_amp:
        return Precision(device.type)
    reason = _obstacle(device, amp_dtype, backend)
    if reason is not None:
        return Precision(device.type, reason=reason)
    if amp_dtype == "auto":
        amp_dtype = "bfloat16" if _has_bfloat16(device) else "float16"
    return Precision(device.type, AMP_DTYPES[amp_dtype])


def _obstacle(device: torch.device, amp_dtype: str, backend: str) -> str | None:
    if disabled():
        return f"{DISABLE_VARIABLE} is set"
    if device.type == "cpu" and backend != "torch":
        return f"backend {backend} has no mixed precision on {device}, --backend torch has"
    if amp_dtype == "bfloat16" and not _has_bfloat16(device):
        return f"{device} has no bfloat16, --amp-dtype float16 it has"
    return None


def _has_bfloat16(device: torch.device) -> bool:
    """Every CPU, by emulation at least; of the CUDA devices those that have it in hardware."""
    return device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


def disabled() -> bool:
    """Whether the environment forbids mixed precision."""
    return switched_on(DISABLE_VARIABLE)
