"""Finding the optimizer of a training loop that does not name it."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


def updates(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether ``optimizer`` has a parameter of ``model``."""
    own = {id(p) for p in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


class OptimizerWatch:
    """Waits for the first step of an optimizer that updates a module.

    Args:
        model: the module.

    Attributes:
        found: the optimizer; None before its first step.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.found: Optimizer | None = None
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.found is None and updates(optimizer, self.model):
            self.found = optimizer
            self.close()

    def close(self) -> None:
        """Wait no longer."""
        self._handle.remove()
