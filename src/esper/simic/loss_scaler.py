"""Loss scaling for a policy whose trunk computes in float16."""

import torch
from torch import Tensor


class LossScaler:
    """A factor on the loss that keeps small gradients above float16's least number.

    Micikevicius et al., "Mixed precision training" (2018): halved by a step whose gradient
    overflows, which is left out; doubled after ``GROWTH_INTERVAL`` steps without one. Everything
    stays on the device. ``torch.amp.GradScaler`` does the same, but its step decides on the host
    and leaves no room for another reason to skip.

    Args:
        device: where the factor lives.
    """

    FIRST, LEAST, GROWTH_INTERVAL = 2.0**16, 1.0, 2000

    def __init__(self, device: torch.device):
        self.scale = torch.full((), self.FIRST, device=device)
        self.good_steps = torch.zeros((), device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to start the backward pass from."""
        return loss * self.scale

    def unscale(self, gradients: list[Tensor]) -> None:
        """Bring gradients back to their own size, in place."""
        torch._foreach_mul_(gradients, 1.0 / self.scale)

    def may_overflow(self) -> Tensor:
        """Whether a gradient that is not finite may be the factor's fault, bool scalar."""
        return self.scale > self.LEAST

    def follow(self, overflowed: Tensor) -> None:
        """Take in whether a step overflowed, bool scalar on the device."""
        good = torch.where(overflowed, 0.0, self.good_steps + 1.0)
        grow = good >= self.GROWTH_INTERVAL
        change = torch.where(overflowed, 0.5, torch.where(grow, 2.0, 1.0))
        self.scale.mul_(change).clamp_(min=self.LEAST)
        self.good_steps.copy_(torch.where(grow, 0.0, good))

    def state(self) -> dict[str, Tensor]:
        """For the checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, Tensor]) -> None:
        """From the checkpoint."""
        self.scale.copy_(state["scale"])
        self.good_steps.copy_(state["good_steps"])
