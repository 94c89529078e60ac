"""The Triton kernels beside the layers of torch in float64, on a GPU or under the interpreter."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from esper.kasmina import ops

pytest.importorskip("triton", reason="needs Triton, which Linux has with the extra dev")
from esper.kasmina import kernel_layers

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


WITHOUT_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=[pytest.param("real", marks=[pytest.mark.gpu, WITHOUT_GPU]), "interpreter"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where kernels run; conftest chooses the interpreter on a machine without a GPU."""
    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("on a machine with a GPU the kernels are compiled")
    with ops.computed_by(kernel_layers):
        yield "cuda" if request.param == "real" else "cpu"


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def with_gradients(layer: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output of a layer and the gradients of its inputs, in float64 on the CPU."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    out = layer(*leaves)
    gradient = drawn(*out.shape).flip(0, 1, 2).to(out)
    parts = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    return [part.double().cpu() for part in parts]


def assert_near(mine: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for part, reference in zip(mine, exact, strict=True):
        assert float((part - reference).norm()) <= tolerance * float(reference.norm())


@DTYPES
@pytest.mark.parametrize(
    ("images", "networks", "inputs", "outputs", "size"),
    [
        ((2, 5, 7), 3, 3, 8, 3),
        ((3, 8, 8), 2, 8, 16, 3),
        ((5, 4, 4), 2, 5, 3, 1),
        ((1, 3, 3), 2, 40, 70, 3),
        ((2, 6, 1), 1, 2, 2, 5),
    ],
)
def test_convolution_and_its_gradients_are_those_of_products(
    device: str,
    dtype: torch.dtype,
    images: tuple[int, int, int],
    networks: int,
    inputs: int,
    outputs: int,
    size: int,
) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16: it computes with bits of integers")
    x = drawn(*images, networks, inputs).to(device, dtype)
    weight = drawn(networks, outputs, inputs, size, size).to(device, dtype)
    exact = with_gradients(ops.conv2d_by_products, x.double(), weight.double())
    exact[0] = exact[0].view(*images, networks, outputs)
    mine = with_gradients(kernel_layers.conv2d, x, weight)
    assert_near(mine, exact, TOLERANCES[dtype])


def test_weight_gradient_sums_every_part_of_many_pixels(device: str) -> None:
    x, gradient = drawn(4, 40, 40, 2, 2).to(device), drawn(4, 40, 40, 2, 3).to(device)
    exact, mine = (
        ops.conv2d_weight_gradient(x.to(dtype), gradient.to(dtype).flatten(0, 2), 3).double().cpu()
        for dtype in (torch.float64, torch.float32)
    )
    assert_near([mine], [exact], 1e-5)


@DTYPES
@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize(
    ("images", "networks", "channels"), [((2, 5, 7), 3, 3), ((70, 4, 4), 9, 8), ((5, 1, 1), 2, 4)]
)
def test_batch_norm_gradients_and_running_statistics_are_those_of_torch(
    device: str,
    dtype: torch.dtype,
    images: tuple[int, int, int],
    networks: int,
    channels: int,
    rectify: bool,
) -> None:
    x = (3 + 2 * drawn(*images, networks, channels)).to(device, dtype)
    # Rows of a store, as of hosts: the vectors of two networks do not follow one another.
    store = drawn(networks, 5 * channels).to(device, torch.float32)
    store[:, 3 * channels : 4 * channels] = 1.0

    def both(numbers: torch.dtype, inputs: torch.dtype) -> list[Tensor]:
        rows = store.to(numbers, copy=True)
        weight, bias, mean, variance, _ = rows.split(channels, 1)

        def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return ops.batch_norm(x, weight, bias, mean, variance, True, rectify)

        parts = with_gradients(layer, x.to(inputs), weight, bias)
        with torch.no_grad():
            evaluated = ops.batch_norm(x.to(inputs), weight, bias, mean, variance, False, rectify)
        return [*parts, *(part.double().cpu() for part in (mean, variance, evaluated))]

    exact, mine = both(torch.float64, torch.float64), both(torch.float32, dtype)
    assert_near(mine, exact, TOLERANCES[dtype])


@DTYPES
@pytest.mark.parametrize("images", [(2, 4, 6), (3, 5, 7), (70, 2, 2)])
def test_max_pooling_and_its_gradient_are_those_of_torch(
    device: str, dtype: torch.dtype, images: tuple[int, int, int]
) -> None:
    # Ties, and what is not a number.
    x = drawn(*images, 3, 5).round().to(device, dtype)
    x[0, 0, 0, 0, 0] = x[0, 1, 1, 1, 1] = float("nan")
    exact = with_gradients(ops.max_pool, x.double())
    mine = with_gradients(ops.max_pool, x)
    torch.testing.assert_close(mine[0], exact[0], rtol=0, atol=0, equal_nan=True)
    assert_near(mine[1:], exact[1:], TOLERANCES[dtype])


def block(x: Tensor, weight: Tensor, *norm: Tensor) -> Tensor:
    """Convolution, BatchNorm with ReLU, and pooling, as in a host."""
    return ops.max_pool(ops.batch_norm(kernel_layers.conv2d(x, weight), *norm, True, True))


def bits(device: str, networks: int, poisoned: int | None = None) -> list[Tensor]:
    """Output and gradients of the first network of several, of which one may be poisoned."""
    x, weight = drawn(6, 8, 8, 9, 3), drawn(9, 8, 3, 3, 3)
    norm = [drawn(9, 8), drawn(9, 8), torch.zeros(9, 8), torch.ones(9, 8)]
    if poisoned is not None:
        weight[poisoned] = float("nan")
    parts = [part[:networks].to(device, torch.float32) for part in (weight, *norm)]
    leaves = [x[:, :, :, :networks].to(device, torch.float32), *parts[:3]]
    leaves = [part.contiguous().requires_grad_() for part in leaves]
    out = block(*leaves, *parts[3:])
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    return [out[:, :, :, 0], gradients[0][:, :, :, 0], *(part[0] for part in gradients[1:])]


def test_bits_of_a_network_depend_neither_on_the_number_of_networks_nor_on_nan(device: str) -> None:
    alone = bits(device, 1)
    assert all(bool(part.isfinite().all()) for part in alone)
    for company in (bits(device, 2), bits(device, 9), bits(device, 9, poisoned=1)):
        for mine, theirs in zip(alone, company, strict=True):
            assert torch.equal(mine, theirs)


def test_batch_norm_with_weights_of_zero_passes_the_gradient_of_its_weights(device: str) -> None:
    x, bias = drawn(4, 3, 3, 2, 3).to(device, torch.float32), torch.ones(2, 3, device=device)
    running = torch.zeros_like(bias), torch.ones_like(bias)
    weight = torch.zeros_like(bias, requires_grad=True)
    out = ops.batch_norm(x, weight, bias, *running, True, rectify=True)
    (gradient,) = torch.autograd.grad((out * x).sum(), weight)
    assert bool(gradient.isfinite().all())
    assert bool((gradient != 0).all())
