"""Layers over stacked networks.

Activations are contiguous ``[B, H, W, N, C]`` (batch, height, width, environment, channel).
Because environment and channel are adjacent, this is exactly the channels_last image
``[B, N*C, H, W]``: one grouped convolution, batch norm or group norm processes every environment
separately, and selecting environments is an index on one axis. Parameters are ``[N, ...]``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPSILON = 1e-5
ATTENTION_BLOCKS = 65_535
"""Most sequences times heads of one call of attention: CUDA launches no more blocks in a grid."""


_LAYERS: ContextVar[Any] = ContextVar("layers", default=None)


@contextmanager
def computed_by(layers: Any) -> Iterator[None]:
    """Let the functions of a module replace those of the same names here, but for float64."""
    token = _LAYERS.set(layers)
    try:
        yield
    finally:
        _LAYERS.reset(token)


def _replacement(x: Tensor) -> Any:
    return None if x.dtype == torch.float64 else _LAYERS.get()


def to_images(x: Tensor) -> Tensor:
    """View of ``[B, H, W, N, C]`` as channels_last images ``[B, N*C, H, W]``."""
    return x.flatten(3).permute(0, 3, 1, 2)


def from_images(images: Tensor, environments: int, rectify: bool = False) -> Tensor:
    """The inverse of ``to_images``, after a ReLU if ``rectify``.

    The ReLU works in place: the backward pass of norms and convolutions needs their input, not
    their output. It precedes the view because autograd copies a view that is modified in place.
    """
    if rectify:
        images = torch.relu_(images)
    return images.permute(0, 2, 3, 1).unflatten(3, (environments, -1)).contiguous()


# Native twin: hosts/convolution.h, convolve.
def conv2d(x: Tensor, weight: Tensor, rectify: bool = False) -> Tensor:
    """Same-size convolution of each environment with its own kernel, then ReLU if ``rectify``.

    Args:
        x: ``[B, H, W, N, C_in]``, or ``[B, H, W, 1, C_in]`` for one input that all environments
            share.
        weight: ``[N, C_out, C_in, k, k]`` with k odd.

    Returns:
        ``[B, H, W, N, C_out]``.
    """
    outputs = weight.shape[1]
    if x.shape[3] > 1 and (layers := _replacement(x)):
        return layers.conv2d(x, weight, rectify)
    if x.shape[3] > 1 and x.device.type == "cuda":
        return conv2d_by_products(x, weight, rectify)
    if x.shape[3] > 1 and _cpu_dtype(x) == torch.bfloat16:
        x, weight = _padded_to_even(x, weight)
    images = _convolution(to_images(x), weight.flatten(0, 1), groups=x.shape[3])
    out = from_images(images, len(weight), rectify)
    return out if out.shape[4] == outputs else out[..., :outputs].contiguous()


def conv2d_by_products(x: Tensor, weight: Tensor, rectify: bool = False) -> Tensor:
    """``conv2d`` as one batch of matrix products over the neighbourhoods of the pixels.

    On a GPU, torch 2.11 launches kernels for each group of a grouped convolution: on an H100 a
    minibatch of 1,024 hosts took 4,703 launches. Here their number does not depend on N.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    out: Tensor = _ProductConvolution.apply(x, weight)
    return (torch.relu_(out) if rectify else out).unflatten(0, x.shape[:3])


class _ProductConvolution(torch.autograd.Function):
    """``[B H W, N, C_out]`` from ``x [B, H, W, N, C_in]`` and ``weight [N, C_out, C_in, k, k]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product_convolution(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            outputs = gradient.unflatten(0, x.shape[:3])
            of_x = _product_convolution(outputs, weight.flip(3, 4).transpose(1, 2)).view_as(x)
        if ctx.needs_input_grad[1]:
            of_weight = conv2d_weight_gradient(x, gradient, weight.shape[-1])
        return of_x, of_weight


def _product_convolution(x: Tensor, weight: Tensor) -> Tensor:
    rows = _neighbourhoods(x, weight.shape[-1])
    out = rows.transpose(0, 1) @ weight.permute(0, 3, 4, 2, 1).flatten(1, 3)
    # Not contiguous(), which may return a view: a ReLU in place would not reach the tensor.
    return out.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def conv2d_weight_gradient(x: Tensor, gradient: Tensor, size: int) -> Tensor:
    """Gradient of the weights of ``conv2d`` with kernels of ``size``, ``[N, C_out, C_in, k, k]``.

    Args:
        x: the input, ``[B, H, W, N, C_in]``.
        gradient: of the output, ``[B H W, N, C_out]``.
        size: k.
    """
    if layers := _replacement(x):
        return layers.conv2d_weight_gradient(x, gradient, size)
    rows = _neighbourhoods(x, size).transpose(0, 1)
    out = gradient.permute(1, 2, 0) @ rows
    return out.unflatten(2, (size, size, -1)).permute(0, 1, 4, 2, 3)


def _neighbourhoods(x: Tensor, size: int) -> Tensor:
    """The pixels around each pixel of ``[B, H, W, N, C]``, ``[B H W, N, k k C]``; 0 outside.

    Channels come last, as in the input: copies of whole pixels use the memory better.
    """
    if size == 1:
        return x.flatten(0, 2)
    around = size // 2
    padded = F.pad(x, (0, 0, 0, 0, around, around, around, around))
    around_each = padded.unfold(1, size, 1).unfold(2, size, 1).permute(0, 1, 2, 3, 5, 6, 4)
    return around_each.flatten(4).flatten(0, 2)


# Native twin: hosts/convolution.h, convolve_depthwise.
def depthwise_conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """Same-size convolution of each channel with its own kernel, ``weight [N, C, 1, k, k]``."""
    channels = weight.shape[0] * weight.shape[1]
    return from_images(_convolution(to_images(x), weight.flatten(0, 1), channels), len(weight))


def _convolution(images: Tensor, weight: Tensor, groups: int) -> Tensor:
    if _cpu_dtype(images) == torch.float16:
        half: Tensor = _HalfConvolution.apply(images.half(), weight.half(), groups)
        return half
    return F.conv2d(images, weight, padding=weight.shape[-1] // 2, groups=groups)


def _cpu_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which a CPU convolves ``x``, considering autocast; None on other devices."""
    if x.device.type != "cpu":
        return None
    if torch.is_autocast_enabled("cpu") and x.dtype != torch.float64:
        return torch.get_autocast_dtype("cpu")
    return x.dtype


