"""Blueprints for the slots of fully connected hosts; they process every pixel separately."""

from torch import Tensor

from esper.kasmina.blueprints.blueprint import Blueprint, Parameters
from esper.kasmina.ops import dense, layer_norm
from esper.kasmina.stack import ones, weight, zeros


def mlp_small(channels: int) -> Blueprint:
    """LayerNorm, linear to twice the channels, ReLU, linear back."""
    return _perceptron(channels, 2 * channels)


def mlp(channels: int) -> Blueprint:
    """LayerNorm, linear to four times the channels, ReLU, linear back."""
    return _perceptron(channels, 4 * channels)


# Native twin: hosts/blueprints.h, perceptron.
def _perceptron(channels: int, hidden: int) -> Blueprint:
    def forward(p: Parameters, x: Tensor) -> Tensor:
        y = layer_norm(x, p["norm.weight"], p["norm.bias"])
        wide = dense(y, p["widen.weight"], p["widen.bias"]).relu()
        return dense(wide, p["narrow.weight"])

    fields = (
        ones("norm.weight", channels),
        zeros("norm.bias", channels),
        weight("widen.weight", hidden, channels),
        zeros("widen.bias", hidden),
        zeros("narrow.weight", channels, hidden),
    )
    return Blueprint(fields, forward)
