"""Gradient norms of a policy: the global norm and the norm of each head."""

from typing import Any

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.interface import Policy


class GradientNorms:
    """Computes global and per-head gradient norms from the norm of each parameter, and clips.

    Args:
        policy: policy whose gradients are measured.
        device: device of the gradients.
    """

    def __init__(self, policy: Policy[Any], device: torch.device):
        self.parameters = list(policy.parameters())
        self.heads = (*policy.heads, "value")
        self.head_parameters = {head: policy.head_parameters(head) for head in self.heads}
        index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        mask = torch.zeros(len(self.heads), len(self.parameters), dtype=torch.bool)
        for row, head in enumerate(self.heads):
            mask[row, [index[id(parameter)] for parameter in self.head_parameters[head]]] = True
        self.head_mask = mask.to(device)

    def measure(self) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The global norm and the norm of each head's gradients, scalars on the device.

        A head's norm is None, not 0 or NaN, if one of its parameters has no gradient: that happens
        if the head's log-probs are detached from its parameters.
        """
        zero = self.head_mask.new_zeros((), dtype=torch.float32)
        present = [p.grad if p.grad is not None else zero for p in self.parameters]
        squares = torch.stack(torch._foreach_norm(present)).square()
        each = torch.where(self.head_mask, squares, 0.0).sum(1).sqrt()
        heads: dict[str, Tensor | None] = {
            head: None if any(p.grad is None for p in self.head_parameters[head]) else each[row]
            for row, head in enumerate(self.heads)
        }
        return squares.sum().sqrt(), heads

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale the gradients, whose norm is ``norm``, down to at most ``max_norm``, in place."""
        nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
