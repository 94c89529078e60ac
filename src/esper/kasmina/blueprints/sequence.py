"""Blueprints for the slots of transformers, in which no position sees a later one."""

from torch import Tensor

from esper.kasmina.blueprints.blueprint import Blueprint, LastLayer, Parameters
from esper.kasmina.ops import causal_attention, dense, layer_norm
from esper.kasmina.stack import ones, weight, zeros


def sequence_norm(channels: int) -> Blueprint:
    """``tanh(s) (LayerNorm(x) - x)`` with a learned scalar s, initially 0."""

    def forward(p: Parameters, x: Tensor) -> Tensor:
        y = layer_norm(x, p["norm.weight"], p["norm.bias"])
        return p["scale"].tanh()[:, None] * (y - x)

    fields = (zeros("scale"), ones("norm.weight", channels), zeros("norm.bias", channels))
    return Blueprint(fields, forward, LastLayer.NORM)


def lora(channels: int) -> Blueprint:
    """A linear map of rank 8 (Hu et al., "LoRA: low-rank adaptation of large language models",
    2021)."""
    return _low_rank(channels, 8)


def lora_large(channels: int) -> Blueprint:
    """A linear map of rank 32, see ``lora``."""
    return _low_rank(channels, 32)


# Native twin: hosts/blueprints.h, sequence_attention.
def sequence_attention(channels: int) -> Blueprint:
    """LayerNorm, causal attention with up to 4 heads, linear map."""
    heads = next(count for count in (4, 2, 1) if channels % count == 0)

    def forward(p: Parameters, x: Tensor) -> Tensor:
        y = layer_norm(x, p["norm.weight"], p["norm.bias"])
        values = causal_attention(dense(y, p["joint.weight"]), heads)
        return dense(values, p["out.weight"])

    fields = (
        ones("norm.weight", channels),
        zeros("norm.bias", channels),
        weight("joint.weight", 3 * channels, channels),
        zeros("out.weight", channels, channels),
    )
    return Blueprint(fields, forward, LastLayer.SPATIAL)


def _low_rank(channels: int, rank: int) -> Blueprint:
    def forward(p: Parameters, x: Tensor) -> Tensor:
        return dense(dense(x, p["down.weight"]), p["up.weight"])

    fields = (weight("down.weight", rank, channels), zeros("up.weight", channels, rank))
    return Blueprint(fields, forward, LastLayer.LINEAR)
