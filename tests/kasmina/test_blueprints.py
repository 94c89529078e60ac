"""Newborn seeds do not change the output, but they and their host learn; and the registry."""

import pytest
import torch

from esper.kasmina.blueprints import BUILDERS, build, register
from esper.kasmina.blueprints.conv import conv_small
from esper.kasmina.hosts.host import Host
from esper.kasmina.slots import SlotSpec
from esper.kasmina.stack import Layout
from esper.leyline.actions import BLUEPRINTS, HEAD_WIDTHS, Style
from esper.leyline.errors import UsageError
from esper.tolaria.backends.torch import slot_block
from esper.tolaria.engine import Engine
from esper.tolaria.plan import Seeds, plan
from oracles.naive import FAMILIES, Gate
from support import (
    CPU,
    F64,
    LIVES,
    Garden,
    Plant,
    names_of,
    own_blueprints,
    random_batches,
    seed_state,
    seed_views,
    small_engine,
    small_gpt,
    small_host,
    small_mlp,
    train,
)

COUNTS_AT_64 = [
    ("conv", "norm", 129), ("conv", "attention", 2112), ("conv", "conv_small", 4224),
    ("conv", "bottleneck", 4480), ("conv", "depthwise", 4800), ("conv", "conv_light", 36992),
    ("conv", "conv_heavy", 40 * 64 * 64 + 8 * 64), ("sequence", "norm", 129),
    ("sequence", "attention", 4 * 64 * 64 + 2 * 64), ("sequence", "lora", 16 * 64),
    ("sequence", "lora_large", 64 * 64),
    *((family, "mlp_small", 4 * 64 * 64 + 4 * 64) for family in ("mlp", "sequence")),
    *((family, "mlp", 8 * 64 * 64 + 6 * 64) for family in ("mlp", "sequence")),
]  # fmt: skip
HOST, MLP = small_host(channels=(16, 8)), small_mlp(widths=(16, 8, 4))
GPT = small_gpt(width=16)

every_host = pytest.mark.parametrize("host", [HOST, MLP, GPT], ids=lambda host: type(host).__name__)
every_branch = pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family, branches in FAMILIES.items() for name in branches],
)


def newborn(host: Host, life: str, births: int = 1) -> tuple[Engine, Garden]:
    """Newborn seeds of every blueprint and style in the first slot, in float32."""
    kinds = [(name, style) for name in names_of(host) for style in Style]
    garden: Garden = [{0: Plant(name, style, **LIVES[life])} for name, style in kinds] * births
    engine = small_engine(host, len(garden), torch.float32)
    state = seed_state(garden, 3)
    engine.germinate(state.living, state.blueprint, step=0)
    return engine, garden


@pytest.mark.parametrize(("family", "name", "count"), COUNTS_AT_64)
def test_blueprint_has_documented_parameter_count(family: str, name: str, count: int):
    assert Layout(build(BLUEPRINTS.index(name), 64, family).fields).size == count


@pytest.mark.parametrize("channels", [1, 3, 8, 36, 64])
@every_branch
def test_blueprint_has_the_parameters_of_its_oracle_module(family: str, name: str, channels: int):
    layout = Layout(build(BLUEPRINTS.index(name), channels, family).fields)
    module = FAMILIES[family][name](channels)
    expected = {n: tuple(p.shape) for n, p in module.named_parameters()}
    assert {field.name: field.shape for field in layout.fields} == expected


def test_every_blueprint_has_an_oracle():
    found = {(family, name) for name, builders in BUILDERS.items() for family in builders}
    assert found == {(family, name) for family, names in FAMILIES.items() for name in names}


@pytest.mark.parametrize(("family", "branches"), FAMILIES.items())
def test_slot_accepts_the_blueprints_of_its_family(family: str, branches: dict):
    slot = SlotSpec("r0c0", 4, (1, 1), 1.0, family)
    assert {BLUEPRINTS[kind] for kind in slot.kinds} == set(branches)
    assert set(slot.layouts) == set(slot.kinds)
    assert SlotSpec("r0c0", 4, (1, 1), 1.0).family == "conv"


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize(("family", "branches"), FAMILIES.items())
def test_tables_of_a_slot_match_the_oracle_modules(channels: int, family: str, branches: dict):
    slot = SlotSpec("r0c0", channels, (6, 6), 1.0, family)
    gate = sum(p.numel() for p in Gate(channels).parameters())
    for kind, name in enumerate(BLUEPRINTS):
        parameters = list(branches[name](channels).parameters()) if name in branches else []
        count = sum(p.numel() for p in parameters)
        expected = [
            count + gate * (name in branches and style is Style.GATED_GATE) for style in Style
        ]
        assert slot.parameter_table[kind].tolist() == expected
        assert slot.tensor_counts[kind] == max(1, len(parameters))


def test_engine_counts_only_parameters_of_living_seeds():
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


@every_host
def test_newborn_seed_does_not_change_the_activation(host: Host):
    engine, garden = newborn(host, "fossilised")
    state = seed_state(garden, 3)
    calls = plan(Seeds.acting(state))[0]
    assert calls is not None
    x = 3.0 * torch.randn(
        5, *host.slots[0].size, len(garden), 16, generator=torch.Generator().manual_seed(0)
    )
    out = slot_block(host.slots[0], calls, engine.stack.seeds[0][calls.rows], x)
    assert out.shape == x.shape
    assert (out - x).abs().max() <= 1e-6


