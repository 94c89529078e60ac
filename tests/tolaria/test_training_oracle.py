"""Five optimizer steps, compared with one module per environment, in fp64."""

import math

import pytest
import torch

from esper.kasmina.hosts.host import Host
from esper.kasmina.rng import Purpose, random_bits, to_integers
from esper.leyline.actions import BLUEPRINTS, Style
from esper.leyline.stages import Stage
from esper.tolaria.backends import Optimisation
from esper.tolaria.plan import CHUNK
from esper.tolaria.results import EpochResult
from oracles.naive import NaiveEnvironment
from support import (
    BLUEPRINT_NAMES,
    IDLE_STAGES,
    LIVES,
    MLP_NAMES,
    SPANNED,
    Garden,
    Plant,
    assert_same,
    assert_same_environment,
    every_plant,
    gardens_of,
    mixed_gardens,
    naive_environments,
    once,
    optimisation,
    random_batches,
    random_stack,
    seed_state,
    small_engine,
    small_host,
    small_mlp,
    train,
    train_naively,
)

pytestmark = pytest.mark.usefixtures("backend")

MIXED = mixed_gardens(slots=3, rows=16)
MIXED_MLP = mixed_gardens(3, 18, MLP_NAMES)


def check(
    host: Host, garden: Garden, batch: int = 6, max_norm: float = 1.0, momentum: float | None = None
) -> EpochResult:
    """Train both and compare all values that they store or report."""
    rows, slots = len(garden), len(host.slots)
    stack, batches = random_stack(host, rows), random_batches(host, rows, size=batch)
    settings = optimisation(rows, slots, max_norm, momentum=momentum)
    environments = modules_after(host, garden, batch, settings)
    result = train(host, stack, seed_state(garden, slots), batches, settings)
    for n, environment in enumerate(environments):
        assert_same_environment(host, stack, n, environment)
        assert_same_report(host, result, n, environment)
    return result


@once
def modules_after(
    host: Host, garden: Garden, batch: int, settings: Optimisation
) -> list[NaiveEnvironment]:
    """The oracle after training, which is one for all backends."""
    rows = len(garden)
    environments = naive_environments(host, random_stack(host, rows), garden, settings)
    train_naively(environments, random_batches(host, rows, size=batch))
    return environments


def assert_same_report(host: Host, result: EpochResult, n: int, environment) -> None:
    steps = len(environment.losses)
    assert_same(result.loss[n], sum(environment.losses) / steps, f"loss of {n}")
    assert_same(result.accuracy[n], sum(environment.hits) / steps, f"accuracy of {n}")
    assert_same(result.host_gradient_norm[n], environment.host_norm, f"host norm of {n}")
    for s, slot in enumerate(host.slots):
        by_tensor = result.seed_tensor_norms[s][n]
        if slot.name not in environment.seeds:
            assert result.seed_gradient_norm[n, s].isnan()
            assert by_tensor.isnan().all()
            continue
        what = f"gradient norm of {slot.name} in {n}"
        assert_same(result.seed_gradient_norm[n, s], environment.seed_norms[slot.name], what)
        layout = slot.layouts[BLUEPRINTS.index(environment.seeds[slot.name].blueprint)]
        for field, norm in zip(layout.fields, by_tensor, strict=False):
            expected = environment.tensor_norms[slot.name][field.name]
            assert_same(norm, expected, f"{what}, {field.name}")


@pytest.mark.parametrize(("gardens", "names"), [(MIXED, BLUEPRINT_NAMES), (MIXED_MLP, MLP_NAMES)])
def test_mixed_gardens_contain_every_plant(gardens: list[Garden], names: tuple[str, ...]):
    grown = {plant for garden in gardens for plants in garden for plant in plants.values()}
    assert grown == set(every_plant(names))
    assert len(grown) == len(names) * len(Style) * len(LIVES)


CHANNELS = [((4,), 0), ((4,), 1), ((3, 5), 0), ((3, 5), 1), ((3, 5), 2), ((3, 5, 4), 0)]
BARE = [
    *(
        (small_host(channels=channels, kernel=kernel, pools=pools), 3)
        for channels, pools in [*CHANNELS, ((3, 5, 4), 2)]
        for kernel in (1, 3)
    ),
    *((small_mlp(widths=widths), rows) for widths in ((4,), (3, 5), (1, 3)) for rows in (1, 3)),
    *((small_host(channels=(1, 3)), rows) for rows in (1, 3)),
    *((small_host(), 1), (small_mlp(), 1)),
]
"""Hosts and numbers of environments. Of a single one nothing is grouped."""


