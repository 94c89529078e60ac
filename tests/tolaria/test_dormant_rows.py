"""Rows that do not learn stay unchanged by momentum and weight decay."""

import pytest
import torch

from esper.kasmina.hosts.host import Host
from esper.leyline.actions import BLUEPRINTS, Style
from esper.leyline.stages import Stage
from esper.tolaria.stores import AdamState, Stack
from support import (
    IDLE_STAGES,
    LIVES,
    Garden,
    Plant,
    assert_identical,
    names_of,
    random_batches,
    random_stack,
    seed_state,
    seed_views,
    slot_row_of,
    small_engine,
    small_host,
    small_mlp,
    train,
)

pytestmark = pytest.mark.usefixtures("backend")

HOST = small_host()
SLOTS = len(HOST.slots)


def stirred(rows: int) -> Stack:
    """A stack whose seeds have momentum, so that rows change unless they are masked."""
    stack = random_stack(HOST, rows)
    generator = torch.Generator().manual_seed(9)

    def drawn(like: torch.Tensor) -> torch.Tensor:
        return 0.1 + torch.rand(like.shape, generator=generator, dtype=like.dtype)

    stack.seed_optimizers = [
        AdamState(drawn(s), drawn(s), torch.full_like(s[:, 0], 3.0)) for s in stack.seeds
    ]
    return stack


def still_and_moving(still: Plant | None) -> Garden:
    """Slot 0 learns in some environments and is inactive in others; slot 2 is always inactive."""
    resting = {} if still is None else {0: still, 2: still}
    return [resting, {0: Plant("conv_light"), 1: Plant("norm")}, resting]


@pytest.mark.parametrize("life", ["empty", *IDLE_STAGES, "on the way down"], ids=str)
def test_inactive_rows_keep_every_bit(life: str | Stage):
    if life == "empty":
        still = None
    elif isinstance(life, Stage):
        still = Plant("conv_light", stage=life, alpha=0.0)
    else:
        still = Plant("conv_light", **LIVES[life])
    garden = still_and_moving(still)
    stack = stirred(len(garden))
    before = [[slot_row_of(stack, s, n) for s in range(SLOTS)] for n in range(len(garden))]
    host = stack.host.clone()
    train(HOST, stack, seed_state(garden, SLOTS), random_batches(HOST, len(garden)))
    for n, s in ((0, 0), (0, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 2)):
        assert_identical(slot_row_of(stack, s, n), before[n][s])
    for n, s in ((1, 0), (1, 1)):
        after = slot_row_of(stack, s, n)
        assert not any(torch.equal(after[name], then) for name, then in before[n][s].items())
    assert (stack.host != host).any(1).all()


def test_weight_decay_of_hosts_does_not_affect_seeds():
    """A seed without gradient, here after a dead activation, keeps its parameters."""
    garden: Garden = [{0: Plant("conv_small")}, {0: Plant("conv_small")}]
    stack = random_stack(HOST, 2)
    norm = seed_views(HOST.slots[0], "conv_small", stack.seeds[0][0])
    norm["norm.weight"].zero_()
    norm["norm.bias"].fill_(-1.0)
    before = slot_row_of(stack, 0, 0)
    train(HOST, stack, seed_state(garden, SLOTS), random_batches(HOST, 2))
    assert torch.equal(stack.seeds[0][0], before["seed 0"])


@pytest.mark.parametrize(
    ("host", "name"), [(host, name) for host in (HOST, small_mlp()) for name in names_of(host)]
)
@pytest.mark.parametrize("style", [Style.LINEAR_ADD, Style.GATED_GATE], ids=lambda s: s.name)
def test_a_seed_updates_only_its_own_columns(host: Host, name: str, style: Style):
    """The rest of its row, including the gate columns of a seed without gate, is unused."""
    slot = host.slots[0]
    stack = random_stack(host, 2)
    before = stack.seeds[0].clone()
    garden: Garden = [{0: Plant(name, style)}, {0: Plant(name, style)}]
    train(host, stack, seed_state(garden, SLOTS), random_batches(host, 2))
    own = torch.zeros(slot.width, dtype=torch.bool)
    own[: slot.layouts[BLUEPRINTS.index(name)].size] = True
    own[slot.gate_offset :] = style is Style.GATED_GATE
    moved = (stack.seeds[0] != before).any(0)
    assert not moved[~own].any()
    # All of its own columns change, except those after a ReLU that is never active.
    assert moved[own].double().mean() > 0.5
    assert torch.equal(stack.seed_optimizers[0].first.ne(0.0).any(0), moved)


def test_germination_writes_one_row_and_clears_its_momentum():
    engine = small_engine(HOST, 3)
    engine.stack = stirred(3)
    before = [[slot_row_of(engine.stack, s, n) for s in range(SLOTS)] for n in range(3)]
    host = engine.stack.host.clone()
    state = seed_state([{}, {1: Plant("depthwise", stage=Stage.GERMINATED, alpha=0.0)}, {}], SLOTS)
    engine.germinate(state.living, state.blueprint, step=0)
    born = slot_row_of(engine.stack, 1, 1)
    assert born["seed 1"].ne(before[1][1]["seed 1"]).any()
    for name in ("first moment", "second moment", "update count"):
        assert born[f"seed 1 {name}"].eq(0.0).all()
    assert torch.equal(engine.stack.host, host)
    for n in range(3):
        for s in range(SLOTS):
            if (n, s) != (1, 1):
                assert_identical(slot_row_of(engine.stack, s, n), before[n][s])
