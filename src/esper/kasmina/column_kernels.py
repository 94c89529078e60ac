"""BatchNorm with ReLU and max pooling of stacked networks on a GPU, as Triton kernels.

Both treat the channels of all networks as columns: activations are ``[rows, columns]``, contiguous,
where a row is a pixel of an image and column ``n * C + c`` is channel c of network n. A column is
summed in an order that depends on the number of rows alone. Sums are float32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 64
"""Rows and columns of a program."""
PART = 8
"""Times as many rows that one program sums."""


class Statistics(NamedTuple):
    """Float32 vectors of one value a column: what BatchNorm subtracts and what it multiplies by."""

    mean: Tensor
    inverse_deviation: Tensor


class Norm(NamedTuple):
    """BatchNorm of N networks; vectors are ``[N, C]`` views whose channels are adjacent."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_variance: Tensor
    momentum: float
    epsilon: float
    rectify: bool

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Distances between networks in the four vectors."""
        weight, bias, mean, variance = (vector.stride(0) for vector in self[:4])
        return weight, bias, mean, variance


def norm(x: Tensor, vectors: Norm, training: bool) -> tuple[Tensor, Statistics | None]:
    """BatchNorm of ``x [B, H, W, N, C]``, then ReLU if ``vectors.rectify``.

    In training, the running statistics are updated in place, and those of ``x`` are returned.
    """
    rows, columns, out = x[..., 0, 0].numel(), x.shape[3] * x.shape[4], torch.empty_like(x)
    statistics = _statistics(x, vectors, rows, columns) if training else None
    running = vectors[2:4] if statistics is None else statistics
    normalise_kernel[_grid(rows, ROWS, columns)](
        (x, out), (vectors.weight, vectors.bias, *running), (rows, columns, *vectors.strides),
        vectors.epsilon, (x.shape[4], training, vectors.rectify), (ROWS, COLUMNS),
    )  # fmt: skip
    return out, statistics


def _statistics(x: Tensor, vectors: Norm, rows: int, columns: int) -> Statistics:
    grid = _grid(rows, PART * ROWS, columns)
    sums = x.new_empty(grid[0], 2, columns, dtype=torch.float32)
    sums_kernel[grid](x, sums, (rows, columns), (ROWS, COLUMNS, PART))
    statistics = Statistics(*x.new_empty(2, columns, dtype=torch.float32).unbind())
    statistics_kernel[_grid(1, 1, columns)](
        (x, sums, *statistics, vectors.running_mean, vectors.running_variance),
        (grid[0], rows, columns, *vectors.strides[2:]),
        (vectors.momentum, vectors.epsilon, rows / max(rows - 1, 1)),
        (x.shape[4], ROWS, COLUMNS),
    )
    return statistics


def norm_gradients(
    x: Tensor, gradient: Tensor, vectors: Norm, statistics: Statistics
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x [B, H, W, N, C]`` and of weight and bias ``[N, C]`` of ``norm``.

    Args:
        x: the input.
        gradient: of the output, like ``x``.
        vectors: as in the forward pass.
        statistics: those of ``x``.
    """
    rows, columns, out = x[..., 0, 0].numel(), x.shape[3] * x.shape[4], torch.empty_like(x)
    grid, shape = _grid(rows, PART * ROWS, columns), (x.shape[4], vectors.rectify)
    sums = x.new_empty(grid[0], 2, columns, dtype=torch.float32)
    tensors = vectors.weight, vectors.bias, *statistics
    sizes = rows, columns, *vectors.strides[:2]
    slope_sums_kernel[grid](x, gradient, sums, tensors, sizes, shape, (ROWS, COLUMNS, PART))
    of_bias, of_weight = totals = total(sums)
    slopes_kernel[_grid(rows, ROWS, columns)](
        (x, gradient, out), totals, tensors, sizes, shape, (ROWS, COLUMNS)
    )
    return out, of_weight.view(x.shape[3:]), of_bias.view(x.shape[3:])


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """2x2 max pooling of ``[B, H, W, N, C]``, and which of the four it is, int8."""
    batch, height, width, *channels = x.shape
    out = x.new_empty(batch, height // 2, width // 2, *channels)
    index = torch.empty_like(out, dtype=torch.int8)
    sizes = out[..., 0, 0].numel(), channels[0] * channels[1], height, width
    pool_kernel[_grid(sizes[0], ROWS, sizes[1])](x, out, index, sizes, (ROWS, COLUMNS))
    return out, index


def pool_gradient(gradient: Tensor, index: Tensor, height: int, width: int) -> Tensor:
    """Gradient of the input ``[B, height, width, N, C]`` of ``pool`` from that of its output.

    A last row or column that no pool covers has none.
    """
    batch, *small, networks, channels = gradient.shape
    create = gradient.new_zeros if height % 2 or width % 2 else gradient.new_empty
    out = create(batch, height, width, networks, channels)
    sizes = batch * small[0] * small[1], networks * channels, height, width
    unpool_kernel[_grid(sizes[0], ROWS, sizes[1])](gradient, out, index, sizes, (ROWS, COLUMNS))
    return out


def total(parts: Tensor) -> Tensor:
    """Sum of float32 ``parts [P, ...]`` over P, in its order."""
    out = torch.empty_like(parts[0])
    sizes = len(parts), out.numel()
    total_kernel[(triton.cdiv(sizes[1], ROWS * COLUMNS),)](parts, out, sizes, ROWS * COLUMNS)
    return out


def _grid(rows: int, block: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, block), triton.cdiv(columns, COLUMNS)


@triton.jit
def total_kernel(parts, out, sizes, block: tl.constexpr):
    """Sum of ``parts [P, columns]`` over P."""
    count, columns = sizes
    j = tl.program_id(0) * block + tl.arange(0, block)
    result = tl.zeros((block,), tl.float32)
    at = parts + j
    for _ in range(count):
        result += tl.load(at, mask=j < columns, other=0.0)
        at += columns
    tl.store(out + j, result, mask=j < columns)


@triton.jit
def sums_kernel(x, sums, sizes, blocks: tl.constexpr):
    """Sums ``[parts, 2, columns]`` of x and of its square, both less the first row of x."""
    high: tl.constexpr = blocks[0]
    repeats: tl.constexpr = blocks[2]
    wide: tl.constexpr = blocks[1]
    rows, columns = sizes
    j = tl.program_id(1) * wide + tl.arange(0, wide)
    origin = tl.load(x + j, mask=j < columns, other=0.0).to(tl.float32)
    first = tl.zeros((high, wide), tl.float32)
    second = tl.zeros((high, wide), tl.float32)
    for step in tl.static_range(repeats):
        row = (tl.program_id(0) * repeats + step) * high + tl.arange(0, high)
        inside = (row < rows)[:, None] & (j < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + j[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - origin[None, :], 0.0)
        first += value
        second += value * value
    to = sums + tl.program_id(0) * 2 * columns + j
    tl.store(to, tl.sum(first, 0), mask=j < columns)
    tl.store(to + columns, tl.sum(second, 0), mask=j < columns)


@triton.jit
def statistics_kernel(tensors, sizes, constants, shape: tl.constexpr):
    """Statistics of the columns from the sums of ``sums_kernel``; updates the running ones.

    As in torch, the running variance is that of a sample (Bessel's correction).
    """
    high: tl.constexpr = shape[1]
    wide: tl.constexpr = shape[2]
    x, sums, mean, inverse, running_mean, running_variance = tensors
    parts, rows, columns, mean_stride, variance_stride = sizes
    momentum, epsilon, correction = constants
    j = tl.program_id(1) * wide + tl.arange(0, wide)
    inside = j < columns
    first = tl.zeros((high, wide), tl.float32)
    second = tl.zeros((high, wide), tl.float32)
    for begin in range(0, parts, high):
        part = begin + tl.arange(0, high)
        valid = (part < parts)[:, None] & inside[None, :]
        at = sums + part[:, None] * 2 * columns + j[None, :]
        first += tl.load(at, mask=valid, other=0.0)
        second += tl.load(at + columns, mask=valid, other=0.0)
    shift = tl.sum(first, 0) / rows
    variance = tl.sum(second, 0) / rows - shift * shift
    variance = tl.where(variance < 0.0, 0.0, variance)
    average = tl.load(x + j, mask=inside, other=0.0).to(tl.float32) + shift
    tl.store(mean + j, average, mask=inside)
    tl.store(inverse + j, 1.0 / tl.sqrt(variance + epsilon), mask=inside)
    sample = variance * correction
    network, channel = j // shape[0], j % shape[0]
    to_mean = running_mean + network * mean_stride + channel
    to_variance = running_variance + network * variance_stride + channel
    old_mean = tl.load(to_mean, mask=inside, other=0.0)
    old_variance = tl.load(to_variance, mask=inside, other=0.0)
    tl.store(to_mean, old_mean + momentum * (average - old_mean), mask=inside)
    tl.store(to_variance, old_variance + momentum * (sample - old_variance), mask=inside)


@triton.jit
def normalise_kernel(tensors, vectors, sizes, epsilon, shape: tl.constexpr, blocks: tl.constexpr):
    """BatchNorm and ReLU with statistics of the batch, or else with the running ones."""
    high: tl.constexpr = blocks[0]
    wide: tl.constexpr = blocks[1]
    x, out = tensors
    weight, bias, mean, deviation = vectors
    rows, columns, weight_stride, bias_stride, mean_stride, variance_stride = sizes
    row = tl.program_id(0) * high + tl.arange(0, high)
    j = tl.program_id(1) * wide + tl.arange(0, wide)
    valid = j < columns
    network, channel = j // shape[0], j % shape[0]
    if shape[1]:
        center = tl.load(mean + j, mask=valid, other=0.0)
        factor = tl.load(deviation + j, mask=valid, other=0.0)
    else:
        center = tl.load(mean + network * mean_stride + channel, mask=valid, other=0.0)
        at = deviation + network * variance_stride + channel
        factor = 1.0 / tl.sqrt(tl.load(at, mask=valid, other=1.0) + epsilon)
    slope = tl.load(weight + network * weight_stride + channel, mask=valid, other=0.0)
    shift = tl.load(bias + network * bias_stride + channel, mask=valid, other=0.0)
    inside = (row < rows)[:, None] & valid[None, :]
    at = row.to(tl.int64)[:, None] * columns + j[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    y = (value - center[None, :]) * factor[None, :] * slope[None, :] + shift[None, :]
    if shape[2]:
        y = tl.where(y <= 0.0, 0.0, y)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def slope_tile(tensors, vectors, at, inside, j, sizes, shape: tl.constexpr):
    """Normalised x, gradient before the ReLU, and weight times inverse deviation, of one tile."""
    x, gradient = tensors
    weight, bias, mean, inverse = vectors
    _, columns, weight_stride, bias_stride = sizes
    valid = j < columns
    network, channel = j // shape[0], j % shape[0]
    center = tl.load(mean + j, mask=valid, other=0.0)
    factor = tl.load(inverse + j, mask=valid, other=0.0)
    scale = tl.load(weight + network * weight_stride + channel, mask=valid, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    normal = tl.where(inside, (value - center[None, :]) * factor[None, :], 0.0)
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if shape[1]:
        shift = tl.load(bias + network * bias_stride + channel, mask=valid, other=0.0)
        slope = tl.where(normal * scale[None, :] + shift[None, :] <= 0.0, 0.0, slope)
    return normal, slope, scale * factor


@triton.jit
def slope_sums_kernel(x, gradient, sums, vectors, sizes, shape: tl.constexpr, blocks: tl.constexpr):
    """Sums ``[parts, 2, columns]`` of the gradients of bias and weight."""
    high: tl.constexpr = blocks[0]
    repeats: tl.constexpr = blocks[2]
    wide: tl.constexpr = blocks[1]
    rows, columns = sizes[0], sizes[1]
    j = tl.program_id(1) * wide + tl.arange(0, wide)
    first = tl.zeros((high, wide), tl.float32)
    second = tl.zeros((high, wide), tl.float32)
    unroll: tl.constexpr = 1 if x.dtype.element_ty == tl.float16 else repeats
    for step in tl.range(repeats, loop_unroll_factor=unroll):
        row = (tl.program_id(0) * repeats + step) * high + tl.arange(0, high)
        inside = (row < rows)[:, None] & (j < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + j[None, :]
        normal, slope, _ = slope_tile((x, gradient), vectors, at, inside, j, sizes, shape)
        first += slope
        second += slope * normal
    to = sums + tl.program_id(0) * 2 * columns + j
    tl.store(to, tl.sum(first, 0), mask=j < columns)
    tl.store(to + columns, tl.sum(second, 0), mask=j < columns)


@triton.jit
def slopes_kernel(tensors, totals, vectors, sizes, shape: tl.constexpr, blocks: tl.constexpr):
    """Gradient of the input of BatchNorm and ReLU from ``totals [2, columns]``."""
    high: tl.constexpr = blocks[0]
    wide: tl.constexpr = blocks[1]
    x, gradient, out = tensors
    rows, columns = sizes[0], sizes[1]
    row = tl.program_id(0) * high + tl.arange(0, high)
    j = tl.program_id(1) * wide + tl.arange(0, wide)
    inside = (row < rows)[:, None] & (j < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + j[None, :]
    normal, slope, factor = slope_tile((x, gradient), vectors, at, inside, j, sizes, shape)
    of_bias = tl.load(totals + j, mask=j < columns, other=0.0) / rows
    of_weight = tl.load(totals + columns + j, mask=j < columns, other=0.0) / rows
    slope = (slope - of_bias[None, :] - normal * of_weight[None, :]) * factor[None, :]
    tl.store(out + at, slope.to(out.dtype.element_ty), mask=inside)


@triton.jit
def corner(sizes, blocks: tl.constexpr):
    """Offsets of a tile of pools in output and input, of a row of the input, and if they exist."""
    high: tl.constexpr = blocks[0]
    wide: tl.constexpr = blocks[1]
    pools, columns, height, width = sizes
    pool = tl.program_id(0) * high + tl.arange(0, high)
    j = tl.program_id(1) * wide + tl.arange(0, wide)
    inside = (pool < pools)[:, None] & (j < columns)[None, :]
    small_height, small_width = height // 2, width // 2
    image, within = pool // (small_height * small_width), pool % (small_height * small_width)
    row, column = 2 * (within // small_width), 2 * (within % small_width)
    pixel = (image.to(tl.int64) * height + row) * width + column
    to = pool.to(tl.int64)[:, None] * columns + j[None, :]
    return to, pixel[:, None] * columns + j[None, :], columns * width, inside


@triton.jit
def pool_kernel(x, out, which, sizes, blocks: tl.constexpr):
    """The largest of four, or NaN if one is; of several the first."""
    high: tl.constexpr = blocks[0]
    wide: tl.constexpr = blocks[1]
    to, at, line, inside = corner(sizes, blocks)
    best = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    index = tl.zeros((high, wide), tl.int8)
    for number in tl.static_range(1, 4):
        offset = at + (number // 2) * line + (number % 2) * sizes[1]
        value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        larger = (value > best) | (value != value)
        best = tl.where(larger, value, best)
        index = tl.where(larger, number, index)
    tl.store(out + to, best.to(out.dtype.element_ty), mask=inside)
    tl.store(which + to, index.to(tl.int8), mask=inside)


@triton.jit
def unpool_kernel(gradient, out, which, sizes, blocks: tl.constexpr):
    """The gradient of an output for the one of four that it came from, 0 for the others."""
    to, at, line, inside = corner(sizes, blocks)
    slope = tl.load(gradient + to, mask=inside, other=0.0).to(tl.float32)
    index = tl.load(which + to, mask=inside, other=0)
    for number in tl.static_range(4):
        offset = at + (number // 2) * line + (number % 2) * sizes[1]
        value = tl.where(index == number, slope, 0.0)
        tl.store(out + offset, value.to(out.dtype.element_ty), mask=inside)
