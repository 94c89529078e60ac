"""Tests specific to the native backend: float precision, threads, fallback."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.leyline.actions import Style
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.precision import Precision
from oracles import naive
from support import (
    CPU,
    F64,
    LIVES,
    Garden,
    Plant,
    assert_identical,
    copied,
    mixed_gardens,
    naive_environments,
    needs_native,
    optimisation,
    random_batches,
    random_stack,
    row_of,
    seed_state,
    small_engine,
    small_host,
    small_mlp,
    train,
    train_naively,
)

pytestmark = needs_native

F32 = torch.float32
NARROW_GAP = 1e-4


# --- float ------------------------------------------------------------------------------------


def narrowest_gap(host: Host, garden: Garden, seed: int) -> float:
    """Smallest distance of a pre-activation to 0, or of a pixel to the maximum of its pool."""
    stack = random_stack(host, len(garden), seed=seed)
    settings = optimisation(len(garden), len(host.slots))
    environments = naive_environments(host, stack, garden, settings)
    gaps: list[float] = []
    relu, max_pool = F.relu, F.max_pool2d

    def watched_relu(x: torch.Tensor) -> torch.Tensor:
        gaps.append(x.detach().abs().min().item())
        return relu(x)

    def watched_pool(x: torch.Tensor, size: int) -> torch.Tensor:
        pixels = F.unfold(x.detach().flatten(0, 1)[:, None], size, stride=size)
        two = pixels.topk(2, 1).values
        gaps.append((two[:, 0] - two[:, 1]).min().item())
        return max_pool(x, size)

    try:
        naive.F.relu, naive.F.max_pool2d = watched_relu, watched_pool
        train_naively(environments, random_batches(host, len(garden), count=1, seed=seed))
    finally:
        naive.F.relu, naive.F.max_pool2d = relu, max_pool
    return min(gaps)


def trained(host: Host, garden: Garden, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Losses, gradients (in the first moments) and statistics after one minibatch."""
    rows, slots = len(garden), len(host.slots)
    stack = random_stack(host, rows, dtype, seed)
    batches = random_batches(host, rows, count=1, dtype=dtype, seed=seed)
    settings = optimisation(rows, slots, max_norm=1e9, dtype=dtype)
    backend = NativeBackend(host, dtype)
    result = train(host, stack, seed_state(garden, slots), batches, settings, backend)
    found = {"loss": result.loss}
    for n in range(rows):
        views = host.layout.views(stack.host_optimizer.first[n : n + 1])
        found |= {f"{n} {name}": view for name, view in views.items()}
        views = host.buffers.views(stack.buffers[n : n + 1])
        found |= {f"{n} {name}": view for name, view in views.items()}
        for s, norms in enumerate(result.seed_tensor_norms):
            found[f"{n} {s} gradient norms"] = norms[n].nan_to_num()
            found[f"{n} {s} gradient"] = stack.seed_optimizers[s].first[n]
    return found


@pytest.mark.parametrize("host", [small_host(), small_mlp()], ids=lambda h: type(h).__name__)
def test_float_matches_double_away_from_decision_boundaries(host: Host):
    """Within 1e-5 of each tensor's norm, for every blueprint, on draws without a narrow gap."""
    names = ("mlp", "mlp_small") if not isinstance(host, CnnHost) else tuple(naive.CONV_BRANCHES)
    compared = 0
    for number, name in enumerate(names * 3):
        style = list(Style)[number % len(Style)]
        garden: Garden = [{0: Plant(name, style, **LIVES["blending"])}]
        for seed in range(100 * number, 100 * number + 40):
            if narrowest_gap(host, garden, seed) > NARROW_GAP:
                break
        else:
            continue
        exact, found = (trained(host, garden, dtype, seed) for dtype in (F64, F32))
        for what, expected in exact.items():
            # The gradient of a bias before a norm is pure rounding error and has no correct digits.
            size = max(expected.norm().item(), 1e-4)
            error = (found[what].to(F64) - expected).norm().item()
            assert error <= 1e-5 * size, (name, style, what, error / size)
        compared += 1
    assert compared >= len(names)


# --- threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("host", [small_host(), small_mlp()], ids=lambda h: type(h).__name__)
def test_results_are_bitwise_independent_of_the_number_of_threads(host: Host, dtype: torch.dtype):
    names = naive.MLP_BRANCHES if not isinstance(host, CnnHost) else naive.CONV_BRANCHES
    garden = mixed_gardens(3, 16, tuple(names))[0]
    batches, state = random_batches(host, len(garden), dtype=dtype), seed_state(garden, 3)
    found = []
    for threads in (1, 2, 5):
        stack = random_stack(host, len(garden), dtype)
        backend = NativeBackend(host, dtype, threads)
        result = train(host, stack, state, batches, backend=backend)
        engine = small_engine(host, len(garden), dtype)
        engine.stack, engine.backend = stack, backend
        measured = engine.measure(state, 0, committed=True)
        rows = {f"{n} {k}": v for n in range(len(garden)) for k, v in row_of(stack, n).items()}
        rows |= {"loss": result.loss, "validation": measured.scores.loss}
        rows |= {"contribution": measured.contribution.nan_to_num()}
        found.append(rows)
    assert_identical(found[1], found[0])
    assert_identical(found[2], found[0])


def test_a_non_finite_value_affects_only_its_own_environment():
    host, rows = small_host(), 5
    garden: Garden = [{0: Plant("conv_light")} for _ in range(rows)]
    clean = random_stack(host, rows, F32)
    batches, backend = random_batches(host, rows, dtype=F32), NativeBackend(host, F32, 2)
    state, expected = seed_state(garden, 3), copied(clean)
    train(host, expected, state, batches, backend=backend)
    for bad in (math.nan, math.inf):
        for poison in ("host", "seed", "moment"):
            stack = copied(clean)
            if poison == "host":
                stack.host[2, 3] = bad
            elif poison == "seed":
                stack.seeds[0][2, 9] = bad
            else:
                stack.host_optimizer.first[2, 0] = bad
            result = train(host, stack, state, batches, backend=backend)
            assert not bool(result.loss[2].isfinite()), (bad, poison)
            for n in (0, 1, 3, 4):
                assert_identical(row_of(stack, n), row_of(expected, n))


# --- fallback -----------------------------------------------------------------------------


def test_torch_replaces_the_library_for_unsupported_settings(caplog):
    odd = small_host(classes=3)
    half = choose_backend("auto", odd, Precision("cpu"), torch.float16, CPU)
    assert isinstance(half, TorchBackend)
    assert "float16" in caplog.text
    mixed = Precision("cpu", torch.bfloat16)
    assert isinstance(choose_backend("auto", odd, mixed, F32, CPU), TorchBackend)
    assert isinstance(choose_backend("native", odd, mixed, F32, CPU), TorchBackend)
    assert "full precision" in caplog.text
    assert isinstance(choose_backend("torch", odd, Precision("cpu"), F32, CPU), TorchBackend)
    assert isinstance(choose_backend("auto", odd, Precision("cpu"), F32, CPU), NativeBackend)


def test_torch_computes_subclasses_of_hosts(caplog):
    """A subclass may compute a different function of the same parameters."""

    @dataclass(frozen=True)
    class Halved(CnnHost):
        def block(self, parameters, buffers, index, x, training):
            return 0.5 * super().block(parameters, buffers, index, x, training)

    host = Halved((3,), 4, (6, 6, 2))
    assert isinstance(choose_backend("auto", host, Precision("cpu"), F32, CPU), TorchBackend)
    assert "Halved" in caplog.text
