"""Measurements of slots, and health and signals of seeds."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import blueprints
from esper.kasmina.blueprints import LastLayer
from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.module import ModuleHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.kasmina.newborns import HIDDEN_UNITS, chosen_rows, reference_weights
from esper.kasmina.seeds import SeedSignals
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.stages import Stage
from esper.tolaria.backends import Backend
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.backends.torch import FunctionalBackend
from esper.tolaria.precision import LossScales, Precision, ScaleTable
from esper.tolaria.results import SLOT_MEASURES, EpochResult, gradient_health, updated_signals
from esper.tolaria.slot_measures import measured_images
from esper.tolaria.stores import Stack
from oracles import naive
from oracles.residual import NaiveResidual
from residual_hosts import random_numbers, residual_host
from support import (
    CPU,
    F64,
    LIVES,
    SPANNED,
    Garden,
    Plant,
    backend_of,
    naive_environments,
    needs_native,
    optimisation,
    random_batches,
    random_stack,
    seed_state,
    small_gpt,
    small_host,
    small_mlp,
    train,
)

Batches = list[tuple[Tensor, Tensor]]
GAINS = {layer: 4 + layer for layer in LastLayer}
"""Column of each gain in ``SLOT_MEASURES``."""


# --- the reference ----------------------------------------------------------------------------


class Probe(nn.Module):
    """Keeps the activation after a slot and its gradient; ``newborn`` learns as if added.

    It learns from the measured images alone.
    """

    def __init__(self, seed: nn.Module | None, newborn: nn.Module | None, rows: slice):
        super().__init__()
        self.seed, self.newborn, self.rows = seed, newborn, rows

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        self.x = x.detach()
        # One operation, so that the gradient is the slot's own.
        self.y = 1.0 * (x if self.seed is None else self.seed(x))
        self.y.retain_grad()
        if self.newborn is None:
            return self.y
        branch = self.newborn(self.x if source is None else source.detach())
        branch = branch * counted(x.shape[2], self.rows)[:, None]
        branch = branch * counted(len(x), slice(measured_images(len(x))))[:, None, None, None]
        return self.y + (branch - branch.detach())


def counted(count: int, chosen: slice) -> Tensor:
    """Weights of ``count`` terms with which the chosen ones stand for all, the others for none."""
    weights = torch.zeros(count, dtype=F64)
    weights[chosen] = 1.0
    return weights * count / weights.sum()


class Hidden(nn.Module):
    """A branch of hidden units with the reference weights, in the chosen rows of pixels."""

    def __init__(self, slot: SlotSpec):
        super().__init__()
        self.slot, (self.weights,) = slot, reference_weights(slot)
        self.last = nn.Parameter(torch.zeros(slot.channels, HIDDEN_UNITS, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        rows = chosen_rows(x.shape[2])
        if self.slot.family == "conv":
            z = nn.functional.conv2d(x, self.weights, padding=1)[:, :, rows]
            z = naive.group_norm(HIDDEN_UNITS).to(F64)(z).relu()
        else:
            normal = nn.functional.layer_norm(x.movedim(1, -1), (x.shape[1],))
            z = (normal @ self.weights[:, :, 0, 0].T).relu().movedim(-1, 1)
        whole = torch.zeros(*x.shape, dtype=F64)
        whole[:, :, rows] = torch.einsum("bkhw,ck->bchw", z, self.last)
        return whole


class Linear(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.last = nn.Parameter(torch.zeros(channels, channels, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bkhw,ck->bchw", x, self.last)


def evenly_attending(channels: int) -> nn.Module:
    """Attention to all earlier positions alike, whose values are its input."""
    module = naive.SequenceAttention(channels)
    with torch.no_grad():
        module.joint.weight.zero_()[2 * channels :] = torch.eye(channels)
    return module


def units_of(host: Host, slot: SlotSpec) -> nn.Module:
    """New units with the reference weights, for the layer that the slot spans."""
    name = "conv_small" if slot.family == "conv" else "mlp_small"
    module, (weights, *further) = naive.new_units(host, slot.name, name), reference_weights(slot)
    if slot.family == "conv":
        kernel = module.narrow.kernel_size[0]
        module.widen = naive.conv(weights.shape[1], HIDDEN_UNITS, weights.shape[2])
        module.narrow = naive.conv(HIDDEN_UNITS, slot.channels, kernel)
    else:
        module.widen = nn.Linear(weights.shape[1], HIDDEN_UNITS, bias=False)
        module.narrow = nn.Linear(HIDDEN_UNITS, slot.channels, bias=False)
    module.norm = naive.group_norm(HIDDEN_UNITS)
    for i in range(1, 1 + len(further)):
        module.add_module(f"widen{i}", nn.Linear(HIDDEN_UNITS, HIDDEN_UNITS, bias=False))
        module.add_module(f"norm{i}", naive.group_norm(HIDDEN_UNITS))
    module = module.to(F64)
    with torch.no_grad():
        module.widen.weight.copy_(weights.view_as(module.widen.weight))
        for i, each in enumerate(further, 1):
            getattr(module, f"widen{i}").weight.copy_(each[:, :, 0, 0])
    return module


def newborn(host: Host, slot: SlotSpec, layer: LastLayer) -> tuple[nn.Module, Callable]:
    """A newborn seed with such a last layer, and the last layer's parameter."""
    if slot.span is not None:
        return units_of(host, slot), lambda m: m.narrow.weight
    if layer is LastLayer.HIDDEN:
        return Hidden(slot), lambda m: m.last
    if layer is LastLayer.LINEAR:
        return Linear(slot.channels), lambda m: m.last
    if slot.family == "sequence":
        if layer is LastLayer.NORM:
            return naive.SequenceNorm(slot.channels), lambda m: m.scale
        return evenly_attending(slot.channels), lambda m: m.out.weight
    return {
        LastLayer.SCALE: (naive.Attention(slot.channels), lambda m: m.excite.bias),
        LastLayer.NORM: (naive.Norm(slot.channels), lambda m: m.scale),
        LastLayer.POINTWISE: (naive.SingleConv(slot.channels, 1), lambda m: m.conv.weight),
        LastLayer.SPATIAL: (naive.SingleConv(slot.channels, 3), lambda m: m.conv.weight),
    }[layer]