@pytest.mark.parametrize(("host", "rows"), BARE, ids=str)
def test_a_bare_host_trains_like_its_module(host: Host, rows: int):
    check(host, [{} for _ in range(rows)])


@pytest.mark.parametrize(
    ("host", "plants"),
    [
        (small_host(), {0: Plant("depthwise"), 2: Plant("conv_heavy", Style.GATED_GATE)}),
        (small_mlp(), {0: Plant("mlp", Style.GATED_GATE), 2: Plant("mlp_small")}),
    ],
    ids=["cnn", "mlp"],
)
def test_a_single_host_with_seeds_trains_like_its_module(host: Host, plants: dict[int, Plant]):
    check(host, [plants])


@pytest.mark.parametrize("host", [small_host(channels=(1,)), small_host(pools=2)], ids=str)
@pytest.mark.parametrize("name", BLUEPRINT_NAMES)
def test_seeds_of_slots_with_one_channel_or_pixel_train_like_their_modules(host: Host, name: str):
    """The backward pass of group norm has crashed here, instead of raising."""
    last = len(host.slots) - 2 if host.pools else 0
    isolated = Plant(name, **LIVES["training"])
    for slot in {0, last, len(host.slots) - 1}:
        check(host, [{slot: isolated}, {slot: Plant(name, Style.GATED_GATE)}])
        check(host, [{slot: isolated}, {slot: isolated}])


@pytest.mark.parametrize(
    ("host", "garden"),
    [*((small_host(), garden) for garden in MIXED), *((small_mlp(), g) for g in MIXED_MLP)],
    ids=lambda part: f"{len(part)} environments" if isinstance(part, list) else part.summary,
)
def test_seeds_of_every_kind_train_like_their_modules(host: Host, garden: Garden):
    check(host, garden)


