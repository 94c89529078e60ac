"""Which parameters of a host are trained, and how fast: the ways of ``runtime.tasks.TUNINGS``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.runtime.tasks import TUNINGS

LAST, AUTO_RGN = TUNINGS.index("last"), TUNINGS.index("auto_rgn")
MIN_NORM = 1e-8
"""Smallest norm by which is divided, so that no weight and no gradient of 0 gives a NaN."""


# Native twin: hosts/optimizer.h, relative_rates.
def relative_rates(
    gradient: Tensor, parameters: Tensor, block_sizes: Sequence[int], tuning: Tensor
) -> Tensor:
    """Factor of the learning rate of each block of each host, ``[N, blocks]`` in [0, 1].

    With "auto_rgn" (Lee et al., "Surgical fine-tuning improves adaptation to distribution shifts",
    ICLR 2023, section 4) it is the norm of the block's gradient over that of its parameters, as a
    fraction of the largest of the host. The paper measures this ratio once per pass through the
    data, and here it is that of the minibatch.

    Args:
        gradient: ``[N, P]``; its scale does not matter.
        parameters: ``[N, P]``.
        block_sizes: parameters of each block, P together.
        tuning: index in ``TUNINGS``, int64 ``[N]``.
    """
    sizes = list(block_sizes)
    norms = [
        torch.stack([part.norm(dim=1) for part in rows.split(sizes, 1)], 1)
        for rows in (gradient, parameters)
    ]
    ratio = norms[0] / norms[1].clamp(min=MIN_NORM)
    relative = ratio / ratio.amax(1, keepdim=True).clamp(min=MIN_NORM)
    last = torch.zeros_like(relative)
    last[:, -1] = 1.0
    way = tuning[:, None]
    return torch.where(way == AUTO_RGN, relative, torch.where(way == LAST, last, 1.0))


def by_parameter(factors: Tensor, block_sizes: Sequence[int]) -> Tensor:
    """Factors ``[N, blocks]`` for each parameter, ``[N, P]``."""
    parts = zip(factors.unbind(1), block_sizes, strict=True)
    return torch.cat([factor[:, None].expand(-1, size) for factor, size in parts], 1)
