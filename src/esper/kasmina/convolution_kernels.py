"""Convolutions of stacked networks on a GPU, as Triton kernels.

A program computes some pixels of one network, so its sums, and the bits of a network, depend
neither on the number of networks nor on their neighbours. The neighbourhoods of the pixels are read
where they lie; ``ops.conv2d_by_products`` copies them first. Activations are ``[B, H, W, N, C]``,
contiguous, and sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.kasmina.column_kernels import total

PIXELS, OUTPUTS = 128, 64
"""Pixels and most output channels of a program."""
GRADIENT_PIXELS, GRADIENT_PART = 64, 4096
"""Pixels of a product in the gradient of weights, and pixels of which a program sums them."""
PRODUCTS, SUMS = 4, 8192
"""Most products without a loop, and sums that twice as many threads share: what registers hold."""


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Same-size convolution of each network with its own kernel, ``[B, H, W, N, C_out]``.

    Args:
        x: ``[B, H, W, N, C_in]``.
        weight: ``[N, C_out, C_in, k, k]`` of the same dtype, k odd.
    """
    *images, networks, inputs = x.shape
    outputs, size = weight.shape[1], weight.shape[-1]
    pixels = images[0] * images[1] * images[2]
    out = x.new_empty(*images, networks, outputs)
    shape = inputs, outputs, size, *images[1:]
    matrices = weight.permute(0, 3, 4, 2, 1).contiguous()
    rows = size * size * inputs
    block = min(_power(rows), 32)
    wide = min(_power(outputs), OUTPUTS)
    repeats = triton.cdiv(rows, block)
    unroll, warps = (repeats, 4) if repeats <= PRODUCTS else (1, 8)
    blocks = PIXELS, block, repeats, wide, unroll
    grid = networks, triton.cdiv(pixels, PIXELS), triton.cdiv(outputs, wide)
    arguments = x, matrices, out, pixels, networks, shape, blocks, _products()
    convolution_kernel[grid](*arguments, num_warps=warps)
    return out


def weight_gradient(x: Tensor, gradient: Tensor, size: int) -> Tensor:
    """Gradient of the weights of ``convolution``, float32 ``[N, C_out, C_in, k, k]``.

    Args:
        x: the input, ``[B, H, W, N, C_in]``.
        gradient: of the output, ``[B, H, W, N, C_out]``, of the same dtype.
        size: k.
    """
    *images, networks, inputs = x.shape
    outputs = gradient.shape[-1]
    pixels, rows = images[0] * images[1] * images[2], size * size * inputs
    block = min(_power(rows), 32 if x.dtype == torch.float32 else 128)
    parts = triton.cdiv(pixels, GRADIENT_PART)
    out = x.new_empty(parts, networks, rows, outputs, dtype=torch.float32)
    wide = min(_power(outputs), OUTPUTS)
    grid = networks, triton.cdiv(rows, block) * triton.cdiv(outputs, wide), parts
    shape = inputs, outputs, size, *images[1:]
    blocks = GRADIENT_PIXELS, block, GRADIENT_PART, wide
    steps = triton.cdiv(min(pixels, GRADIENT_PART), GRADIENT_PIXELS)
    arguments = x, gradient, out, pixels, networks, steps, shape, blocks, _products()
    weight_kernel[grid](*arguments, num_warps=8 if block * wide >= SUMS else 4)
    return total(out).view(networks, size, size, inputs, outputs).permute(0, 4, 3, 1, 2)


def _power(count: int) -> int:
    """Next power of two that matrix units accept."""
    return max(16, int(triton.next_power_of_2(count)))


