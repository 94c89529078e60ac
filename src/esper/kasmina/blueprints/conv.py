"""Blueprints for convolutional slots."""

from torch import Tensor

from esper.kasmina.blueprints.blueprint import Blueprint, LastLayer, Parameters
from esper.kasmina.ops import conv2d, depthwise_conv2d, group_norm, linear, mean_pool, per_pixel
from esper.kasmina.stack import Field, ones, weight, zeros


def _norm_fields(channels: int) -> tuple[Field, Field]:
    return ones("norm.weight", channels), zeros("norm.bias", channels)


def _norm(p: Parameters, x: Tensor, rectify: bool = False) -> Tensor:
    return group_norm(x, p["norm.weight"], p["norm.bias"], rectify)


# Native twin: hosts/blueprints.h, ScaledNorm.
def norm(channels: int) -> Blueprint:
    """``tanh(s) (GroupNorm(x) - x)`` with a learned scalar s, initially 0."""

    def forward(p: Parameters, x: Tensor) -> Tensor:
        return p["scale"].tanh()[:, None] * (_norm(p, x) - x)

    return Blueprint((zeros("scale"), *_norm_fields(channels)), forward, LastLayer.NORM)


# Native twin: hosts/blueprints.h, Attention.
def attention(channels: int) -> Blueprint:
    """Squeeze-and-excitation with reduction 4: ``x * (W2 relu(W1 mean(x)) + b)``."""
    width = max(1, channels // 4)

    def forward(p: Parameters, x: Tensor) -> Tensor:
        hidden = linear(mean_pool(x), p["squeeze.weight"]).relu()
        return x * per_pixel(linear(hidden, p["excite.weight"], p["excite.bias"]))

    fields = (
        weight("squeeze.weight", width, channels),
        zeros("excite.weight", channels, width),
        zeros("excite.bias", channels),
    )
    return Blueprint(fields, forward, LastLayer.SCALE)


def conv_small(channels: int) -> Blueprint:
    """GroupNorm, ReLU, 1x1 convolution."""

    def forward(p: Parameters, x: Tensor) -> Tensor:
        return conv2d(_norm(p, x, rectify=True), p["conv.weight"])

    fields = (*_norm_fields(channels), zeros("conv.weight", channels, channels, 1, 1))
    return Blueprint(fields, forward, LastLayer.POINTWISE)


def conv_light(channels: int) -> Blueprint:
    """GroupNorm, ReLU, 3x3 convolution."""

    def forward(p: Parameters, x: Tensor) -> Tensor:
        return conv2d(_norm(p, x, rectify=True), p["conv.weight"])

    fields = (*_norm_fields(channels), zeros("conv.weight", channels, channels, 3, 3))
    return Blueprint(fields, forward, LastLayer.SPATIAL)


def conv_heavy(channels: int) -> Blueprint:
    """3x3 convolution to 4 C channels, GroupNorm, ReLU, 1x1 convolution back."""
    wide = 4 * channels

    def forward(p: Parameters, x: Tensor) -> Tensor:
        return conv2d(_norm(p, conv2d(x, p["widen.weight"]), rectify=True), p["narrow.weight"])

    fields = (
        weight("widen.weight", wide, channels, 3, 3),
        *_norm_fields(wide),
        zeros("narrow.weight", channels, wide, 1, 1),
    )
    return Blueprint(fields, forward)


def depthwise(channels: int) -> Blueprint:
    """Depthwise 3x3 convolution, GroupNorm, ReLU, 1x1 convolution."""

    def forward(p: Parameters, x: Tensor) -> Tensor:
        y = depthwise_conv2d(x, p["depthwise.weight"])
        return conv2d(_norm(p, y, rectify=True), p["pointwise.weight"])

    fields = (
        weight("depthwise.weight", channels, 1, 3, 3),
        *_norm_fields(channels),
        zeros("pointwise.weight", channels, channels, 1, 1),
    )
    return Blueprint(fields, forward)


def bottleneck(channels: int) -> Blueprint:
    """GroupNorm, 1x1 convolution to max(8, C / 4) channels, ReLU, 3x3, ReLU, 1x1 back."""
    width = max(8, channels // 4)

    def forward(p: Parameters, x: Tensor) -> Tensor:
        down = conv2d(_norm(p, x), p["down.weight"], rectify=True)
        return conv2d(conv2d(down, p["conv.weight"], rectify=True), p["up.weight"])

    fields = (
        *_norm_fields(channels),
        weight("down.weight", width, channels, 1, 1),
        weight("conv.weight", width, width, 3, 3),
        zeros("up.weight", channels, width, 1, 1),
    )
    return Blueprint(fields, forward)
