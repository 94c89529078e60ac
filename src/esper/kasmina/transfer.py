"""Asynchronous copies from the CPU to a device."""

import torch
from torch import Tensor


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Copy ``x`` from the CPU to ``device``.

    A copy from pageable memory would block a CUDA stream, so the copy uses pinned memory.
    """
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
