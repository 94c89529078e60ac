"""Loss scaling for a policy whose trunk is computed in float16."""

import torch
from torch import Tensor


class LossScaler:
    """A factor on the loss that keeps small gradients above float16's smallest number.

    Micikevicius et al., "Mixed precision training" (2018): a step whose gradient overflows is
    skipped and halves the factor; ``GROWTH_INTERVAL`` steps without overflow double it. Everything
    stays on the device. ``torch.amp.GradScaler`` scales in the same way, but it cannot skip a step
    for another reason and, if the optimizer is not fused, makes the CPU wait for the device.

    Args:
        device: device of the factor.
    """

    INITIAL_SCALE, MIN_SCALE, GROWTH_INTERVAL = 2.0**16, 1.0, 2000

    def __init__(self, device: torch.device):
        self.scale = torch.full((), self.INITIAL_SCALE, device=device)
        self.good_steps = torch.zeros((), device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The scaled loss, from which the backward pass starts."""
        return loss * self.scale

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients by the factor, in place."""
        torch._foreach_mul_(gradients, 1.0 / self.scale)

    def may_overflow(self) -> Tensor:
        """Whether the factor may have caused a gradient that is not finite, bool scalar."""
        return self.scale > self.MIN_SCALE

    def adapt(self, overflowed: Tensor) -> None:
        """Adapt the factor after a step; ``overflowed`` is a bool scalar on the device."""
        good = torch.where(overflowed, 0.0, self.good_steps + 1.0)
        grow = good >= self.GROWTH_INTERVAL
        change = torch.where(overflowed, 0.5, torch.where(grow, 2.0, 1.0))
        self.scale.mul_(change).clamp_(min=self.MIN_SCALE)
        self.good_steps.copy_(torch.where(grow, 0.0, good))

    def state(self) -> dict[str, Tensor]:
        """Factor and step count, for the checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned."""
        self.scale.copy_(state["scale"])
        self.good_steps.copy_(state["good_steps"])
