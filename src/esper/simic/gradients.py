"""Gradient norms of a policy: of all of it, and of each head's own parameters."""

from typing import Any

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.interface import Policy


class GradientNorms:
    """Measures and clips gradients with one norm a parameter.

    Args:
        policy: whose gradients.
        device: where they live.
    """

    def __init__(self, policy: Policy[Any], device: torch.device):
        self.parameters = list(policy.parameters())
        self.heads = (*policy.heads, "value")
        self.own = {head: policy.head_parameters(head) for head in self.heads}
        place = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        members = torch.zeros(len(self.heads), len(self.parameters), dtype=torch.bool)
        for row, head in enumerate(self.heads):
            members[row, [place[id(parameter)] for parameter in self.own[head]]] = True
        self.members = members.to(device)

    def measure(self) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The norm of the whole gradient, and that of each head.

        A head some of whose parameters have no gradient has None, which is neither 0 nor NaN: then
        its log-probs are cut off from it.
        """
        zero = self.members.new_zeros((), dtype=torch.float32)
        present = [p.grad if p.grad is not None else zero for p in self.parameters]
        squares = torch.stack(torch._foreach_norm(present)).square()
        each = torch.where(self.members, squares, 0.0).sum(1).sqrt()
        heads: dict[str, Tensor | None] = {
            head: None if any(p.grad is None for p in self.own[head]) else each[row]
            for row, head in enumerate(self.heads)
        }
        return squares.sum().sqrt(), heads

    def clip(self, norm: Tensor, most: float) -> None:
        """Scale gradients whose norm is ``norm`` down to ``most``, in place."""
        nn.utils.clip_grads_with_norm_(self.parameters, most, norm)