def expected_measures(
    host: Host, stack, garden: Garden, batch: tuple[Tensor, Tensor], module_of=naive.naive_host
) -> Tensor:
    """What the backends must measure, one environment and one newborn seed after the other."""
    found = torch.full((len(garden), len(host.slots), len(SLOT_MEASURES)), torch.nan, dtype=F64)
    settings = optimisation(len(garden), len(host.slots))
    for n, environment in enumerate(naive_environments(host, stack, garden, settings, module_of)):
        for s, slot in enumerate(host.slots):
            if slot.name in environment.seeds:
                continue
            for layer in slot.last_layers:
                module, last_of = newborn(host, slot, layer)
                last = last_of(module.to(F64))
                with torch.no_grad():
                    last.zero_()
                # The sums of vectors and numbers include every row.
                every = layer in (LastLayer.SCALE, LastLayer.NORM) or slot.span is not None
                rows = slice(None) if every else chosen_rows(slot.size[0])
                seeds = dict(environment.seeds)
                probe = seeds[slot.name] = Probe(None, module, rows)
                environment.host.zero_grad()
                predictions = passed(environment.host, seeds, batch, n)
                even = slot.family == "sequence" and layer is LastLayer.SPATIAL
                found[n, s, GAINS[layer]] = last.grad.norm() / (3.0**0.5 if even else 1.0)
            kept = measured_images(len(probe.x))
            mine = predictions * kept / len(probe.x)
            found[n, s, 0] = (probe.y.grad[:kept] * predictions).norm() / mine**0.5
            found[n, s, 1] = ratio(environment.host, FEEDING[type(host), slot.name])
            found[n, s, 2] = probe.x[:kept].square().mean().sqrt()
            found[n, s, 3] = (probe.x[:kept] > 0).double().mean()
    return found


def passed(module: nn.Module, seeds: dict, batch: tuple[Tensor, Tensor], n: int) -> int:
    """A forward and a backward pass of environment ``n``; returns the number of predictions."""
    images, labels = batch
    module.train()
    logits = module(images[:, :, :, n].permute(0, 3, 1, 2).contiguous(), seeds)
    nn.functional.cross_entropy(logits, labels[n].flatten()).backward()
    return labels[n].numel()


