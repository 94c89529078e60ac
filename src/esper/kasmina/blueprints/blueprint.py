"""The structure of a blueprint, and how a seed of it is combined with the activation."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from esper.kasmina.ops import dense, linear, mean_pool, per_pixel
from esper.kasmina.stack import Field, weight, zeros
from esper.leyline.actions import Style

Parameters = dict[str, Tensor]
"""Stacked parameters ``[M, *shape]`` by name."""
Forward = Callable[[Parameters, Tensor], Tensor]
"""See ``Blueprint.forward``."""


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
            estimates how much such a seed would lower the loss, see ``kasmina.newborns``.
    """

    fields: tuple[Field, ...]
    forward: Forward
    last_layer: LastLayer = LastLayer.HIDDEN


class Form(IntEnum):
    """How a branch f is combined with the activation x."""

    ADD = 0
    """``x + alpha f(x)``."""
    MULTIPLY = 1
    """``x (1 + alpha tanh f(x))``."""
    GATE = 2
    """``x + alpha g(x) f(x)`` with a learned g in (0, 1)."""


FORM_OF_STYLE = {
    Style.LINEAR_ADD: Form.ADD,
    Style.LINEAR_MULTIPLY: Form.MULTIPLY,
    Style.SIGMOID_ADD: Form.ADD,
    Style.GATED_GATE: Form.GATE,
}


def branch(
    forward: Forward,
    form: int,
    family: str,
    parameters: Parameters,
    x: Tensor,
    source: Tensor | None = None,
) -> Tensor:
    """The term that seeds of one kind add to their ``x [B, H, W, M, C]`` at alpha 1.

    Args:
        forward: that of the blueprint.
        form: the ``Form``.
        family: family of the slot.
        parameters: of the blueprint and, for GATE, of the gate.
        x: the activation.
        source: what f reads, in a slot that spans a layer; ``x`` if None.
    """
    f = forward(parameters, x if source is None else source)
    if form == Form.MULTIPLY:
        return x * f.tanh()
    if form == Form.GATE:
        return gate_values(family, parameters, x) * f
    return f


def gate_fields(channels: int) -> tuple[Field, ...]:
    """Parameters of the gate of GATE: C to max(8, C / 4) channels, ReLU, to 1 channel."""
    hidden = max(8, channels // 4)
    return (
        weight("gate.hidden.weight", hidden, channels),
        zeros("gate.hidden.bias", hidden),
        weight("gate.out.weight", 1, hidden),
        zeros("gate.out.bias", 1),
    )


def gate_values(family: str, p: Parameters, x: Tensor) -> Tensor:
    """The gate of each image and seed, in (0, 1), ``[B, 1, 1, M, 1]``.

    It reads the mean over the pixels. In a sequence every position has its own gate, ``[B, H, W, M,
    1]``: a mean over positions would leak future bytes into earlier positions.
    """
    if family == "sequence":
        wide = dense(x, p["gate.hidden.weight"], p["gate.hidden.bias"]).relu()
        return dense(wide, p["gate.out.weight"], p["gate.out.bias"]).sigmoid()
    hidden = linear(mean_pool(x), p["gate.hidden.weight"], p["gate.hidden.bias"]).relu()
    return per_pixel(linear(hidden, p["gate.out.weight"], p["gate.out.bias"]).sigmoid())
