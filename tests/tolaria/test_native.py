"""The native backend, and the native backend with torch for seeds unknown to it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from esper.kasmina.blueprints import Blueprint, register
from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.ops import conv2d
from esper.kasmina.stack import weight
from esper.leyline.actions import BLUEPRINTS, Style
from esper.native.library import has_matrix_unit, multiplies_bfloat16
from esper.tolaria.backends import Backend, HeldBack
from esper.tolaria.backends import native as native_module
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.backends.native import MixedBackend, NativeBackend
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.plan import Seeds
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
    minibatches,
    mixed_gardens,
    naive_environments,
    names_of,
    needs_native,
    optimisation,
    own_blueprints,
    random_batches,
    random_stack,
    row_of,
    seed_state,
    small_engine,
    small_gpt,
    small_host,
    small_mlp,
    train,
    train_naively,
)

pytestmark = needs_native

F32 = torch.float32
NARROW_GAP = 1e-4
# LayerNorm over few channels loses digits in any float computation.
HOSTS = small_host(), small_mlp(), small_gpt(width=32)
every_host = pytest.mark.parametrize("host", HOSTS, ids=lambda host: type(host).__name__)


# --- float ------------------------------------------------------------------------------------


def narrowest_gap(host: Host, garden: Garden, seed: int) -> float:
    """Smallest distance of a pre-activation to 0, or of a pixel to the maximum of its pool.

    Infinite where there is neither.
    """
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
    return min(gaps, default=math.inf)


def trained(
    host: Host,
    garden: Garden,
    backend: Backend,
    seed: int,
    dtype: torch.dtype | None = None,
    images: int = 6,
) -> dict[str, torch.Tensor]:
    """Losses, gradients (in the first moments) and statistics after one minibatch."""
    rows, slots = len(garden), len(host.slots)
    dtype = dtype or backend.dtype
    stack = random_stack(host, rows, dtype, seed)
    batches = random_batches(host, rows, 1, images, dtype, seed)
    settings = optimisation(rows, slots, max_norm=1e9, dtype=dtype)
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


@every_host
def test_float_matches_double_away_from_decision_boundaries(host: Host):
    """Within 1e-5 of each tensor's norm, for every blueprint, on draws without a narrow gap."""
    names, compared = names_of(host), 0
    for number, name in enumerate(names * 3):
        style = list(Style)[number % len(Style)]
        garden: Garden = [{0: Plant(name, style, **LIVES["blending"])}]
        for seed in range(100 * number, 100 * number + 40):
            if narrowest_gap(host, garden, seed) > NARROW_GAP:
                break
        else:
            continue
        exact, found = (
            trained(host, garden, NativeBackend(host, dtype), seed) for dtype in (F64, F32)
        )
        for what, expected in exact.items():
            # The gradient of a bias before a norm is pure rounding error and has no correct digits.
            size = max(expected.norm().item(), 1e-4)
            error = (found[what].to(F64) - expected).norm().item()
            assert error <= 1e-5 * size, (name, style, what, error / size)
        compared += 1
    assert compared >= len(names)


# --- bfloat16 ---------------------------------------------------------------------------------

both_roundings = pytest.mark.usefixtures("rounding")
WIDE = small_host(channels=(32, 35), kernel=3, pools=0, image=(8, 8, 2))
SPANNED_WIDE = replace(WIDE, slot_names=("wide0", "wide1"))
WIDER = small_host(channels=(40, 65, 33), kernel=3, pools=1, image=(10, 6, 1))  # pooled: 5 by 3


