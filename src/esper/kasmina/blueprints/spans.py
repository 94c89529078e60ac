"""Blueprints for slots that span a layer: new units of it, or of it and the layers behind it.

Such a seed reads what the layer reads and adds to what the next layer computes before its norm, as
further units of the layer would. The outgoing weights of the new units are 0 at birth. New units of
several layers read only each other, and not those that are there.
"""

from dataclasses import dataclass

from torch import Tensor

from esper.kasmina.blueprints.blueprint import Blueprint, Parameters
from esper.kasmina.ops import conv2d, dense, group_norm, max_pool, mean_pool, per_pixel
from esper.kasmina.stack import Field, ones, weight, zeros

ADDED_UNITS = {"conv": {"conv_small": 1, "conv_heavy": 3}, "mlp": {"mlp_small": 1, "mlp": 3}}
"""By family of the slot, the blueprints that can span a layer, and their new units for each unit
that the layer has: it becomes twice or four times as wide, several at once four or eight times."""


@dataclass(frozen=True, slots=True)
class Span:
    """A layer, and the way from it to the next one.

    Attributes:
        block: number of the block whose layer it is.
        inputs: channels that it reads.
        units: channels that it has.
        further: channels of the layers behind it that are spanned with it.
        kernel: size of its kernel and of that of the next layer.
        pool: whether 2x2 max pooling follows.
        last: whether the head follows that reads the mean over the pixels of a convolutional host.
    """

    block: int
    inputs: int
    units: int
    further: tuple[int, ...] = ()
    kernel: int = 1
    pool: bool = False
    last: bool = False

    @property
    def outgoing_kernel(self) -> int:
        """Kernel size of the layer that reads the units."""
        return 1 if self.last else self.kernel


# Native twin: hosts/blueprints.h, make_spanning_branch.
def span_blueprint(name: str, span: Span, family: str, outputs: int) -> Blueprint:
    """Units for the layers of ``span``, whose next layer has ``outputs`` channels.

    Convolution or linear map, GroupNorm and ReLU for each layer; the pools between the layers;
    convolution or linear map. A norm that reads other images would let an isolated seed be seen.
    """
    conv, factor = family == "conv", ADDED_UNITS[family][name]
    multiply = conv2d if conv else dense
    kernel, outgoing = (
        (size, size) if conv else () for size in (span.kernel, span.outgoing_kernel)
    )
    factor = 2 * factor + 1 if span.further else factor
    layers = [("", factor * span.units)]
    layers += [(str(i), factor * units) for i, units in enumerate(span.further, 1)]

    def forward(p: Parameters, x: Tensor) -> Tensor:
        for layer, _ in layers:
            x = multiply(x, p[f"widen{layer}.weight"])
            x = group_norm(x, p[f"norm{layer}.weight"], p[f"norm{layer}.bias"], rectify=True)
        return multiply(towards_next(span, x), p["narrow.weight"])

    fields, inputs = list[Field](), span.inputs
    for layer, units in layers:
        fields.append(weight(f"widen{layer}.weight", units, inputs, *kernel))
        fields += [ones(f"norm{layer}.weight", units), zeros(f"norm{layer}.bias", units)]
        inputs = units
    return Blueprint((*fields, zeros("narrow.weight", outputs, inputs, *outgoing)), forward)


def towards_next(span: Span, x: Tensor) -> Tensor:
    """``x [B, H, W, N, C]`` behind the layer, as the next layer reads it."""
    x = max_pool(x) if span.pool else x
    return per_pixel(mean_pool(x)) if span.last else x
