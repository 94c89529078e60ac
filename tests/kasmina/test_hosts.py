"""Hosts: parameter counts in closed form, slots, and the format of inputs."""

import pytest
import torch

from esper.kasmina import ops
from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host, resolve_slots
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError
from oracles.naive import naive_host
from support import F64, small_gpt, small_host, small_mlp

HOSTS = [
    *(small_host(pools=pools, kernel=kernel) for pools in (0, 1, 2) for kernel in (1, 3)),
    *(small_mlp(widths=widths) for widths in ((1,), (7, 5), (32, 16, 8, 4))),
    *(small_gpt(layers=layers, heads=heads) for layers, heads in ((1, 1), (3, 2), (2, 0))),
]


def test_mlp_parameter_count_matches_the_formula():
    first, second = MlpHost((32,), 10, (8, 8, 1)), MlpHost((20, 12), 3, (4, 5, 3))
    assert first.parameter_count == 64 * 32 + 2 * 32 + (32 + 1) * 10
    assert second.parameter_count == 60 * 20 + 2 * 20 + 20 * 12 + 2 * 12 + (12 + 1) * 3
    assert second.buffers.size == 2 * (20 + 12)


def test_transformer_parameter_count_matches_the_formula():
    host = TransformerHost(layers=2, width=32, heads=4, context=24)
    layer = 4 * 32 * 32 + 8 * 32 * 32 + 2 * 2 * 32
    assert host.parameter_count == (256 + 24) * 32 + 2 * layer + 2 * 32
    assert host.buffers.size == 0
    assert [(slot.name, slot.channels, slot.size, slot.family) for slot in host.slots] == [
        ("r0c0", 32, (1, 24), "sequence"),
        ("r0c1", 32, (1, 24), "sequence"),
    ]


def test_cnn_slots_have_the_size_of_their_activations():
    host = CnnHost((4, 8, 8), 10, (9, 14, 1), pools=2)
    assert [(slot.name, slot.channels, slot.size) for slot in host.all_slots] == [
        ("r0c0", 4, (9, 14)), ("r1c0", 4, (4, 7)), ("wide0", 8, (4, 7)),
        ("r0c1", 8, (4, 7)), ("r1c1", 8, (2, 3)), ("wide1", 8, (2, 3)),
        ("r0c2", 8, (2, 3)), ("wide2", 10, (1, 1)),
    ]  # fmt: skip
    assert [slot.name for slot in host.slots] == ["r0c0", "r1c0", "r0c1", "r1c1", "r0c2"]


def test_slots_that_span_a_layer_accept_its_units_alone():
    cnn, mlp = small_host(slot_names=("wide0", "wide1")), small_mlp(slot_names=("wide1",))
    assert [[BLUEPRINTS[kind] for kind in slot.kinds] for slot in (*cnn.slots, *mlp.slots)] == [
        ["conv_small", "conv_heavy"], ["conv_small", "conv_heavy"], ["mlp_small", "mlp"],
    ]  # fmt: skip
    assert [slot.name for slot in small_host(seeds=("norm", "conv_heavy")).all_slots] == [
        "r0c0", "r1c0", "wide0", "r0c1", "wide1",
    ]  # fmt: skip
    assert [slot.name for slot in small_host(seeds=("norm",)).all_slots] == ["r0c0", "r1c0", "r0c1"]


def test_units_of_a_spanned_layer_double_or_quadruple_its_parameters():
    """As many as a host of that width has more."""
    for blueprint, factor in (("mlp_small", 2), ("mlp", 4)):
        more = small_mlp(widths=(7, 5 * factor, 3)).parameter_count
        slot = small_mlp(slot_names=("wide1",)).slots[0]
        size = slot.layouts[BLUEPRINTS.index(blueprint)].size
        assert size == more - small_mlp().parameter_count
    for blueprint, factor in (("conv_small", 2), ("conv_heavy", 4)):
        more = small_host(channels=(3 * factor, 5)).parameter_count
        slot = small_host(slot_names=("wide0",)).slots[0]
        size = slot.layouts[BLUEPRINTS.index(blueprint)].size
        assert size == more - small_host().parameter_count


def test_units_of_all_layers_at_once_are_a_perceptron_beside_the_host():
    """Of three or seven times its width, without the biases of the logits."""
    (slot,) = small_mlp(slot_names=("wide_all",)).slots
    assert "layers of 7 and 5 and 3 channels" in slot.summary
    for blueprint, factor in (("mlp_small", 3), ("mlp", 7)):
        beside = small_mlp(widths=tuple(factor * width for width in (7, 5, 3)))
        size = slot.layouts[BLUEPRINTS.index(blueprint)].size
        assert size == beside.parameter_count - beside.classes
    assert "wide_all" not in [each.name for each in small_mlp(widths=(5,)).all_slots]


@pytest.mark.parametrize(
    ("channels", "groups"), [(8, 1), (16, 1), (36, 2), (40, 2), (64, 4), (96, 4), (1024, 32)]
)
def test_norm_groups_hold_at_least_sixteen_channels(channels: int, groups: int):
    assert ops.norm_groups(channels) == groups


@pytest.mark.parametrize("name", ["layers", "width", "context"])
def test_transformer_sizes_must_be_positive(name: str):
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0"):
        small_gpt(**{name: 0})


