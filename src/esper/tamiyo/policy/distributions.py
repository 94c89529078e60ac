"""The distribution of an action: masked options beside numbers within bounds."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from esper.tamiyo.policy.action_masks import MaskedCategorical

NODES, WEIGHTS = (torch.from_numpy(x) for x in np.polynomial.hermite.hermgauss(16))
"""Gauss-Hermite quadrature."""
LOWEST, HIGHEST = -5.0, 2.0
"""Bounds of the logarithm of a deviation."""


@dataclass(frozen=True, slots=True)
class SquashedNormal:
    """Independent normal distributions, of whose draws the environment sees ``tanh``.

    Draws stay as they are before ``tanh``. Their log-probability is that of the normal
    distribution: the Jacobian of ``tanh`` is the same for every policy, so it cancels in importance
    ratios and has no gradient.

    Attributes:
        mean: ``[..., components]``.
        log_deviation: ``[components]``.
    """

    mean: Tensor
    log_deviation: Tensor

    def sample(self, uniform: Tensor) -> Tensor:
        """A draw ``[..., components]`` for uniform numbers in (0, 1) of this shape."""
        normal = math.sqrt(2.0) * torch.erfinv(2.0 * uniform.double() - 1.0).to(self.mean.dtype)
        return self.mean + self.log_deviation.exp() * normal

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of draws, before ``tanh``, ``[..., components]``."""
        score = (value - self.mean) / self.log_deviation.exp()
        return -0.5 * score.square() - self.log_deviation - 0.5 * math.log(2.0 * math.pi)

    def entropy(self) -> Tensor:
        """Entropy in nats of ``tanh`` of a draw, by quadrature, ``[..., components]``."""
        nodes, weights = (x.to(self.mean) for x in (NODES, WEIGHTS / math.sqrt(math.pi)))
        draws = self.mean[..., None] + (math.sqrt(2.0) * self.log_deviation.exp())[:, None] * nodes
        # log(1 - tanh(x)^2)
        slope = 2.0 * (math.log(2.0) - draws - nn.functional.softplus(-2.0 * draws))
        normal = self.log_deviation + 0.5 * math.log(2.0 * math.pi * math.e)
        return normal + (slope * weights).sum(-1)


@dataclass(frozen=True, slots=True)
class ActionDistribution:
    """Distributions over the options of every head, and over the components of Boxes.

    Attributes:
        options: None without heads.
        numbers: None without Boxes; then actions are int64, else float32.
        heads: number of heads.
    """

    options: MaskedCategorical | None
    numbers: SquashedNormal | None
    heads: int

    def sample(self, noise: Tensor | None) -> Tensor:
        """Actions ``[..., heads + components]``; the most probable ones without noise.

        Args:
            noise: uniform numbers in (0, 1), ``[..., heads + components, at least the widest]``.
        """
        options, numbers, parts = self.options, self.numbers, []
        if options is not None:
            draw = options.mode if noise is None else options.sample(noise[..., : self.heads, :])
            parts.append(draw)
        if numbers is not None:
            draw = numbers.mean if noise is None else numbers.sample(noise[..., self.heads :, 0])
            parts.append(draw)
        return (
            parts[0] if len(parts) == 1 else torch.cat([parts[0].to(parts[1].dtype), parts[1]], -1)
        )

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probability of ``actions [..., heads + components]``, ``[...]``."""
        terms = []
        if self.options is not None:
            choices = actions if self.numbers is None else actions[..., : self.heads].long()
            terms.append(self.options.log_prob(choices).sum(-1))
        if self.numbers is not None:
            terms.append(self.numbers.log_prob(actions[..., self.heads :]).sum(-1))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def entropy(self) -> Tensor:
        """Entropy of every head, and last of all components together, ``[..., heads (+ 1)]``."""
        terms = [] if self.options is None else [self.options.entropy()]
        if self.numbers is not None:
            terms.append(self.numbers.entropy().sum(-1, keepdim=True))
        return terms[0] if len(terms) == 1 else torch.cat(terms, -1)
