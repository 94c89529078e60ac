"""Layers of ``ops`` on a GPU by Triton kernels, with their gradients; none computes float64."""

from typing import Any

import torch
from torch import Tensor

from esper.kasmina.column_kernels import Norm, Statistics, norm, norm_gradients, pool, pool_gradient
from esper.kasmina.convolution_kernels import convolution, weight_gradient
from esper.kasmina.ops import NORM_EPSILON


def conv2d(x: Tensor, weight: Tensor, rectify: bool = False) -> Tensor:
    """See ``ops.conv2d``; in the dtype of autocast, in which also the ReLU is."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    out: Tensor = _Convolution.apply(x.contiguous(), weight)
    return torch.relu_(out) if rectify else out


def conv2d_weight_gradient(x: Tensor, gradient: Tensor, size: int) -> Tensor:
    """See ``ops.conv2d_weight_gradient``."""
    slopes = gradient.unflatten(0, x.shape[:3]).contiguous()
    return weight_gradient(x.contiguous(), slopes, size).to(x.dtype)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return convolution(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        slopes = gradient.to(x.dtype).contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = convolution(slopes, weight.flip(3, 4).transpose(1, 2))
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(x, slopes, weight.shape[-1]).to(weight.dtype)
        return of_x, of_weight


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
    """See ``ops.batch_norm``. A gradient needs ``training``."""
    running = running_mean, running_variance
    vectors = Norm(weight.detach(), bias.detach(), *running, momentum, NORM_EPSILON, rectify)
    out: Tensor = _BatchNorm.apply(x.contiguous(), weight, bias, vectors, training)
    return out


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, vectors: Norm, training: bool
    ) -> Tensor:
        ctx.vectors = vectors
        out, statistics = norm(x, vectors, training)
        ctx.save_for_backward(x, *(statistics or ()))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *statistics = ctx.saved_tensors
        slopes = gradient.to(x.dtype).contiguous()
        return *norm_gradients(x, slopes, ctx.vectors, Statistics(*statistics)), None, None


def max_pool(x: Tensor) -> Tensor:
    """See ``ops.max_pool``."""
    out: Tensor = _MaxPool.apply(x.contiguous())
    return out


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out, index = pool(x)
        ctx.size = x.shape[1:3]
        ctx.save_for_backward(index)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return pool_gradient(gradient.contiguous(), *ctx.saved_tensors, *ctx.size)
