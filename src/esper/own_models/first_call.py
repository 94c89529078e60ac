"""The arguments with which a module is called first."""

from typing import Any

from torch import nn


class FirstCall:
    """Forward pre-hook that keeps the arguments of a module's first call and removes itself.

    An object of this package and not a closure, so that a module that waits for its first call can
    be pickled and copied.

    Args:
        model: the module.

    Attributes:
        arguments: positional and keyword arguments; None before the call.
    """

    def __init__(self, model: nn.Module):
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See ``nn.Module.register_forward_pre_hook``."""
        self.arguments = args, kwargs
        self.close()

    def close(self) -> None:
        """Wait no longer."""
        self._handle.remove()
