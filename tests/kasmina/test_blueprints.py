"""A newborn seed changes nothing, learns at once, and lets its host learn."""

import pytest
import torch

from esper.kasmina.blueprints import BUILDERS, build
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS, Style
from esper.tolaria.backends.torch import slot_block
from esper.tolaria.engine import Engine
from esper.tolaria.plan import plan_evaluation
from oracles.naive import BRANCHES, Gate
from support import (
    BLUEPRINT_NAMES,
    CPU,
    F64,
    LIVES,
    Garden,
    Plant,
    random_batches,
    seed_state,
    seed_views,
    small_engine,
    small_host,
    train,
)

COUNTS_AT_64 = {
    "norm": 129,
    "attention": 2112,
    "conv_small": 4224,
    "bottleneck": 4480,
    "depthwise": 4800,
    "conv_light": 36992,
    "conv_heavy": 40 * 64 * 64 + 8 * 64,
}
KINDS = [(name, style) for name in BLUEPRINT_NAMES for style in Style]
HOST = small_host(channels=(16, 8))


def newborn(life: str, births: int = 1) -> tuple[Engine, Garden]:
    """Every blueprint in every style in the first slot, as it is born, in float32."""
    garden: Garden = [{0: Plant(name, style, **LIVES[life])} for name, style in KINDS] * births
    engine = small_engine(HOST, len(garden), torch.float32)
    state = seed_state(garden, 3)
    engine.germinate(state.living, state.blueprint, step=0)
    return engine, garden


@pytest.mark.parametrize(("name", "count"), COUNTS_AT_64.items(), ids=COUNTS_AT_64)
def test_a_blueprint_has_its_documented_number_of_parameters(name: str, count: int):
    assert build(BLUEPRINTS.index(name), 64).layout.size == count


@pytest.mark.parametrize("channels", [1, 3, 8, 36, 64])
@pytest.mark.parametrize("name", BLUEPRINT_NAMES)
def test_a_blueprint_has_the_parameters_of_its_module(name: str, channels: int):
    layout = build(BLUEPRINTS.index(name), channels).layout
    expected = {n: tuple(p.shape) for n, p in BRANCHES[name](channels).named_parameters()}
    assert {field.name: field.shape for field in layout.fields} == expected


def test_every_blueprint_has_an_oracle():
    assert set(BUILDERS) == set(BRANCHES)


@pytest.mark.parametrize("channels", [3, 64])
def test_a_slots_tables_count_what_the_modules_have(channels: int):
    slot = SlotSpec("r0c0", channels, (6, 6), 1.0)
    gate = sum(p.numel() for p in Gate(channels).parameters())
    for kind, name in enumerate(BLUEPRINTS):
        parameters = list(BRANCHES[name](channels).parameters()) if name in BRANCHES else []
        count = sum(p.numel() for p in parameters)
        expected = [
            count + gate * (name in BRANCHES and style is Style.GATED_GATE) for style in Style
        ]
        assert slot.parameter_table[kind].tolist() == expected
        assert slot.tensor_counts[kind].item() == max(1, len(parameters))


def test_an_engine_counts_the_parameters_of_living_seeds_alone():
    garden: Garden = [
        {0: Plant("conv_light"), 2: Plant("norm", Style.GATED_GATE, **LIVES["training"])},
        {},
    ]
    engine = small_engine(HOST, 2)
    gate = sum(p.numel() for p in Gate(8).parameters())
    assert engine.seed_parameters(seed_state(garden, 3)).tolist() == [
        [2 * 16 + 16 * 16 * 9, 0, 1 + 2 * 8 + gate],
        [0, 0, 0],
    ]


def test_a_newborn_seed_leaves_the_activation_as_it_is():
    engine, garden = newborn("fossilised")
    state = seed_state(garden, 3)
    plan = plan_evaluation(state.blueprint, state.style, state.alpha)[0]
    assert plan is not None
    x = 3.0 * torch.randn(5, 6, 6, len(garden), 16, generator=torch.Generator().manual_seed(0))
    out = slot_block(HOST.slots[0], plan, engine.stack.seeds[0][plan.rows], x)
    assert out.shape == x.shape
    assert (out - x).abs().max() <= 1e-6


