"""What a blueprint is made of."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from esper.kasmina.stack import Field, Layout

Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The residual branch f of a seed, over stacked environments.

    The last linear map of f must be zero at birth and nothing non-linear may follow it, so that a
    newborn seed changes nothing and yet has a gradient.

    Attributes:
        fields: parameters of one seed, and how they are born.
        forward: ``(parameters {name: [M, *shape]}, x [B, H, W, M, C]) -> f(x) [B, H, W, M, C]``
            of M seeds in M environments. Made of the layers of ``kasmina.ops``, or of any
            differentiable operation that keeps environments apart.
    """

    fields: tuple[Field, ...]
    forward: Callable[[Parameters, Tensor], Tensor]

    @property
    def layout(self) -> Layout:
        """Where each parameter lies in a row of the slot's store."""
        return Layout(self.fields)