@pytest.fixture(params=["pairs", "matrices"])
def rounding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How rounded factors are multiplied."""
    by_unit = request.param == "matrices"
    if not (has_matrix_unit() if by_unit else multiplies_bfloat16()):
        pytest.skip(f"this processor does not multiply {request.param} of bfloat16")
    monkeypatch.setattr(native_module, "has_matrix_unit", lambda: by_unit)


@both_roundings
@pytest.mark.parametrize(
    ("host", "first", "images"),
    [(WIDE, "conv_light", 6), (SPANNED_WIDE, "conv_small", 6), (WIDER, "conv_small", 40)],
)
@pytest.mark.parametrize("seed", [3, 4])
def test_wide_convolutions_err_as_under_autocast(seed: int, host: Host, first: str, images: int):
    """At most twice as much, and by half a percent where autocast is nearly exact."""
    garden: Garden = [{}, {0: Plant(first), 1: Plant("conv_heavy")}]
    exact = trained(host, garden, NativeBackend(host, F64), seed, F64, images)
    rounded = trained(host, garden, NativeBackend(host, F32, 1, True), seed, F32, images)
    mixed = TorchBackend(host, Precision("cpu", torch.bfloat16))
    autocast = trained(host, garden, mixed, seed, F32, images)
    for what, expected in exact.items():
        size = max(expected.norm().item(), 1e-4)
        error, usual = ((x[what].to(F64) - expected).norm().item() for x in (rounded, autocast))
        assert error <= 2.0 * usual + 5e-3 * size, (what, error / size, usual / size)
    assert not torch.equal(rounded["0 conv1.weight"], exact["0 conv1.weight"].to(F32))


@both_roundings
@pytest.mark.parametrize(
    ("channels", "garden"), [((16, 31), [{0: Plant("conv_light")}]), ((40, 31), [{}])]
)
def test_convolutions_narrow_on_either_side_are_not_rounded(channels: tuple, garden: Garden):
    host = small_host(channels=channels, kernel=3, pools=0, image=(8, 8, 2))
    assert_identical(
        *(trained(host, garden, NativeBackend(host, F32, 1, flag), 3) for flag in (True, False))
    )


@both_roundings
def test_neither_threads_nor_non_finite_neighbours_change_a_rounded_host():
    """In the same memory, which different seeds shift; 35 channels leave half a pair empty."""
    garden: Garden = [{}, {0: Plant("conv_light")}, *[{1: Plant("conv_heavy")}] * 2]
    clean, batches = random_stack(WIDE, 4, F32), random_batches(WIDE, 4, dtype=F32)
    sick, divided, state = copied(clean), copied(clean), seed_state(garden, len(WIDE.slots))
    sick.host[:3] = math.nan
    for stack, threads in ((clean, 1), (sick, 1), (divided, 3)):
        train(WIDE, stack, state, batches, backend=NativeBackend(WIDE, F32, threads, True))
    assert bool(clean.host[3].isfinite().all())
    assert_identical(row_of(sick, 3), row_of(clean, 3))
    assert_identical(row_of(divided, 1), row_of(clean, 1))


@both_roundings
def test_a_rounded_host_validates_as_it_trains():
    """Validation rounds too, and pixels beyond the images do not count."""
    stack, data = random_stack(WIDE, 2, F32), random_batches(WIDE, 2, count=1, size=9, dtype=F32)
    held_back = HeldBack(data[0][0][:, :, :, 0][None], data[0][1][:1], torch.zeros(2).long())
    nobody = Seeds.acting(seed_state([{}, {}], len(WIDE.slots)))
    losses = []
    for flag in (False, True):
        scores, _ = NativeBackend(WIDE, F32, 1, flag).evaluate(stack, nobody, held_back, [])
        losses.append(scores.loss)
    assert not torch.equal(*losses)
    torch.testing.assert_close(*losses, rtol=0.02, atol=0.0)


# --- threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
@every_host
def test_results_are_bitwise_independent_of_the_number_of_threads(host: Host, dtype: torch.dtype):
    garden = mixed_gardens(3, 16, names_of(host))[0]
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


@pytest.mark.parametrize("image", [(6, 6, 2), (7, 5, 3)])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_pooling_in_the_norm_changes_no_bit(image: tuple[int, int, int], dtype: torch.dtype):
    """An isolated seed in every slot keeps the norms from pooling, and changes nothing else."""
    host = small_host(channels=(3, 5), pools=2, image=image)
    seeds: Garden = [{s: Plant("conv_light", **LIVES["training"]) for s in range(len(host.slots))}]
    batches = random_batches(host, 1, size=19, dtype=dtype)
    stacks = [random_stack(host, 1, dtype) for _ in range(2)]
    for stack, garden in zip(stacks, ([{}], seeds), strict=True):
        state = seed_state(garden, len(host.slots))
        train(host, stack, state, batches, backend=NativeBackend(host, dtype))
    assert torch.equal(stacks[0].host, stacks[1].host)
    assert torch.equal(stacks[0].buffers, stacks[1].buffers)


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


def test_of_predictions_that_are_not_finite_the_first_class_counts():
    """As in torch, for which NaN is larger than any number.

    Without attention, as 0 times the NaN of a later byte is NaN in torch.
    """
    host, rows = small_gpt(heads=0), 2
    stack = random_stack(host, rows, F32)
    host.layout.views(stack.host)["byte.weight"][1, 2:] = math.nan
    batches, state = random_batches(host, rows, dtype=F32), seed_state([{}] * rows, 3)
    accuracy = [
        train(host, copied(stack), state, batches, backend=backend).accuracy
        for backend in (NativeBackend(host, F32), TorchBackend(host, Precision("cpu")))
    ]
    torch.testing.assert_close(*accuracy)


# --- fallback -----------------------------------------------------------------------------


def test_torch_replaces_the_library_for_unsupported_settings(caplog, monkeypatch):
    odd = small_host(classes=3)
    half = choose_backend("auto", odd, Precision("cpu"), torch.float16, CPU)
    assert isinstance(half, TorchBackend)
    assert "float16" in caplog.text
    mixed = Precision("cpu", torch.float16)
    assert isinstance(choose_backend("auto", odd, mixed, F32, CPU), TorchBackend)
    assert isinstance(choose_backend("native", odd, mixed, F32, CPU), TorchBackend)
    assert "float32 and bfloat16, not float16" in caplog.text
    monkeypatch.setattr(native_module, "multiplies_bfloat16", lambda: False)
    rounded = Precision("cpu", torch.bfloat16)
    assert isinstance(choose_backend("auto", odd, rounded, F32, CPU), TorchBackend)
    assert "this processor does not multiply bfloat16" in caplog.text
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


OWN = "plain"
FOREIGN = (1, 4)
GARDEN: Garden = [
    {0: Plant("conv_light", **LIVES["blending"])},
    {1: Plant(OWN, **LIVES["blending"]), 2: Plant("attention", **LIVES["training"])},
    {},
    {0: Plant("depthwise", **LIVES["holding"]), 2: Plant("norm", **LIVES["training"])},
    {0: Plant(OWN, **LIVES["training"]), 1: Plant(OWN, **LIVES["holding"])},
]
"""Environments 1 and 4 have seeds that the library does not know."""


def plain(channels: int) -> Blueprint:
    """A 1x1 convolution."""
    fields = (weight("weight", channels, channels, 1, 1),)
    return Blueprint(fields, lambda p, x: conv2d(x, p["weight"]))


@pytest.fixture
def host() -> Iterator[Host]:
    """A host whose slots also accept the Python blueprint."""
    with own_blueprints():
        register(OWN, plain)
        yield small_host()


def backends(host: Host) -> tuple[MixedBackend, TorchBackend, NativeBackend]:
    others = TorchBackend(host, Precision("cpu"))
    return MixedBackend(NativeBackend(host, F64), others), others, NativeBackend(host, F64)


def test_environments_whose_seeds_are_all_known_train_natively(host: Host) -> None:
    state = seed_state(GARDEN, 3)
    seeds, rows = Seeds.training(state), len(GARDEN)
    batches = minibatches(random_batches(host, rows))
    ways = torch.tensor([0, 1, 2, 2, 1])
    rates = replace(optimisation(rows, 3), tuning=ways)
    mixed, others, native = backends(host)
    start = random_stack(host, rows)
    found, by_torch, by_native = (copied(start) for _ in range(3))
    result = mixed.train_epoch(found, seeds, batches, rates)
    expected = others.train_epoch(by_torch, seeds, batches, rates)
    foreign = torch.zeros(rows, 1, dtype=torch.bool)
    foreign[list(FOREIGN)] = True
    known = replace(seeds, computed=seeds.computed & ~foreign)
    alone = native.train_epoch(by_native, known, batches, rates)
    for n in range(rows):
        one, other = row_of(found, n), row_of(by_torch, n)
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-9)
        if n not in FOREIGN:
            assert_identical(one, row_of(by_native, n))
            assert result.loss[n] == alone.loss[n]
        assert not torch.equal(found.host[n], start.host[n])
    for name in ("loss", "accuracy", "host_gradient_norm", "seed_gradient_norm"):
        one, other = getattr(result, name), getattr(expected, name)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
    for one, other in zip(result.seed_tensor_norms, expected.seed_tensor_norms, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("shared", [False, True])
def test_validation_and_ablation_match_torch(host: Host, shared: bool) -> None:
    state = seed_state(GARDEN, 3)
    engine = small_engine(host, len(GARDEN), groups=[0] * 5 if shared else None)
    engine.stack = random_stack(host, len(GARDEN))
    mixed, others, _ = backends(host)
    engine.backend = others
    expected = engine.measure(state, 0, committed=True)
    engine.backend = mixed
    found = engine.measure(state, 0, committed=True)
    torch.testing.assert_close(found.contribution, expected.contribution, equal_nan=True)
    assert found.contribution[1, 1].isfinite()
    for one, other in ((found.scores, expected.scores), (found.committed, expected.committed)):
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.expected, other.expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [(1, 4), (0, 2)])
def test_one_backend_computes_a_uniform_stack(host: Host, rows: tuple, monkeypatch) -> None:
    mixed, others, native = backends(host)

    def refused(*_: object) -> None:
        raise AssertionError("the other one was asked")

    idle = mixed.native if rows == FOREIGN else mixed.fallback
    monkeypatch.setattr(idle, "train_epoch", refused)
    mine = [GARDEN[n] for n in rows]
    stack, seeds = random_stack(host, 2), Seeds.training(seed_state(mine, 3))
    twin, inputs = copied(stack), (minibatches(random_batches(host, 2)), optimisation(2, 3))
    mixed.train_epoch(stack, seeds, *inputs)
    (others if rows == FOREIGN else native).train_epoch(twin, seeds, *inputs)
    for n in range(2):
        assert_identical(row_of(stack, n), row_of(twin, n))


def test_choosing_the_mixed_backend_logs_one_line(host: Host, caplog) -> None:
    made = [choose_backend("auto", host, Precision("cpu"), F64, CPU) for _ in range(2)]
    assert all(isinstance(backend, MixedBackend) for backend in made)
    assert made[0].native.kind_of[BLUEPRINTS.index(OWN)] == -1
    (line,) = caplog.messages
    assert OWN in line
    assert line.endswith("hosts with such a seed use torch")