def ratio(module: nn.Module, prefixes: tuple[str, ...]) -> Tensor:
    """Gradient norm over norm of the parameters whose names begin with one of ``prefixes``."""
    mine = [p for name, p in module.named_parameters() if name.startswith(prefixes)]
    gradients = torch.cat([p.grad.flatten() for p in mine])
    return gradients.norm() / torch.cat([p.detach().flatten() for p in mine]).norm()


FEEDING = {
    (CnnHost, "r0c0"): ("conv0.", "norm0."),
    (CnnHost, "r1c0"): ("conv0.", "norm0."),
    (CnnHost, "r0c1"): ("conv1.", "norm1."),
    (ModuleHost, "early.inner"): ("stem.", "early.norm.", "early.first."),
    (ModuleHost, "between"): ("early.second.", "early.shortcut."),
    (ModuleHost, "late.inner"): ("late.norm.", "late.first."),
    (ModuleHost, "last"): ("late.second.", "late.shortcut.", "features."),
}
for _block in range(3):
    FEEDING[type(small_mlp()), f"r0c{_block}"] = (f"linear{_block}.", f"norm{_block}.")
    names = f"attention{_block + 1}.", f"perceptron{_block + 1}."
    FEEDING[TransformerHost, f"r0c{_block}"] = names
    for _layer, _host in (("conv", CnnHost), ("linear", type(small_mlp()))):
        FEEDING[_host, f"wide{_block}"] = (f"{_layer}{_block}.", f"norm{_block}.")
FEEDING[type(small_mlp()), "wide_all"] = FEEDING[type(small_mlp()), "wide0"]


def measured(backend: Backend, host: Host, stack, garden: Garden, batches: Batches) -> Tensor:
    state = seed_state(garden, len(host.slots))
    return train(host, stack, state, batches, backend=backend).slots


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, equal_nan=True)


# --- all hosts, all layers --------------------------------------------------------------------


def gardens(names: tuple[str, str]) -> Garden:
    """A bare host, and hosts with an acting, an isolated and a dormant seed."""
    acting, learning = Plant(names[0], **LIVES["blending"]), Plant(names[1], **LIVES["training"])
    return [{}, {0: acting}, {1: learning}, {2: acting, 0: learning}]


HOSTS: dict[str, tuple[Host, tuple[str, str]]] = {
    "cnn": (small_host(), ("conv_light", "attention")),
    "cnn of many rows": (small_host(image=(17, 5, 2)), ("conv_heavy", "norm")),
    "cnn of one pixel": (small_host(image=(2, 2, 1)), ("depthwise", "bottleneck")),
    "wide cnn": (small_host(channels=(32, 18)), ("conv_small", "norm")),
    "mlp": (small_mlp(), ("mlp", "mlp_small")),
}


def compared(
    host: Host, stack: Stack, garden: Garden, size: int, module_of=naive.naive_host, backend=None
) -> Tensor:
    """The measures of the backend, after they were compared with the expected ones."""
    batches = random_batches(host, len(garden), 1, size)
    expected = expected_measures(host, stack, garden, batches[0], module_of)
    found = measured(backend or backend_of(host), host, stack, garden, batches)
    assert_close(found, expected)
    return found


@pytest.mark.parametrize("name", HOSTS)
def test_built_in_hosts_match_newborn_modules(name: str, backend: str) -> None:
    host, names = HOSTS[name]
    garden = gardens(names)
    found = compared(host, random_stack(host, len(garden)), garden, 7)
    wanted = [layer in host.slots[0].last_layers for layer in LastLayer]
    assert found[0, 0, 4:].isfinite().tolist() == wanted
    for n, plants in enumerate(garden):
        for s in range(len(host.slots)):
            assert bool(found[n, s].isnan().all()) is (s in plants)


@pytest.mark.parametrize("host", SPANNED, ids=lambda host: f"{host.summary} {host.slot_names}")
def test_spanned_layers_match_newborn_units(host: Host, backend: str) -> None:
    slots = [slot.name for slot in host.slots]
    names = ("mlp", "mlp_small") if host.slots[0].family == "mlp" else ("conv_heavy", "conv_small")
    acting, learning = Plant(names[0], **LIVES["blending"]), Plant(names[1], **LIVES["training"])
    garden = [{}, {0: acting}, {len(slots) - 1: learning}]
    found = compared(host, random_stack(host, 3), garden, 7)
    alone = found[0, slots.index("wide0"), 4:]
    assert alone.isfinite().tolist() == [layer is LastLayer.HIDDEN for layer in LastLayer]


