"""First-order estimates of how much a newborn seed of each kind would lower the loss in a slot.

A newborn seed adds ``W phi(x)`` to the activation x with W = 0, so only W has a gradient. It is
``sum g phi(x)^T`` over all images and pixels, where g is the gradient of the loss with respect to
the slot's output. A step of gradient descent with rate r lowers the loss by r times its squared
norm, to first order. That norm is computed here without building any seed.

Sources: the norm of the gradient of new outgoing weights is what GradMax maximises (Evci et al.,
"GradMax: growing neural networks using gradient information", ICLR 2022) and how Firefly ranks new
units (Wu et al., "Firefly neural architecture descent", NeurIPS 2020); that g is the change that a
layer lacks is due to TINY (Verbockhaven et al., "Growing tiny networks", TMLR 2024).
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

from esper.kasmina import ops
from esper.kasmina.blueprints import LastLayer, Span, towards_next
from esper.kasmina.rng import Purpose, uniform
from esper.kasmina.slots import SlotSpec

HIDDEN_UNITS = 4
"""Hidden units with random weights, from which all wider blueprints are estimated."""
CHOSEN_ROWS = 4
"""Sums of matrices include about this many rows of pixels, at equal distances. Gradients of
adjacent rows are so similar that this costs less accuracy than fewer images would."""


def reference_weights(slot: SlotSpec) -> tuple[Tensor, ...]:
    """Input weights of the hidden units, float64 ``[HIDDEN_UNITS, C, k, k]``; never write to them.

    Where a slot spans several layers, the units of each read those of the one before.

    They are distributed like those of a newborn seed, k is 3 in convolutional slots and else 1, or
    that of the layer that the slot spans.
    All environments and steps share them, so that an estimate changes only with its host.
    """
    if slot.span is not None:
        further = (_reference_weights(HIDDEN_UNITS, 1),) * len(slot.span.further)
        return _reference_weights(slot.span.inputs, slot.span.kernel), *further
    return (_reference_weights(slot.channels, 3 if slot.family == "conv" else 1),)


@cache
def _reference_weights(channels: int, kernel: int) -> Tensor:
    shape = HIDDEN_UNITS, channels, kernel, kernel
    count = HIDDEN_UNITS * channels * kernel**2
    bound = (channels * kernel**2) ** -0.5
    with torch.inference_mode(False):
        stream = torch.zeros(1, dtype=torch.long)
        draws = uniform(0, stream, Purpose.NEWBORN, 0, 0, count, dtype=torch.float64)
        return (bound * (2.0 * draws - 1.0)).view(shape)


@cache
def _weights_on(slot: SlotSpec, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """``reference_weights`` on a device, which are copied there once."""
    with torch.inference_mode(False):
        return tuple(each.to(device, dtype) for each in reference_weights(slot))


# Native twin: hosts/newborns.h, Newborns.
@torch.no_grad()
def gradient_norms(
    slot: SlotSpec, x: Tensor, gradient: Tensor, source: Tensor | None = None
) -> Tensor:
    """Gradient norm of the last layer of a newborn seed at alpha 1, by ``LastLayer``.

    The norm is exact for ``SCALE`` (without the random part of attention), ``NORM``, ``POINTWISE``
    and ``SPATIAL`` of convolutional slots. ``LINEAR`` is the norm for a map of full rank.
    ``SPATIAL`` of a sequence is that of attention that weights all earlier positions equally.
    ``HIDDEN`` is that of ``HIDDEN_UNITS`` units. From ``LINEAR`` on, only the gradient of
    ``chosen_rows`` counts, times height / chosen rows.

    Args:
        slot: the slot.
        x: activation at the slot, ``[B, H, W, N, C]``.
        gradient: gradient of the loss with respect to the slot's output, ``[B, H, W, N, C]``.
        source: input of the layer that the slot spans, ``[B, H, W, N or 1, C]``.

    Returns:
        ``[N, len(LastLayer)]``, NaN where no blueprint of the slot has such a layer.
    """
    layers, conv = slot.last_layers, slot.family == "conv"
    norms: dict[LastLayer, Tensor] = {}
    unknown = x.new_full((x.shape[3],), float("nan"))
    if slot.span is not None and source is not None:
        unit_norm = _unit_norm(slot, slot.span, gradient, source)
        return torch.stack([unit_norm if k in layers else unknown for k in LastLayer], 1)
    if LastLayer.SCALE in layers:
        norms[LastLayer.SCALE] = _norm((gradient * x).sum((0, 1, 2)))
    height = x.shape[1]
    rows = chosen_rows(height)
    row_gradient = gradient[:, rows]
    row_gradient = row_gradient * (height / row_gradient.shape[1])
    if LastLayer.LINEAR in layers:
        norms[LastLayer.LINEAR] = _norm(_correlation(row_gradient, x[:, rows]))
    normal = _norm_of(x, conv)
    if LastLayer.NORM in layers:
        norms[LastLayer.NORM] = per_environment(gradient * (normal - x)).abs()
    read = normal.relu() if conv else normal
    if LastLayer.SPATIAL in layers and conv:
        weights = _correlation_3x3(_all_rows(row_gradient, rows, height), read)
        norms[LastLayer.SPATIAL] = _norm(weights)
        norms[LastLayer.POINTWISE] = _norm(weights[..., 1, 1])
    else:
        if LastLayer.POINTWISE in layers:
            norms[LastLayer.POINTWISE] = _norm(_correlation(row_gradient, read[:, rows]))
        if LastLayer.SPATIAL in layers:
            # The squared norm averaged over random value weights, whose variance is 1 / (3 C).
            before = _earlier_mean(read)[:, rows]
            norms[LastLayer.SPATIAL] = _norm(_correlation(row_gradient, before)) / 3.0**0.5
    if LastLayer.HIDDEN in layers:
        hidden = _hidden(slot, x, normal, rows)
        norms[LastLayer.HIDDEN] = _norm(_correlation(row_gradient, hidden))
    return torch.stack([norms.get(k, unknown) if k in layers else unknown for k in LastLayer], 1)


def per_environment(x: Tensor) -> Tensor:
    """Sum of ``x [B, H, W, N, C]`` for each environment, ``[N]``."""
    # In two steps torch 2.13 needs a quarter of the time.
    return x.sum((0, 1, 2)).sum(1)


def chosen_rows(height: int) -> slice:
    """The rows of pixels that enter the sums of matrices."""
    step = max(1, height // CHOSEN_ROWS)
    return slice(step // 2, None, step)


def _norm_of(x: Tensor, conv: bool) -> Tensor:
    ones = x.new_ones(x.shape[3:])
    zeros = torch.zeros_like(ones)
    return ops.group_norm(x, ones, zeros) if conv else ops.layer_norm(x, ones, zeros)


def _all_rows(row_gradient: Tensor, rows: slice, height: int) -> Tensor:
    """The chosen rows at their places among ``height`` rows, 0 elsewhere."""
    batch, _, *axes = row_gradient.shape
    gradient = row_gradient.new_zeros(batch, height, *axes)
    gradient[:, rows] = row_gradient
    return gradient


def _hidden(slot: SlotSpec, x: Tensor, normal: Tensor, rows: slice) -> Tensor:
    """The outputs of the hidden units in ``rows``, ``[B, rows, W, N, HIDDEN_UNITS]``."""
    conv, count = slot.family == "conv", x.shape[3]
    (shared,) = _weights_on(slot, x.dtype, x.device)
    weights = shared.expand(count, -1, -1, -1, -1)
    if conv:
        units = ops.conv2d(x, weights.contiguous())[:, rows].contiguous()
        return _norm_of(units, conv).relu()
    return ops.dense(normal[:, rows], weights[..., 0, 0]).relu()


# Native twin: hosts/newborns.h, measure_units.
def _unit_norm(slot: SlotSpec, span: Span, gradient: Tensor, source: Tensor) -> Tensor:
    """Gradient norm of the outgoing weights of units for the layer of the slot, ``[N]``."""
    count = gradient.shape[3]
    shared = _weights_on(slot, gradient.dtype, gradient.device)
    layers = [each.expand(count, -1, -1, -1, -1) for each in shared]
    x = source.expand(-1, -1, -1, count, -1).contiguous()
    if slot.family != "conv":
        for weights in layers:
            x = _norm_of(ops.dense(x, weights[..., 0, 0]), True).relu()
        return _norm(_correlation(gradient, x))
    units = towards_next(span, _norm_of(ops.conv2d(x, layers[0].contiguous()), True).relu())
    if span.outgoing_kernel == 1:
        return _norm(_correlation(gradient, units))
    return _norm(_correlation_3x3(gradient, units))


def _earlier_mean(x: Tensor) -> Tensor:
    """Mean of ``x [B, H, W, N, C]`` over each pixel and all earlier ones."""
    pixels = x.flatten(1, 2)
    counts = torch.arange(1, pixels.shape[1] + 1, device=x.device).to(x.dtype)
    return (pixels.cumsum(1) / counts[:, None, None]).view_as(x)


def _correlation(gradient: Tensor, x: Tensor) -> Tensor:
    """Sum over images and pixels of ``gradient x^T`` of each environment, ``[N, C, C_in]``."""
    return gradient.flatten(0, 2).permute(1, 2, 0) @ x.flatten(0, 2).transpose(0, 1)


def _correlation_3x3(gradient: Tensor, x: Tensor) -> Tensor:
    """Gradient of the weights of a 3x3 convolution of ``x``, ``[N, C, C_in, 3, 3]``."""
    if x.device.type == "cuda":
        return ops.conv2d_weight_gradient(x, gradient.flatten(0, 2), 3)
    count, channels = gradient.shape[3:]
    shape = count * channels, x.shape[4], 3, 3
    images, outputs = ops.to_images(x), ops.to_images(gradient)
    weights = conv2d_weight(images, shape, outputs, padding=1, groups=count)
    return weights.unflatten(0, (count, channels))


def _norm(x: Tensor) -> Tensor:
    """Norm of each row, ``[N]``."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1)