def test_a_newborn_seed_leaves_the_scores_as_they_are():
    engine, garden = newborn("fossilised")
    with_seeds = engine.measure(seed_state(garden, 3), 0, committed=False)
    without = engine.measure(seed_state([{}] * len(garden), 3), 0, committed=False)
    for name in ("loss", "accuracy", "expected"):
        found, expected = getattr(with_seeds.scores, name), getattr(without.scores, name)
        assert (found - expected).abs().max() <= 1e-6
    assert with_seeds.contribution[:, 0].abs().max() <= 1e-6


def test_a_seed_is_born_as_its_layout_says():
    engine, garden = newborn("training")
    slot = HOST.slots[0]
    for n, plants in enumerate(garden):
        layout = slot.layouts[BLUEPRINTS.index(plants[0].blueprint)]
        views = seed_views(slot, plants[0].blueprint, engine.stack.seeds[0][n])
        for field in (*layout.fields, *slot.gate_layout.fields):
            distance = (views[field.name] - field.constant).abs()
            assert (distance <= field.bound).all()
            assert (distance > 0.0).all() == (field.bound > 0.0)


@pytest.mark.parametrize("life", ["training", "about to blend", "fossilised"])
def test_a_newborn_seed_has_a_gradient(life: str):
    engine, garden = newborn(life)
    result = engine.train(seed_state(garden, 3), step=0)
    assert (result.seed_gradient_norm[:, 0] > 1e-4).all()
    assert (engine.stack.seed_optimizers[0].first != 0.0).any(1).all()


@pytest.mark.parametrize("life", ["blending", "fossilised"])
def test_every_tensor_of_a_seed_learns_after_two_steps(life: str):
    """Only what the zero map hides has no gradient at first.

    Of several births one must do: narrow ReLU layers without bias, as in attention, may be born
    closed to every image.
    """
    engine, garden = newborn(life, births=4)
    for step in range(2):
        engine.train(seed_state(garden, 3), step)
    learns: dict[tuple[str, Style, str], bool] = {}
    for n, plants in enumerate(garden):
        plant = plants[0]
        moments = engine.stack.seed_optimizers[0].first[n]
        for name, moment in seed_views(HOST.slots[0], plant.blueprint, moments).items():
            if plant.style is Style.GATED_GATE or not name.startswith("gate."):
                key = plant.blueprint, plant.style, name
                learns[key] = learns.get(key, False) or bool((moment != 0.0).any())
    assert not [key for key, alive in learns.items() if not alive]


def test_the_host_has_a_gradient_in_every_tensor_with_a_newborn_seed_at_alpha_1():
    engine, garden = newborn("fossilised")
    batches = random_batches(HOST, len(garden), count=1, dtype=torch.float32)
    train(HOST, engine.stack, seed_state(garden, 3), batches)
    # The first moment of the first step is the gradient, scaled.
    for name, moment in HOST.layout.views(engine.stack.host_optimizer.first).items():
        assert (moment.flatten(1).abs().amax(1) > 1e-6).all(), name


@pytest.mark.parametrize("name", BLUEPRINT_NAMES)
def test_the_oracle_and_the_program_agree_on_a_branch_at_64_channels(name: str):
    """Many norm groups, the widest hidden layers."""
    generator = torch.Generator().manual_seed(1)
    module = BRANCHES[name](64).to(F64)
    blueprint = build(BLUEPRINTS.index(name), 64)
    row = torch.rand(1, blueprint.layout.size, generator=generator, dtype=F64, device=CPU) - 0.5
    views = blueprint.layout.views(row)
    with torch.no_grad():
        for n, parameter in module.named_parameters():
            parameter.copy_(views[n][0])
        x = torch.randn(2, 64, 4, 4, generator=generator, dtype=F64)
        found = blueprint.forward(views, x.permute(0, 2, 3, 1)[:, :, :, None].contiguous())
        expected = module(x).permute(0, 2, 3, 1)[:, :, :, None]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
