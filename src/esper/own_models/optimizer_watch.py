"""Which optimizer updates a module, and the same one for a copy of the module."""

import copy
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


def updates(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether ``optimizer`` has a parameter of ``model``."""
    own = {id(p) for p in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def optimizer_of(optimizer: Optimizer, model: nn.Module, twin: nn.Module) -> Optimizer:
    """A copy of an optimizer of ``model`` that has not stepped, for ``twin``.

    Args:
        optimizer: its groups and their settings are copied.
        model: the module whose parameters it has; parameters of seeds are left out.
        twin: a copy of the module as it was before it grew.
    """
    own, others = dict(model.named_parameters()), dict(twin.named_parameters())
    matching = {id(own[name]): parameter for name, parameter in others.items() if name in own}
    made = copy.deepcopy(optimizer, dict(matching))
    kept = {id(parameter) for parameter in others.values()}
    for group in made.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]
    return made


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
        # The hook is global: held by it, a watch that nobody else holds would live for ever.
        watch = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (own := watch()) is not None and updates(optimizer, own.model):
                own.found = optimizer
                own.close()

        self._handle = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, self._handle.remove)

    def close(self) -> None:
        """Wait no longer."""
        self._handle.remove()
