"""The structure of a blueprint."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from esper.kasmina.stack import Field, Layout

Parameters = dict[str, Tensor]
"""Stacked parameters ``[M, *shape]`` by name."""


class LastLayer(IntEnum):
    """What the last linear map of a newborn seed multiplies, the only map that has a gradient."""

    SCALE = 0
    """The activation x itself, with one factor per channel."""
    NORM = 1
    """The difference between the normalised activation and x, with one factor for all channels."""
    LINEAR = 2
    """The activation x at each pixel, through a linear map."""
    POINTWISE = 3
    """The normalised activation at each pixel."""
    SPATIAL = 4
    """The normalised activation around each pixel; in a sequence at all earlier positions."""
    HIDDEN = 5
    """The outputs of hidden units with random weights."""


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
        last_layer: what the last linear map of f multiplies at birth; selects the feature that
            estimates what such a seed would gain, see ``kasmina.newborns``.
    """

    fields: tuple[Field, ...]
    forward: Callable[[Parameters, Tensor], Tensor]
    last_layer: LastLayer = LastLayer.HIDDEN

    @property
    def layout(self) -> Layout:
        """Positions of the parameters in a row of the slot's store."""
        return Layout(self.fields)