@pytest.mark.parametrize("heads", [3, -2])
def test_transformer_heads_must_divide_its_width(heads: int):
    with pytest.raises(ValueError, match=f"^heads must be 0 or divide width 4, got {heads}"):
        small_gpt(heads=heads)


def test_transformer_without_heads_has_no_attention():
    host = small_gpt(layers=2, width=6, heads=0)
    assert host.parameter_count == small_gpt(layers=2, width=6).parameter_count - 2 * (4 * 36 + 12)


def test_cnn_parameter_count_matches_the_formula():
    host = CnnHost((4, 8), 10, (8, 8, 1), pools=1)
    assert host.parameter_count == 9 * 4 + 2 * 4 + 9 * 4 * 8 + 2 * 8 + (8 + 1) * 10


@pytest.mark.parametrize("host", HOSTS, ids=str)
def test_host_has_the_parameters_of_its_oracle_module(host: Host):
    module = naive_host(host)
    expected = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert {field.name: field.shape for field in host.layout.fields} == expected
    statistics = {name: tuple(part.shape) for name, part in module.statistics().items()}
    assert {field.name: field.shape for field in host.buffers.fields} == statistics


def test_mlp_has_a_one_pixel_slot_after_every_block():
    slots = MlpHost((32, 16, 8, 4), 10, (8, 8, 1)).slots
    assert [slot.name for slot in slots] == ["r0c0", "r0c1", "r0c2", "r0c3"]
    assert [slot.channels for slot in slots] == [32, 16, 8, 4]
    assert [slot.depth for slot in slots] == [0.25, 0.5, 0.75, 1.0]
    assert {(slot.size, slot.family) for slot in slots} == {((1, 1), "mlp")}


@pytest.mark.parametrize("host", HOSTS, ids=str)
def test_program_contains_every_slot_in_use(host: Host):
    assert [n for kind, n in host.program if kind == "slot"] == list(range(len(host.slots)))
    kinds = [kind for kind, _ in host.program]
    assert (kinds[0], kinds[1], kinds[-1]) == ("input", "block", "head")
    assert (kinds.count("input"), kinds.count("head")) == (1, 1)


def test_mlp_uses_only_the_named_slots():
    host = small_mlp(slot_names=("r0c2", "r0c0"))
    assert [slot.name for slot in host.slots] == ["r0c0", "r0c2"]
    assert [step for step in host.program if step.kind in ("slot", "block")] == [
        ("block", 0),
        ("slot", 0),
        ("block", 1),
        ("block", 2),
        ("slot", 1),
    ]


def test_slots_are_resolved_by_name_and_by_position():
    host = small_mlp()
    assert resolve_slots(host, ("early", "mid", "late", "r0c1")) == ("r0c0", "r0c1", "r0c2", "r0c1")
    wide = "wide0", "wide1", "wide2", "wide_all"
    assert resolve_slots(host, ("late", "wide")) == ("r0c2", *wide)
    with pytest.raises(UsageError, match="slots: the host has no slot 'r1c0'"):
        resolve_slots(host, ("r1c0",))
    with pytest.raises(UsageError, match=r"no slot 'wide'; choose from .* or early, mid, late$"):
        resolve_slots(small_gpt(), ("wide",))


@pytest.mark.parametrize(
    "changes", [{"widths": ()}, {"widths": (3, 0)}, {"image": (3, 0, 2)}], ids=str
)
def test_invalid_mlp_is_refused(changes: dict):
    with pytest.raises(ValueError, match=next(iter(changes))):
        small_mlp(**changes)


@pytest.mark.parametrize("rows", [1, 4])
def test_mlp_flattens_images_row_by_row(rows: int):
    images = torch.randn(5, 3, 2, rows, 2)
    features = small_mlp().enter(images)
    assert features.shape == (5, 1, 1, rows, 12)
    for n in range(rows):
        assert torch.equal(features[:, 0, 0, n], images[:, :, :, n].reshape(5, 12))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("shared", "rows"), [(False, 3), (True, 3), (False, 1)])
def test_dense_applies_the_linear_map_of_each_environment(shared: bool, rows: int, biased: bool):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 3, 1 if shared else rows, 4, generator=generator, dtype=F64)
    weight = torch.randn(rows, 6, 4, generator=generator, dtype=F64)
    bias = torch.randn(rows, 6, generator=generator, dtype=F64) if biased else None
    found = ops.dense(x, weight, bias)
    expected = torch.einsum("bhwnc,ndc->bhwnd", x.expand(-1, -1, -1, rows, -1), weight)
    if bias is not None:
        expected = expected + bias
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous()


def test_slots_accept_only_the_named_blueprints():
    host = small_host(seeds=("conv_heavy", "conv_small"))
    for slot, every in zip(host.slots, small_host().slots, strict=True):
        assert [BLUEPRINTS[kind] for kind in slot.kinds] == ["conv_small", "conv_heavy"]
        assert slot.layouts.keys() == set(slot.kinds)
        assert len(every.kinds) > 2
        assert slot.width <= every.width


def test_a_blueprint_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"^seeds must be among .*norm.*, got 'mlp_small'"):
        small_host(seeds=("norm", "mlp_small"))
