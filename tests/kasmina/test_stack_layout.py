"""Positions of parameters in a row of the store, and their initial values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina.stack import Field, Layout, ones, weight, zeros
from esper.tolaria.stores import AdamState, Stack
from examples import examples
from support import CPU, F64, small_engine, small_host

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=4).map(tuple), min_size=1, max_size=5)


@given(shapes=SHAPES, spare=st.integers(0, 3))
@settings(max_examples=examples(40))
def test_views_cover_a_row_in_the_order_of_the_fields(shapes: list[tuple[int, ...]], spare: int):
    layout = Layout(tuple(Field(f"p{i}", shape) for i, shape in enumerate(shapes)))
    rows = torch.arange(3.0 * (layout.size + spare)).view(3, -1)
    views = layout.views(rows)
    assert list(views) == [f"p{i}" for i in range(len(shapes))]
    for view, shape in zip(views.values(), shapes, strict=True):
        assert view.shape == (3, *shape)
    joined = torch.cat([view.reshape(3, -1) for view in views.values()], 1)
    assert torch.equal(joined, rows[:, : layout.size])


def test_writing_to_a_view_changes_the_store():
    layout = Layout((weight("w", 2, 3), zeros("scale"), ones("b", 2)))
    rows = torch.zeros(2, layout.size + 1)
    views = layout.views(rows)
    views["w"][1, 1, 2] = 5.0
    views["scale"][0] = 6.0
    views["b"][1] = 7.0
    assert rows.tolist() == [[0, 0, 0, 0, 0, 0, 6, 0, 0, 0], [0, 0, 0, 0, 0, 5, 0, 7, 7, 0]]


def test_birth_and_segments_follow_the_fields_and_skip_unused_columns():
    layout = Layout((weight("w", 2, 4), ones("scale"), zeros("b", 2)))
    constant, bound = layout.initial_distribution(13)
    assert constant.tolist() == [0.0] * 8 + [1.0] + [0.0] * 4
    assert bound.tolist() == [0.5] * 8 + [0.0] * 5
    assert layout.segments(13).tolist() == [0] * 8 + [1] + [2] * 2 + [3] * 2


@pytest.mark.parametrize(
    ("shape", "bound"), [((5, 4), 0.5), ((8, 4, 2, 2), 0.25), ((6, 1, 3, 3), 1 / 3)]
)
def test_weight_has_the_initial_range_of_torch_layers(shape: tuple[int, ...], bound: float):
    """torch draws conv and linear weights from U(-b, b) with b = fan_in^-0.5."""
    field = weight("w", *shape)
    assert field.bound == pytest.approx(bound)
    layer = (
        torch.nn.Linear(shape[1], 4000)
        if len(shape) == 2
        else torch.nn.Conv2d(shape[1], 4000, shape[2:])
    )
    assert layer.weight.abs().max().item() == pytest.approx(bound, rel=1e-2)


def test_initial_hosts_fill_the_range_of_their_layout():
    host = small_host(channels=(8, 16))
    engine = small_engine(host, 12)
    born = engine.stack.host
    constant, bound = host.layout.initial_distribution(host.layout.size)
    unit = ((born - constant) / bound.where(bound > 0, torch.ones(1, dtype=F64)))[:, bound > 0]
    assert torch.equal(born[:, bound == 0], constant[bound == 0].expand(12, -1))
    assert unit.abs().max() < 1.0
    assert unit.mean().abs() < 0.05
    assert unit.std().item() == pytest.approx(3**-0.5, rel=0.05)
    norm = host.layout.views(born)
    assert (norm["norm0.weight"] == 1.0).all()
    assert (norm["norm1.bias"] == 0.0).all()
    buffers = host.buffers.views(engine.stack.buffers)
    assert (buffers["norm1.mean"] == 0.0).all()
    assert (buffers["norm1.variance"] == 1.0).all()


def test_new_stack_is_zero_and_clear_resets_only_the_given_rows():
    stack = Stack.allocate(3, 4, 2, [5, 6], torch.float32, CPU)
    assert [tuple(s.shape) for s in stack.seeds] == [(3, 5), (3, 6)]
    state = AdamState(torch.ones(3, 4), torch.ones(3, 4), torch.ones(3))
    state.clear(torch.tensor([False, True, False]))
    for part in (state.first, state.second, state.step):
        assert part[1].eq(0.0).all()
        assert part[[0, 2]].eq(1.0).all()
    stack.host_optimizer = state
    stack.clear_optimizers()
    assert state.first.eq(0.0).all()
    assert state.step.eq(0.0).all()