@pytest.mark.parametrize("size", [4, 11])
def test_transformers_match_newborn_modules(size: int, backend: str) -> None:
    host, garden = small_gpt(width=8), gardens(("lora", "attention"))
    found = compared(host, random_stack(host, len(garden)), garden, size)
    absent = {LastLayer.SCALE, LastLayer.POINTWISE}
    assert {layer for layer in LastLayer if found[0, 0, GAINS[layer]].isnan()} == absent


def test_user_modules_match_newborn_modules() -> None:
    host, garden = residual_host(), gardens(("conv_light", "norm"))
    backend = FunctionalBackend(host, Precision("cpu"))
    compared(host, random_numbers(host, len(garden)), garden, 5, NaiveResidual, backend)


@pytest.mark.parametrize("rank", [8, 32])
def test_a_map_of_low_rank_gains_its_share_of_the_full_rank(rank: int) -> None:
    """The mean over random down projections, whose variance is 1 / (3 C)."""
    channels, generator = 6, torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 5, channels, generator=generator, dtype=F64).unbind()
    full = (g.T @ x).square().sum()
    down = (2 * torch.rand(3_000, rank, channels, generator=generator, dtype=F64) - 1) / 6**0.5
    squares = torch.einsum("pc,drk,pk->dcr", g, down, x).square().sum((1, 2))
    torch.testing.assert_close(squares.mean(), full * rank / (3 * channels), rtol=0.05, atol=0.0)


