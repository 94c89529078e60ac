"""The structure of a blueprint."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from esper.kasmina.stack import Field, Layout

Parameters = dict[str, Tensor]
"""Stacked parameters ``[M, *shape]`` by name."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The residual branch f of a seed, over stacked environments.

    The last linear map of f must be initialised to zero and must not be followed by a
    non-linearity, so that a new seed does not change the output but receives a gradient.

    Attributes:
        fields: parameters of one seed, with their initial distributions.
        forward: ``(parameters {name: [M, *shape]}, x [B, H, W, M, C]) -> f(x) [B, H, W, M, C]``
            for M seeds in M environments. It may use the layers of ``kasmina.ops`` and any
            differentiable operation that does not mix environments.
    """

    fields: tuple[Field, ...]
    forward: Callable[[Parameters, Tensor], Tensor]

    @property
    def layout(self) -> Layout:
        """Positions of the parameters in a row of the slot's store."""
        return Layout(self.fields)
