"""An encoder of the user's own, which sees flat features in the structure of their space."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from esper.leyline.errors import UsageError, first_line
from esper.runtime.encoders import find_encoder


def structure(space: spaces.Space[Any], flat: Tensor) -> Any:
    """Flat features ``[B, inputs]`` in the structure of ``space``, see ``encoders.Factory``."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        entries = space.spaces if isinstance(space, spaces.Dict) else None
        parts: list[Any] = list(space.spaces if entries is None else entries.values())
        columns = flat.split([spaces.flatdim(part) for part in parts], 1)
        values = [structure(*pair) for pair in zip(parts, columns, strict=True)]
        return tuple(values) if entries is None else dict(zip(entries, values, strict=True))
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return flat.reshape(-1, *space.shape)
    return flat


class StructuredEncoder(nn.Module):
    """Calls a module with observations in their structure.

    Args:
        module: maps them to features, see ``encoders.Factory``.
        space: observation space.
    """

    def __init__(self, module: nn.Module, space: spaces.Space[Any]):
        super().__init__()
        self.module, self.space = module, space

    def forward(self, features: Tensor) -> Tensor:
        """Features ``[..., inputs]`` encoded, ``[..., width]``."""
        output: Tensor = self.module(structure(self.space, features.flatten(0, -2)))
        return output.unflatten(0, features.shape[:-1])


def structured_encoder(name: str, space: spaces.Space[Any]) -> tuple[StructuredEncoder, int]:
    """An encoder by the name of its factory, see ``runtime.encoders``, and its width.

    Raises:
        UsageError: there is no such factory, it fails, or its module returns another shape.
    """
    factory = find_encoder(name)
    try:
        encoder = StructuredEncoder(factory(space), space)
        with torch.no_grad():
            shape = list(
                encoder.module(structure(space, torch.zeros(2, spaces.flatdim(space)))).shape
            )
    except Exception as error:
        kind = type(error).__name__
        raise UsageError(f"encoder: {name} raised {kind}: {first_line(error)}") from error
    if len(shape) != 2 or shape[0] != 2:
        raise UsageError(f"encoder: {name} gives {shape} for 2 observations, not [2, width]")
    return encoder, shape[1]