def _products() -> str:
    """How float32 is multiplied: as ``torch.backends.cuda.matmul`` says."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def neighbours(pixel, k, networks, shape: tl.constexpr):
    """Offset of element k of each pixel's neighbourhood, relative to the pixel, and if it exists.

    ``pixel`` and ``k`` are broadcast against each other.
    """
    inputs: tl.constexpr = shape[0]
    size: tl.constexpr = shape[2]
    height: tl.constexpr = shape[3]
    width: tl.constexpr = shape[4]
    tap = k // inputs
    down, right = tap // size - size // 2, tap % size - size // 2
    row, column = (pixel // width) % height + down, pixel % width + right
    exists = (k < size * size * inputs) & (row >= 0) & (row < height)
    offset = (down * width + right).to(tl.int64) * networks * inputs + k % inputs
    return offset, exists & (column >= 0) & (column < width)


# Seeds of a kind are more and fewer from step to step: one binary for every number of them.
@triton.jit(do_not_specialize=["pixels", "networks"])
def convolution_kernel(
    x,
    weight,
    out,
    pixels,
    networks,
    shape: tl.constexpr,
    blocks: tl.constexpr,
    products: tl.constexpr,
):
    """``out[pixel, network]`` of one network; ``weight [N, k k C_in, C_out]``."""
    inputs: tl.constexpr = shape[0]
    outputs: tl.constexpr = shape[1]
    rows: tl.constexpr = shape[2] * shape[2] * inputs
    high: tl.constexpr = blocks[0]
    repeats: tl.constexpr = blocks[2]
    deep: tl.constexpr = blocks[1]
    wide: tl.constexpr = blocks[3]
    network = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * high + tl.arange(0, high)
    o = tl.program_id(2) * wide + tl.arange(0, wide)
    position = pixel.to(tl.int64) * networks + network
    sums = tl.zeros((high, wide), tl.float32)
    unroll: tl.constexpr = blocks[4]
    for part in tl.range(repeats, loop_unroll_factor=unroll):
        k = part * deep + tl.arange(0, deep)
        offset, exists = neighbours(pixel[:, None], k[None, :], networks, shape)
        exists = exists & (pixel < pixels)[:, None]
        values = tl.load(x + position[:, None] * inputs + offset, mask=exists, other=0.0)
        at = (network * rows + k[:, None]) * outputs + o[None, :]
        valid = (k < rows)[:, None] & (o < outputs)[None, :]
        factors = tl.load(weight + at, mask=valid, other=0.0)
        sums = tl.dot(values, factors, sums, input_precision=products)
    inside = (pixel < pixels)[:, None] & (o < outputs)[None, :]
    to = out + position[:, None] * outputs + o[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pixels", "networks", "steps"])
def weight_kernel(
    x,
    gradient,
    out,
    pixels,
    networks,
    steps,
    shape: tl.constexpr,
    blocks: tl.constexpr,
    products: tl.constexpr,
):
    """``out[part, network]``, ``[k k C_in, C_out]``: the sum over the pixels of a part."""
    inputs: tl.constexpr = shape[0]
    outputs: tl.constexpr = shape[1]
    rows: tl.constexpr = shape[2] * shape[2] * inputs
    deep: tl.constexpr = blocks[0]
    high: tl.constexpr = blocks[1]
    wide: tl.constexpr = blocks[3]
    network, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    across: tl.constexpr = (outputs + wide - 1) // wide
    k = (tl.program_id(1) // across) * high + tl.arange(0, high)
    o = (tl.program_id(1) % across) * wide + tl.arange(0, wide)
    sums = tl.zeros((high, wide), tl.float32)
    for step in range(steps):
        pixel = part * blocks[2] + step * deep + tl.arange(0, deep)
        position = pixel.to(tl.int64) * networks + network
        offset, exists = neighbours(pixel[None, :], k[:, None], networks, shape)
        exists = exists & (pixel < pixels)[None, :]
        values = tl.load(x + position[None, :] * inputs + offset, mask=exists, other=0.0)
        inside = (pixel < pixels)[:, None] & (o < outputs)[None, :]
        at = position[:, None] * outputs + o[None, :]
        slopes = tl.load(gradient + at, mask=inside, other=0.0)
        sums = tl.dot(values, slopes, sums, input_precision=products)
    to = ((part * networks + network) * rows + k)[:, None] * outputs + o[None, :]
    tl.store(out + to, sums, mask=(k < rows)[:, None] & (o < outputs)[None, :])
