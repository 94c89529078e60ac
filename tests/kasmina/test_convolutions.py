"""Layers as on a GPU, beside those on a CPU: convolutions by products, attention in parts."""

import pytest
import torch
from torch import Tensor

from esper.kasmina import ops

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def drawn(size: int, environments: int = 5, pixels: tuple[int, int] = (4, 3)) -> list[Tensor]:
    """An input ``[B, H, W, N, 2]`` and weights ``[N, 7, 2, k, k]`` in float64."""
    generator = torch.Generator().manual_seed(size)
    shapes = (3, *pixels, environments, 2), (environments, 7, 2, size, size)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize(("size", "pixels"), [(1, (4, 3)), (3, (4, 3)), (5, (4, 3)), (3, (1, 1))])
def test_products_agree_with_a_grouped_convolution_and_its_gradients(
    size: int, pixels: tuple[int, int], rectify: bool
) -> None:
    x, weight = drawn(size, pixels=pixels)
    expected, product = (
        convolve(x, weight, rectify) for convolve in (ops.conv2d, ops.conv2d_by_products)
    )
    torch.testing.assert_close(product, expected)
    assert product.is_contiguous()
    gradient = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(product, (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@HALVES
def test_products_compute_in_the_precision_of_autocast(dtype: torch.dtype) -> None:
    x, weight = (part.detach().float().requires_grad_() for part in drawn(3))
    with torch.autocast("cpu", dtype=dtype):
        product = ops.conv2d_by_products(x, weight, rectify=True)
    assert product.dtype == dtype
    expected = ops.conv2d(x, weight, rectify=True)
    torch.testing.assert_close(product.float(), expected, rtol=0.02, atol=0.05)
    mine = torch.autograd.grad(product.float().sum(), (x, weight))
    theirs = torch.autograd.grad(expected.sum(), (x, weight))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm()) < 0.05 * float(b.norm())


def test_no_environment_reaches_another_by_products() -> None:
    x, weight = (part.detach() for part in drawn(3))
    expected = ops.conv2d_by_products(x, weight)
    poisoned = weight.clone()
    poisoned[2] = float("nan")
    product = ops.conv2d_by_products(x, poisoned)
    others = [0, 1, 3, 4]
    assert torch.equal(product[:, :, :, others], expected[:, :, :, others])
    assert bool(product[:, :, :, 2].isnan().all())


def test_attention_of_more_sequences_than_a_grid_holds_is_computed_in_parts(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(2)
    parts = torch.randn(3, 15, 2, 4, 6, generator=generator)
    expected = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
    monkeypatch.setattr(ops, "ATTENTION_BLOCKS", 9)  # 4 of the 15 sequences at a time
    assert torch.equal(ops.attention_in_parts(*parts, is_causal=True), expected)