@pytest.mark.parametrize(
    ("host", "garden"),
    [(host, garden) for host in SPANNED for garden in gardens_of(host, 31)],
    ids=lambda part: f"{len(part)} environments" if isinstance(part, list) else part.summary,
)
def test_units_of_spanned_layers_train_like_their_modules(host: Host, garden: Garden):
    """Beside all other seeds, in minibatches that leave lanes unused."""
    check(host, garden, batch=9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_trains_hosts_and_seeds_like_their_modules(momentum: float):
    check(small_host(), MIXED[0], momentum=momentum)
    check(small_host(), [{}, {}], momentum=momentum)


@pytest.mark.parametrize("batch", [2, 7, 8, 9, 33, 70])
def test_minibatches_of_any_size_train_like_their_modules(batch: int):
    """Batch sizes of one register, several registers, and with unused lanes."""
    garden = [
        {0: Plant("conv_heavy"), 1: Plant("depthwise", Style.GATED_GATE)},
        {0: Plant("bottleneck", **LIVES["training"]), 2: Plant("norm", Style.LINEAR_MULTIPLY)},
        {1: Plant("attention", Style.LINEAR_MULTIPLY), 2: Plant("conv_light")},
    ]
    check(small_host(), garden, batch)
    check(small_mlp(), [{0: Plant("mlp", Style.GATED_GATE), 1: Plant("mlp_small")}], batch)


@pytest.mark.parametrize("channels", [(1, 2), (7, 9), (13, 6), (4, 17)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_channels_of_any_number_train_like_their_modules(channels: tuple[int, ...], kernel: int):
    host = small_host(channels=channels, kernel=kernel, image=(5, 7, 3))
    check(host, [{0: Plant("conv_light"), 2: Plant("conv_heavy")}, {}], batch=11)


@pytest.mark.parametrize("channels", [(16, 21, 18), (32, 41, 34)])
@pytest.mark.parametrize(("image", "batch"), [((8, 8, 3), 11), ((12, 6, 1), 8), ((7, 10, 3), 9)])
def test_wide_blocks_train_like_their_modules(
    image: tuple[int, int, int], batch: int, channels: tuple[int, ...]
):
    """Of 16 and more channels, which are convolved by tiles where height and width are even."""
    host = small_host(channels=channels, kernel=3, image=image, pools=0)
    check(host, [{0: Plant("conv_heavy"), 1: Plant("conv_light", **LIVES["training"])}, {}], batch)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_blocks_with_norms_that_vanish_or_turn_the_sign_train_like_their_modules(value: float):
    """At 0 all pixels of a window are equal, and the first one has the gradient."""
    host, rows = small_host(channels=(4, 6), pools=2), 2
    stack = random_stack(host, rows)
    for name, weights in host.layout.views(stack.host).items():
        if name.startswith("norm") and name.endswith("weight"):
            weights.fill_(value)
    settings, batches = optimisation(rows, len(host.slots), 1.0), random_batches(host, rows)
    environments = naive_environments(host, stack, [{}] * rows, settings)
    train(host, stack, seed_state([{}] * rows, len(host.slots)), batches, settings)
    train_naively(environments, batches)
    for n, environment in enumerate(environments):
        assert_same_environment(host, stack, n, environment)


def test_each_seed_is_clipped_like_its_module():
    """Seeds in these small hosts have small gradients, so the clipping norm is small too."""
    limit = 0.02
    norms = check(small_host(), MIXED[1], max_norm=limit).seed_gradient_norm
    assert (norms > 2 * limit).any()
    assert (norms < limit / 2).any()


@pytest.mark.parametrize("pools", [0, 2])
def test_seeds_train_like_their_modules_without_pools_and_behind_the_last_pool(pools: int):
    host = small_host(pools=pools)
    slots = len(host.slots)
    plants = every_plant()[:: 168 // (3 * slots)]
    check(host, [dict(enumerate(plants[n * slots : (n + 1) * slots])) for n in range(3)])


def test_seeds_of_wide_slots_train_like_their_modules():
    """36 channels: several norm groups, and hidden widths of a quarter of the channels."""
    host = small_host(channels=(36,), image=(4, 4, 2), pools=0)
    check(host, [{0: Plant(name, Style.GATED_GATE)} for name in BLUEPRINT_NAMES], batch=3)
    host = small_mlp(widths=(36,))
    check(host, [{0: Plant(name, Style.GATED_GATE)} for name in MLP_NAMES], batch=3)


@pytest.mark.parametrize("life", ["training", "fossilised"])
def test_more_seeds_of_a_kind_than_fit_one_chunk_train_like_their_modules(life: str):
    host = small_host(slot_names=("r0c0",))
    check(host, [{0: Plant("conv_small", **LIVES[life])} for _ in range(CHUNK + 2)])


def test_frozen_and_learning_seeds_of_one_kind_train_like_their_modules():
    """They share a call, but only the learning seeds are updated."""
    host = small_host(slot_names=("r0c0",))
    frozen = Plant("conv_light", **LIVES["on the way down"])
    learning = Plant("conv_light", **LIVES["blending"])
    check(host, [{0: frozen}, {0: learning}, {0: frozen}, {0: learning}])
    check(host, [{0: frozen}, {0: frozen}])


@pytest.mark.parametrize("stage", IDLE_STAGES)
def test_a_seed_that_is_not_computed_does_not_affect_its_host(stage: Stage):
    check(small_host(), [{1: Plant("norm", stage=stage, alpha=0.0)}, {}])


def test_minibatches_are_drawn_with_the_key_of_each_group():
    """Images are drawn with the documented key, and rows of a group see the same images."""
    host = small_host()
    engine = small_engine(host, 3, groups=[7, 7, 9], environments=[14, 15, 18])
    garden: Garden = [{}, {0: Plant("conv_small")}, {0: Plant("conv_small")}]
    settings = engine.optimisation(0)
    assert torch.equal(engine.stack.host[0], engine.stack.host[1])
    environments = naive_environments(host, engine.stack, garden, settings)
    engine.train(seed_state(garden, 3), step=4)

    bits = random_bits(3, torch.tensor([7, 7, 9]), Purpose.MINIBATCH, 0, 4, 18)
    draws = to_integers(bits, 40)
    for n, environment in enumerate(environments):
        for picked in draws[n].split(6):
            images = engine.bank.train_images[picked].permute(0, 3, 1, 2)
            environment.train(images, engine.bank.train_labels[picked])
        assert_same_environment(host, engine.stack, n, environment)
    assert not math.isclose(environments[1].losses[0], environments[2].losses[0])
