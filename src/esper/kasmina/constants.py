"""Small constant tensors, made once for each device."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def constant(values: tuple[Any, ...], device: torch.device) -> Tensor:
    """``torch.tensor(values)`` on ``device``, the same tensor at every call; never write to it.

    Made anew each time it would be a copy from pageable memory, for which a CUDA stream waits.
    """
    return torch.tensor(values, device=device)
