"""Blueprints for slots that span a layer: new units of it.

Such a seed reads what the layer reads and adds to what the next layer computes before its norm, as
further units of the layer would. The outgoing weights of the new units are 0 at birth.
"""

from dataclasses import dataclass

from torch import Tensor

from esper.kasmina.blueprints.blueprint import Blueprint, Parameters
from esper.kasmina.ops import conv2d, dense, group_norm, max_pool, mean_pool, per_pixel
from esper.kasmina.stack import ones, weight, zeros

ADDED_UNITS = {"conv": {"conv_small": 1, "conv_heavy": 3}, "mlp": {"mlp_small": 1, "mlp": 3}}
"""By family of the slot, the blueprints that can span a layer, and their new units for each unit
that the layer has: it becomes twice or four times as wide."""


@dataclass(frozen=True, slots=True)
class Span:
    """A layer, and the way from it to the next one.

    Attributes:
        block: number of the block whose layer it is.
        inputs: channels that it reads.
        units: channels that it has.
        kernel: size of its kernel and of that of the next layer.
        pool: whether 2x2 max pooling follows.
        last: whether the head follows, which reads the mean over the pixels.
    """

    block: int
    inputs: int
    units: int
    kernel: int = 1
    pool: bool = False
    last: bool = False

    @property
    def outgoing_kernel(self) -> int:
        """Kernel size of the layer that reads the units."""
        return 1 if self.last else self.kernel


# Native twin: hosts/blueprints.h, make_spanning_branch.
def span_blueprint(name: str, span: Span, family: str, outputs: int) -> Blueprint:
    """Units for the layer of ``span``, whose next layer has ``outputs`` channels."""
    units = ADDED_UNITS[family][name] * span.units
    return (_channels if family == "conv" else _features)(span, units, outputs)


def _features(span: Span, units: int, outputs: int) -> Blueprint:
    """Linear map, ReLU, linear map."""

    def forward(p: Parameters, x: Tensor) -> Tensor:
        wide = dense(x, p["widen.weight"], p["widen.bias"]).relu()
        return dense(wide, p["narrow.weight"])

    fields = (
        weight("widen.weight", units, span.inputs),
        zeros("widen.bias", units),
        zeros("narrow.weight", outputs, units),
    )
    return Blueprint(fields, forward)


def _channels(span: Span, units: int, outputs: int) -> Blueprint:
    """Convolution, GroupNorm, ReLU, the pools between the layers, convolution."""
    kernel, outgoing = span.kernel, span.outgoing_kernel

    def forward(p: Parameters, x: Tensor) -> Tensor:
        wide = conv2d(x, p["widen.weight"])
        wide = group_norm(wide, p["norm.weight"], p["norm.bias"], rectify=True)
        return conv2d(towards_next(span, wide), p["narrow.weight"])

    fields = (
        weight("widen.weight", units, span.inputs, kernel, kernel),
        ones("norm.weight", units),
        zeros("norm.bias", units),
        zeros("narrow.weight", outputs, units, outgoing, outgoing),
    )
    return Blueprint(fields, forward)


def towards_next(span: Span, x: Tensor) -> Tensor:
    """``x [B, H, W, N, C]`` behind the layer, as the next layer reads it."""
    x = max_pool(x) if span.pool else x
    return per_pixel(mean_pool(x)) if span.last else x