@every_host
def test_newborn_seed_does_not_change_the_scores(host: Host):
    engine, garden = newborn(host, "fossilised")
    with_seeds = engine.measure(seed_state(garden, 3), 0, committed=False)
    without = engine.measure(seed_state([{}] * len(garden), 3), 0, committed=False)
    for name in ("loss", "accuracy", "expected"):
        found, expected = getattr(with_seeds.scores, name), getattr(without.scores, name)
        assert (found - expected).abs().max() <= 1e-6
    assert with_seeds.contribution[:, 0].abs().max() <= 1e-6


@every_host
def test_seed_is_initialised_as_its_layout_specifies(host: Host):
    engine, garden = newborn(host, "training")
    slot = host.slots[0]
    for n, plants in enumerate(garden):
        layout = slot.layouts[BLUEPRINTS.index(plants[0].blueprint)]
        views = seed_views(slot, plants[0].blueprint, engine.stack.seeds[0][n])
        for field in (*layout.fields, *slot.gate_layout.fields):
            distance = (views[field.name] - field.constant).abs()
            assert (distance <= field.bound).all()
            assert (distance > 0.0).all() == (field.bound > 0.0)


@pytest.mark.parametrize("life", ["training", "about to blend", "fossilised"])
@every_host
def test_newborn_seed_has_a_gradient(host: Host, life: str):
    engine, garden = newborn(host, life)
    result = engine.train(seed_state(garden, 3), step=0)
    assert (result.seed_gradient_norm[:, 0] > 1e-4).all()
    assert (engine.stack.seed_optimizers[0].first != 0.0).any(1).all()


@pytest.mark.parametrize("life", ["blending", "fossilised"])
@every_host
def test_every_tensor_of_a_seed_changes_after_two_steps(host: Host, life: str):
    """Only tensors behind the zero map have no gradient at first.

    Of several births one must do: narrow ReLU layers without bias, as in attention, may be born
    closed to every image.
    """
    engine, garden = newborn(host, life, births=4)
    for step in range(2):
        engine.train(seed_state(garden, 3), step)
    learns: dict[tuple[str, Style, str], bool] = {}
    for n, plants in enumerate(garden):
        plant = plants[0]
        moments = engine.stack.seed_optimizers[0].first[n]
        for name, moment in seed_views(host.slots[0], plant.blueprint, moments).items():
            if plant.style is Style.GATED_GATE or not name.startswith("gate."):
                key = plant.blueprint, plant.style, name
                learns[key] = learns.get(key, False) or bool((moment != 0.0).any())
    assert not [key for key, alive in learns.items() if not alive]


@every_host
def test_every_host_tensor_has_a_gradient_with_a_newborn_seed_at_alpha_1(host: Host):
    engine, garden = newborn(host, "fossilised")
    batches = random_batches(host, len(garden), count=1, dtype=torch.float32)
    train(host, engine.stack, seed_state(garden, 3), batches)
    # The first moment of the first step is the gradient, scaled.
    for name, moment in host.layout.views(engine.stack.host_optimizer.first).items():
        assert (moment.flatten(1).abs().amax(1) > 1e-6).all(), name


@every_branch
def test_branch_of_64_channels_agrees_with_the_oracle(family: str, name: str):
    """64 channels give several norm groups and the widest hidden layers."""
    generator = torch.Generator().manual_seed(1)
    module = FAMILIES[family][name](64).to(F64)
    blueprint = build(BLUEPRINTS.index(name), 64, family)
    layout = Layout(blueprint.fields)
    row = torch.rand(1, layout.size, generator=generator, dtype=F64, device=CPU) - 0.5
    views = layout.views(row)
    with torch.no_grad():
        for n, parameter in module.named_parameters():
            parameter.copy_(views[n][0])
        pixels = {"conv": (4, 4), "mlp": (1, 1), "sequence": (1, 4)}[family]
        x = torch.randn(2, 64, *pixels, generator=generator, dtype=F64)
        found = blueprint.forward(views, x.permute(0, 2, 3, 1)[:, :, :, None].contiguous())
        expected = module(x).permute(0, 2, 3, 1)[:, :, :, None]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["", "my seed", "7th", "größer", "a-b", "x\n"])
def test_blueprint_name_must_be_an_identifier(name: str):
    with (
        own_blueprints(),
        pytest.raises(UsageError, match=r"^blueprint: .* is not an identifier; "),
    ):
        register(name, conv_small)


@pytest.mark.parametrize("name", ["conv_light", "mlp", "noop", "new"])
def test_taken_blueprint_name_is_refused(name: str):
    with own_blueprints():
        register("new", conv_small)
        with pytest.raises(UsageError, match=f"^blueprint: '{name}' is taken"):
            register(name, conv_small)


@pytest.mark.parametrize(
    ("families", "names"),
    [
        ((), "none"),
        (("linear",), "'linear'"),
        (("conv", "linear"), "'linear'"),
        ("conv", "'c', .*"),
    ],
)
def test_unknown_families_are_refused(families, names: str):
    with own_blueprints():
        says = rf"^families: got {names}; give one or more of conv, mlp"
        with pytest.raises(UsageError, match=says):
            register("new", conv_small, families)
        assert "new" not in BLUEPRINTS
        assert "new" not in BUILDERS


def test_reserved_name_keeps_its_index_and_may_have_two_families():
    with own_blueprints():
        before = list(BLUEPRINTS)
        register("flex_attention", conv_small, families=("conv", "mlp"))
        assert before == BLUEPRINTS
        assert HEAD_WIDTHS["blueprint"] == len(before)
        for host in (small_host(), small_mlp()):
            assert BLUEPRINTS.index("flex_attention") in host.slots[0].kinds