def _padded_to_even(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` and ``weight`` padded with zeros to even numbers of input and output channels.

    oneDNN's grouped bfloat16 convolution processes channels in pairs. With an odd number, the last
    channel is paired with the first channel of the next environment, which is multiplied by a zero
    weight; if that channel is NaN, so is the product.
    """
    more_out, more_in = weight.shape[1] % 2, weight.shape[2] % 2
    return F.pad(x, (0, more_in)), F.pad(weight, (0, 0, 0, 0, 0, more_in, 0, more_out))


class _HalfConvolution(torch.autograd.Function):
    """A float16 convolution on a CPU whose backward pass accumulates in float32, as on a GPU.

    The backward pass of torch 2.13 is a reference implementation, too slow for training.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, groups: int) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.groups = groups
        return F.conv2d(images, weight, padding=weight.shape[-1] // 2, groups=groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        images, weight = (part.float() for part in ctx.saved_tensors)
        both = torch.ops.aten.convolution_backward(
            gradient.float(), images, weight, bias_sizes=None, stride=[1, 1],
            padding=[weight.shape[-1] // 2] * 2, dilation=[1, 1], transposed=False,
            output_padding=[0, 0], groups=ctx.groups,
            output_mask=[ctx.needs_input_grad[0], True, False],
        )  # fmt: skip
        of_images, of_weight, _ = both
        return (None if of_images is None else of_images.half()), of_weight.half(), None


# Native twin: hosts/normalisation.h, BatchNorm.
def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    training: bool,
    rectify: bool = False,
    momentum: float = 0.1,
) -> Tensor:
    """BatchNorm of each environment, then ReLU if ``rectify``.

    In training, the running statistics ``[N, C]`` are updated in place.
    """
    if (training or not torch.is_grad_enabled()) and (layers := _replacement(x)):
        vectors = weight, bias, running_mean, running_variance
        return layers.batch_norm(x, *vectors, training, rectify, momentum)
    # Copies: the rows of the stores are not contiguous, and torch 2.13's channels_last backward
    # treats a strided weight (flatten of [N, 1]) as contiguous.
    mean, variance = running_mean.flatten().clone(), running_variance.flatten().clone()
    images = F.batch_norm(
        to_images(x), mean, variance, weight.flatten().contiguous(), bias.flatten().contiguous(),
        training, momentum, NORM_EPSILON,
    )  # fmt: skip
    if training:
        with torch.no_grad():
            running_mean.copy_(mean.view_as(running_mean))
            running_variance.copy_(variance.view_as(running_variance))
    return from_images(images, x.shape[3], rectify)


# Native twin: hosts/normalisation.h, group_norm.
def group_norm(x: Tensor, weight: Tensor, bias: Tensor, rectify: bool = False) -> Tensor:
    """GroupNorm of each environment, then ReLU if ``rectify``; ``weight``, ``bias`` ``[N, C]``."""
    images = to_images(x)
    if torch.is_grad_enabled() and not x.requires_grad:
        # torch 2.13's backward pass crashes on a channels_last CPU input without a gradient.
        # contiguous() would not help: an image of one channel or pixel counts as both formats.
        images = images.clone(memory_format=torch.contiguous_format)
    groups = len(weight) * norm_groups(x.shape[-1])
    flat_weight, flat_bias = weight.flatten().contiguous(), bias.flatten().contiguous()
    images = F.group_norm(images, groups, flat_weight, flat_bias, NORM_EPSILON)
    return from_images(images, x.shape[3], rectify)


# Native twin: hosts/normalisation.h, LayerNorm.
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm of each pixel over its channels, with ``weight`` and ``bias`` ``[N, C]``."""
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPSILON) * weight + bias


# Native twin: hosts/normalisation.h, norm_groups.
def norm_groups(channels: int) -> int:
    """Largest power of two up to 32 that divides channels into groups of at least 16, else 1."""
    counts = (count for count in (32, 16, 8, 4, 2) if channels % count == 0)
    return next((count for count in counts if channels // count >= 16), 1)


# Native twin: hosts/pooling.h, MaxPool.
def max_pool(x: Tensor) -> Tensor:
    """2x2 max pooling of ``[B, H, W, N, C]``."""
    if layers := _replacement(x):
        return layers.max_pool(x)
    return from_images(F.max_pool2d(to_images(x), 2), x.shape[3])


# Native twin: hosts/pooling.h, MeanPool.
def mean_pool(x: Tensor) -> Tensor:
    """Mean over the pixels, ``[N, B, C]``: environment first, as ``linear`` expects."""
    return _MeanPool.apply(x)


class _MeanPool(torch.autograd.Function):
    """Mean over the pixels, with a gradient in the memory layout of the activations.

    The gradient of ``mean`` and transpose has another layout, with which the rest of the backward
    pass would access memory with a stride and run at a third of the speed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        # The sum over an image may overflow in half precision; the mean does not.
        total = x.sum((1, 2), dtype=torch.float32 if x.dtype == torch.float16 else x.dtype)
        return (total / (x.shape[1] * x.shape[2])).to(x.dtype).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        pixels = ctx.shape[1] * ctx.shape[2]
        per_image = (gradient.transpose(0, 1) / pixels).contiguous()
        return per_image[:, None, None].expand(ctx.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear map of ``x [N, B, in]`` by ``weight [N, out, in]`` and ``bias [N, out]``."""
    columns = weight.transpose(1, 2)
    return x @ columns if bias is None else torch.baddbmm(bias[:, None], x, columns)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear map of each pixel's channels with the weights of its environment.

    Args:
        x: ``[B, H, W, N, in]``, or ``[B, H, W, 1, in]`` for one input that all environments share.
        weight: ``[N, out, in]``.
        bias: ``[N, out]``.

    Returns:
        ``[B, H, W, N, out]``.
    """
    pixels = x.flatten(0, 2)
    if x.shape[3] == 1:
        joint = None if bias is None else bias.flatten()
        out = F.linear(pixels[:, 0], weight.flatten(0, 1), joint).unflatten(1, weight.shape[:2])
    else:
        out = linear(pixels.transpose(0, 1), weight, bias).transpose(0, 1)
    return out.contiguous().unflatten(0, x.shape[:3])


# Native twin: hosts/transformer.h, Embedding.
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Look up rows in the embedding table of each environment.

    Args:
        indices: int64 ``[B, H, W, N]``, or ``[B, H, W, 1]`` for indices that all environments
            share.
        weight: ``[N, rows, C]``.

    Returns:
        ``[B, H, W, N, C]``.
    """
    environments, rows, _ = weight.shape
    begins = torch.arange(environments, device=indices.device) * rows
    return F.embedding(indices + begins, weight.flatten(0, 1))


# Native twin: hosts/attention.h, CausalAttention.
def causal_attention(joint: Tensor, heads: int) -> Tensor:
    """Scaled dot-product attention of each pixel to itself and to all earlier pixels.

    Source: Vaswani et al., "Attention is all you need", 2017. Environments are part of the batch.

    Args:
        joint: query, key and value side by side, ``[B, H, W, N, 3 * C]``.
        heads: a divisor of C.

    Returns:
        ``[B, H, W, N, C]``.
    """
    batch, height, width, environments, _ = joint.shape
    triple = joint.flatten(1, 2).unflatten(3, (3, heads, -1)).permute(3, 0, 2, 4, 1, 5)
    query, key, value = triple.flatten(1, 2).unbind(0)
    attend = attention_in_parts if joint.device.type == "cuda" else F.scaled_dot_product_attention
    out = attend(query, key, value, is_causal=True)
    heads_out = out.unflatten(0, (batch, environments)).permute(0, 3, 1, 2, 4).flatten(3)
    return heads_out.unflatten(1, (height, width)).contiguous()


def attention_in_parts(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Attention of ``[sequences, heads, L, C]``, at most ``ATTENTION_BLOCKS`` blocks at a time."""
    most = max(1, ATTENTION_BLOCKS // query.shape[1])
    parts = zip(query.split(most), key.split(most), value.split(most), strict=True)
    attend = F.scaled_dot_product_attention
    return torch.cat([attend(*part, is_causal=is_causal) for part in parts])


def per_pixel(x: Tensor) -> Tensor:
    """``x [N, B, C]`` reshaped to ``[B, 1, 1, N, C]``, which broadcasts over the pixels."""
    return x.transpose(0, 1)[:, None, None]
