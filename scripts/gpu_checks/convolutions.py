"""A convolution with weights of its own for each network: grouped, or as matrix products.

On a CPU the torch backend uses grouped convolutions, one group per environment. On a GPU it gathers
the 3x3 neighbourhoods and multiplies matrices in batches. Both are measured with channels first and
last, each on activations as it would keep them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina.ops import conv2d_by_products
from gpu_checks.place import FLOAT32, HALVES, Place, Row, attempted, computing
from gpu_checks.section import Found, rows_table

IMAGES, SIDE, CHANNELS, TAPS = 64, 8, 8, 9
Convolution = Callable[[Tensor, Tensor], Tensor]
ESPER, TRITON = PIXELS_FIRST = "as Esper computes it", "by Triton kernels"
"""Ways that take ``[B, H, W, N, C]``; the second needs a real GPU."""


def grouped_first(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve ``x [B, N C, H, W]`` by ``weight [N, C, C, 3, 3]``."""
    return F.conv2d(x, weight.flatten(0, 1), padding=1, groups=len(weight))


def products_first(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve ``x [N, C, B, H, W]`` by ``weight [N, C, C, 3, 3]``."""
    around = F.pad(x, (1, 1, 1, 1)).unfold(3, 3, 1).unfold(4, 3, 1)
    columns = around.permute(0, 1, 5, 6, 2, 3, 4).flatten(4).flatten(1, 3)
    return (weight.flatten(2) @ columns).unflatten(2, x.shape[2:])


def products_last(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve ``x [N, B, H, W, C]`` by ``weight [N, C, C, 3, 3]``."""
    around = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    columns = around.flatten(1, 3).flatten(2)
    return (columns @ weight.flatten(2).transpose(1, 2)).unflatten(1, x.shape[1:4])


def esper(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve ``x [B, H, W, N, C]`` by ``weight [N, C, C, 3, 3]``."""
    return conv2d_by_products(x, weight)


def triton(x: Tensor, weight: Tensor) -> Tensor:
    """As ``esper``, by Triton kernels."""
    from esper.kasmina.kernel_layers import conv2d

    return conv2d(x, weight)


def from_images(images: Tensor, layout: str) -> Tensor:
    """Bring ``images [N, B, C, H, W]`` into a layout."""
    if layout == "grouped, channels first":
        return images.transpose(0, 1).flatten(1, 2).contiguous()
    if layout == "grouped, channels last":
        flat = images.transpose(0, 1).flatten(1, 2)
        return flat.contiguous(memory_format=torch.channels_last)
    if layout == "products, channels first":
        return images.transpose(1, 2).contiguous()
    if layout in PIXELS_FIRST:
        return images.permute(1, 3, 4, 0, 2).contiguous()
    return images.movedim(2, 4).contiguous()


def to_images(x: Tensor, layout: str, count: int) -> Tensor:
    """Undo ``from_images``."""
    if layout.startswith("grouped"):
        return x.unflatten(1, (count, -1)).transpose(0, 1)
    if layout in PIXELS_FIRST:
        return x.permute(3, 0, 4, 1, 2)
    return x.transpose(1, 2) if layout == "products, channels first" else x.movedim(4, 2)


WAYS: dict[str, Convolution] = {
    "grouped, channels first": grouped_first,
    "grouped, channels last": grouped_first,
    "products, channels first": products_first,
    "products, channels last": products_last,
    ESPER: esper,
    TRITON: triton,
}


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per number of networks, precision and way."""
    ways = place.size([*WAYS], [way for way in WAYS if way != TRITON])
    check(place, ways)
    counts = place.size((64, 1024), (3,))
    for count, precision, way in product(counts, place.precisions, ways):
        row = {"networks": count, "precision": precision, "way": way}
        yield attempted(row, partial(speed, place, count, precision, way))


def inputs(place: Place, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return images ``[N, B, C, H, W]`` and weights ``[N, C, C, 3, 3]``."""
    images = place.size(IMAGES, 2)
    x = torch.randn(count, images, CHANNELS, SIDE, SIDE, device=place.device, dtype=dtype)
    weight = torch.randn(count, CHANNELS, CHANNELS, 3, 3, device=place.device, dtype=dtype)
    return x, weight / (CHANNELS * TAPS) ** 0.5


def check(place: Place, ways: list[str]) -> None:
    """Check that all ways compute the same convolution before any is timed."""
    with computing(FLOAT32):
        x, weight = inputs(place, 5, torch.float32)
        expected = torch.stack(
            [F.conv2d(one, own, padding=1) for one, own in zip(x, weight, strict=True)]
        )
        for way in ways:
            found = to_images(WAYS[way](from_images(x, way), weight), way, len(x))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def speed(place: Place, count: int, precision: str, way: str) -> Row:
    """Return milliseconds and 10^12 operations a second, forward and with the backward pass."""
    with computing(precision):
        images, weight = inputs(place, count, HALVES.get(precision, torch.float32))
        x, convolve = from_images(images, way).requires_grad_(), WAYS[way]
        del images
        weight.requires_grad_()
        gradient = torch.ones_like(convolve(x, weight).detach())

        def both() -> None:
            torch.autograd.grad(convolve(x, weight), [x, weight], gradient)

        def forward() -> None:
            with torch.no_grad():
                convolve(x, weight)

        operations = 2 * TAPS * CHANNELS * x.numel()
        once, twice = place.seconds(forward), place.seconds(both)
        return {
            "forward, ms": 1e3 * once,
            "both, ms": 1e3 * twice,
            "forward, TFLOP/s": operations / once / 1e12,
            "both, TFLOP/s": 3 * operations / twice / 1e12,
        }


def page(rows: list[Row], found: Found) -> str:
    """Return the convolutions in Markdown."""
    names = ("forward, ms", "both, ms", "forward, TFLOP/s", "both, TFLOP/s")
    text = (
        f"3x3 convolutions of {IMAGES} images (2 on a virtual device) of {SIDE} x {SIDE} with "
        f"{CHANNELS} channels in each network; both is forward and backward."
    )
    return f"{text}\n\n{rows_table(('networks', 'precision', 'way', *names), rows)}"