def test_every_blueprint_names_the_layer_that_it_has() -> None:
    """Only the last layer of a newborn seed has a gradient, and LastLayer tells its shape."""
    sizes = {
        LastLayer.SCALE: lambda c: {c, c * max(1, c // 4)},
        LastLayer.NORM: lambda c: {1},
        LastLayer.POINTWISE: lambda c: {c * c},
        LastLayer.SPATIAL: lambda c: {9 * c * c},
    }
    generator, seen = torch.Generator().manual_seed(0), set()
    for slot in (small_host(channels=(12,)).slots[0], small_mlp().slots[0], small_gpt().slots[0]):
        for kind in slot.kinds:
            built, layout = blueprints.build(kind, slot.channels, slot.family), slot.layouts[kind]
            constant, bound = layout.initial_distribution(layout.size)
            row = constant + bound * torch.rand(layout.size, generator=generator, dtype=F64)
            theta = row[None].requires_grad_()
            size = 3, *slot.size, 1, slot.channels
            x, g = torch.randn(2, *size, generator=generator, dtype=F64).unbind()
            (built.forward(layout.views(theta), x) * g).sum().backward()
            gradients = layout.views(theta.grad)
            alive = {view.numel() for view in gradients.values() if bool(view.any())}
            seen.add(built.last_layer)
            if slot.family == "conv" and built.last_layer in sizes:
                assert alive == sizes[built.last_layer](slot.channels), BLUEPRINTS[kind]
            if built.last_layer not in (LastLayer.SCALE,):
                assert len(alive) == 1, BLUEPRINTS[kind]
    assert seen == {*LastLayer}


# --- which minibatch, images, rows ------------------------------------------------------------


@pytest.mark.parametrize(("images", "kept"), [(1, 1), (2, 1), (7, 4), (32, 16)])
def test_half_the_images_are_measured(images: int, kept: int) -> None:
    assert measured_images(images) == kept


def test_images_beyond_the_first_half_change_only_the_block_ratio(backend: str) -> None:
    host = small_host()
    (batch,) = random_batches(host, 2, 1, 8)
    # Group norm of the small host treats every image alone.
    order = torch.tensor([3, 1, 0, 2, 7, 4, 6, 5])
    within = torch.tensor([3, 1, 0, 2, 4, 5, 6, 7])
    found = [
        measured(
            backend_of(host),
            host,
            random_stack(host, 2),
            [{}, {}],
            [(batch[0][places], batch[1].unflatten(1, (8, -1))[:, places].flatten(1))],
        )
        for places in (order, within, torch.arange(8).roll(4))
    ]
    assert_close(found[0], found[1])
    other = torch.isclose(found[2], found[1], rtol=1e-9, equal_nan=True)
    assert bool(other[..., 1].all())
    assert not bool(other[..., [0, 2]].any())


def test_the_last_minibatch_is_measured_also_on_frozen_hosts(backend: str) -> None:
    host, garden = small_host(), [{}, {}]
    first, last = random_batches(host, 2, 2)
    slots, state = len(host.slots), seed_state(garden, 3)
    settings = replace(optimisation(2, slots), host_learning_rate=torch.zeros(2, dtype=F64))

    def slots_after(batches: Batches) -> Tensor:
        return train(host, random_stack(host, 2), state, batches, settings).slots

    found = slots_after([first, last])
    assert_close(found, slots_after([last]))
    assert not torch.allclose(found, slots_after([first]), equal_nan=True)
    assert bool((found[..., 1] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_row_is_measured_alike_alone_and_beside_nan(backend: str, dtype: torch.dtype) -> None:
    host = small_host()
    (batch,) = random_batches(host, 3, 1, dtype=dtype)

    def slots_of(rows: list[int], spoilt: bool) -> Tensor:
        stack = random_stack(host, 3, dtype)
        stack.host[1] = torch.nan if spoilt else stack.host[1]
        part = stack.of_rows(torch.tensor(rows))
        own = [(batch[0][:, :, :, rows], batch[1][rows])]
        return train(host, part, seed_state([{}] * len(rows), 3), own).slots

    together, spoilt = slots_of([0, 1, 2], False), slots_of([0, 1, 2], True)
    assert torch.equal(spoilt[::2].nan_to_num(), together[::2].nan_to_num())
    assert bool(spoilt[1, :, 2].isnan().all())
    tolerance = 0.0 if backend == "native" else 1e-5 if dtype is torch.float32 else 1e-12
    alone = slots_of([2], False)
    torch.testing.assert_close(alone[0], together[2], rtol=tolerance, atol=0.0, equal_nan=True)


@needs_native
def test_threads_do_not_change_measurements() -> None:
    host = small_host()
    (batch,) = random_batches(host, 5, 1)
    found = [
        measured(NativeBackend(host, F64, threads), host, random_stack(host, 5), [{}] * 5, [batch])
        for threads in (1, 3)
    ]
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())


def test_measurements_are_those_of_the_unscaled_loss() -> None:
    host, rows = small_host(), 2
    (batch,) = random_batches(host, rows, 1)
    state, plain = seed_state([{}] * rows, 3), optimisation(rows, 3)
    scales = LossScales(ScaleTable.fresh(rows, CPU), torch.arange(rows))
    found = [
        train(host, random_stack(host, rows), state, [batch], settings).slots
        for settings in (plain, replace(plain, scales=scales))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0.0, equal_nan=True)


def test_a_forgotten_row_is_unknown() -> None:
    host = small_host()
    (batch,) = random_batches(host, 2, 1)
    epoch = train(host, random_stack(host, 2), seed_state([{}, {}], 3), [batch])
    before = epoch.slots.clone()
    epoch.forget(torch.tensor([True, False]))
    assert bool(epoch.slots[0].isnan().all())
    assert_close(epoch.slots[1], before[1])


def test_hidden_units_are_drawn_like_those_of_a_seed() -> None:
    bound = (5 * 9) ** -0.5
    (drawn,) = reference_weights(small_host(channels=(3, 5)).slots[2])
    assert drawn.shape == (HIDDEN_UNITS, 5, 3, 3)
    assert float(drawn.abs().max()) < bound
    assert float(drawn.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert len(drawn.unique()) == drawn.numel()


@pytest.mark.parametrize(
    ("height", "rows"), [(1, [0]), (3, [0, 1, 2]), (8, [1, 3, 5, 7]), (32, [4, 12, 20, 28])]
)
def test_about_four_rows_are_chosen_at_equal_distances(height: int, rows: list[int]) -> None:
    assert list(range(height))[chosen_rows(height)] == rows


NAN, INF = float("nan"), float("inf")
NO_SLOTS = torch.zeros(3, 1, 1)

CASES = {
    "all in order": ([1.0, 0.1, 9.9], 3, 1.0, False),
    "one of four vanishes": ([1.0, 1e-8, 1.0, 1.0], 4, 1.0 - 0.5 / 4, False),
    "all vanish": ([0.0, 0.0], 2, 0.5, False),
    "one of four explodes": ([1.0, 10.1, 1.0, 1.0], 4, 1.0 - 0.8 / 4, True),
    "all explode": ([11.0, 1e9], 2, 0.2, True),
    "half vanish and half explode": ([0.0, 50.0], 2, 1.0 - 0.5 / 2 - 0.8 / 2, True),
    "just at the limits": ([1e-7, 10.0], 2, 1.0, False),
    "one is NaN": ([1.0, NAN, 1.0], 3, 0.0, True),
    "one is infinite": ([1.0, 1.0, INF], 3, 0.0, True),
    "what does not count is NaN": ([1.0, NAN, NAN], 1, 1.0, False),
    "what does not count is zero or huge": ([1.0, 0.5, 0.0, 99.0], 2, 1.0, False),
    "what does not count hides nothing": ([NAN, 1.0, 1.0], 1, 0.0, True),
}


@pytest.mark.parametrize(("norms", "count", "health", "exploding"), CASES.values(), ids=CASES)
def test_health_weights_vanishing_and_exploding_fractions(
    norms: list[float], count: int, health: float, exploding: bool
):
    found, explodes = gradient_health(torch.tensor([norms], dtype=F64), torch.tensor([count]))
    assert found.item() == pytest.approx(health, abs=1e-6)
    assert explodes.item() is exploding


def test_rows_are_checked_independently():
    norms = torch.tensor([[1.0, 1.0], [NAN, 1.0], [0.0, 1.0], [20.0, NAN]])
    health, exploding = gradient_health(norms, torch.tensor([2, 2, 2, 1]))
    assert health.tolist() == pytest.approx([1.0, 0.0, 0.75, 0.2])
    assert exploding.tolist() == [False, True, False, True]


def test_signals_keep_the_last_health_and_smooth_the_contribution_velocity():
    slots = small_host(slot_names=("r0c0",)).slots
    # norm has three parameter tensors; the third environment's seed is not computed.
    state = seed_state(
        [
            {0: Plant("norm", **LIVES["holding"])},
            {0: Plant("norm", **LIVES["training"])},
            {0: Plant("norm", stage=Stage.GERMINATED, alpha=0.0)},
        ],
        1,
    )
    norms = torch.full((3, slots[0].segment_count), NAN)
    norms[0, :3] = torch.tensor([1.0, 0.0, 1.0])
    norms[1, :3] = torch.tensor([1.0, 1.0, 30.0])
    totals = torch.tensor([[1.4], [30.0], [NAN]])
    epoch = EpochResult(totals[:, 0], totals[:, 0], totals[:, 0], totals, [norms], NO_SLOTS)
    previous = SeedSignals.unknown((3, 1), CPU)
    previous.contribution[0], previous.contribution_velocity[0] = 0.1, 0.02
    previous.health[1] = 0.9
    contribution = torch.tensor([[0.3], [NAN], [NAN]])

    previous.gradient_ratio[1] = 0.5
    previous.baseline[0], previous.birth_accuracy[0] = 0.3, 0.2
    epoch.host_gradient_norm = torch.tensor([2.0, 3.0, 4.0])
    accuracy, parameters = torch.tensor([0.45, 0.5, 0.6]), torch.tensor([[49], [100], [9]])

    signals = updated_signals(
        previous, state, slots, epoch, contribution, accuracy, parameters, 400
    )
    # Root-mean-square gradients: 1.4 / 7 over 2 / 20; 30 / 10 over 3 / 20, smoothed with 0.5.
    assert signals.gradient_ratio[:, 0].tolist() == pytest.approx(
        [2.0, 0.9 * 0.5 + 0.1 * 20.0, NAN], nan_ok=True
    )
    assert signals.improvement[:, 0].tolist() == pytest.approx([0.15, NAN, NAN], nan_ok=True)
    assert signals.birth_accuracy[:, 0].tolist() == pytest.approx([0.2, NAN, NAN], nan_ok=True)
    assert signals.health[:, 0].tolist() == pytest.approx(
        [1.0 - 0.5 / 3, 1.0 - 0.8 / 3, NAN], nan_ok=True
    )
    assert signals.exploding[:, 0].tolist() == [False, True, False]
    assert signals.previous_health[:, 0].tolist() == pytest.approx([NAN, 0.9, NAN], nan_ok=True)
    assert signals.gradient_norm[:, 0].tolist() == pytest.approx([1.4, 30.0, NAN], nan_ok=True)
    assert signals.contribution_velocity[:, 0].tolist() == pytest.approx(
        [0.7 * 0.02 + 0.3 * 0.2, 0.0, 0.0]
    )
