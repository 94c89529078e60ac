"""AdamW and clipping by rows, compared with one torch optimizer per row."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from esper.kasmina.stack import AdamState
from esper.tolaria.optim import clip_scale, update_
from support import F64

ROWS, COLUMNS, STEPS = 4, 7, 6
RATES = torch.tensor([1e-3, 5e-3, 2e-2, 1e-1], dtype=F64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def reference(
    start: Tensor, rate: float, weight_decay: float
) -> tuple[nn.Parameter, torch.optim.AdamW]:
    parameter = nn.Parameter(start.clone())
    return parameter, torch.optim.AdamW([parameter], lr=rate, weight_decay=weight_decay)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_row_matches_its_own_adamw(weight_decay: float):
    """Inactive rows keep their update count, so that each row has its own bias correction."""
    store = drawn(ROWS, COLUMNS)
    state = AdamState.zeros_like(store)
    pairs = [reference(store[n], RATES[n].item(), weight_decay) for n in range(ROWS)]
    for step in range(STEPS):
        gradient = drawn(ROWS, COLUMNS, seed=step + 1)
        active = torch.tensor([(step + n) % (n + 1) == 0 for n in range(ROWS)])
        for n, (parameter, optimizer) in enumerate(pairs):
            if active[n]:
                parameter.grad = gradient[n].clone()
                optimizer.step()
        update_(store, gradient, state, RATES, weight_decay, active=active)
    assert state.step.unique().numel() > 1
    for n, (parameter, optimizer) in enumerate(pairs):
        moments = optimizer.state[parameter]
        expected = (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"])
        for found, value in zip((store[n], state.first[n], state.second[n]), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-13, atol=1e-15)
        assert state.step[n].item() == float(moments["step"])


def test_all_rows_are_active_by_default():
    first, second = drawn(ROWS, COLUMNS), drawn(ROWS, COLUMNS)
    states = AdamState.zeros_like(first), AdamState.zeros_like(second)
    gradient = drawn(ROWS, COLUMNS, seed=1)
    update_(first, gradient.clone(), states[0], RATES, 0.1)
    update_(second, gradient.clone(), states[1], RATES, 0.1, active=torch.ones(ROWS).bool())
    assert torch.equal(first, second)
    assert torch.equal(states[0].step, torch.ones(ROWS, dtype=F64))


def test_inactive_rows_keep_every_bit_despite_momentum_decay_and_nan():
    store = drawn(ROWS, COLUMNS)
    state = AdamState(
        drawn(ROWS, COLUMNS, seed=1), drawn(ROWS, COLUMNS, seed=2).abs(), drawn(ROWS).abs()
    )
    before = [part.clone() for part in (store, state.first, state.second, state.step)]
    gradient = drawn(ROWS, COLUMNS, seed=3)
    gradient[2] = float("nan")
    active = torch.tensor([True, False, False, True])
    update_(store, gradient, state, RATES, 0.5, active=active)
    for then, now in zip(before, (store, state.first, state.second, state.step), strict=True):
        assert torch.equal(now[~active], then[~active])
        assert not torch.equal(now[0], then[0])
        assert now.isfinite().all()


def test_clipping_matches_torch_for_every_row():
    """From a zero gradient to one exactly at the limit to a huge one."""
    sizes = torch.tensor([0.0, 1e-9, 0.5, 1.0, 1.0 + 1e-9, 3.0, 1e6], dtype=F64)
    direction = drawn(len(sizes), COLUMNS)
    gradient = sizes[:, None] * direction / direction.norm(dim=1, keepdim=True)
    norm, scale = clip_scale(gradient, 1.0)
    assert ((scale > 0.0) & (scale <= 1.0)).all()
    for n in range(len(sizes)):
        parameter = nn.Parameter(torch.zeros(COLUMNS, dtype=F64))
        parameter.grad = gradient[n].clone()
        total = clip_grad_norm_([parameter], 1.0)
        torch.testing.assert_close(norm[n], total, rtol=1e-14, atol=0.0)
        torch.testing.assert_close(gradient[n] * scale[n], parameter.grad, rtol=1e-14, atol=0.0)


def test_clipping_of_a_row_does_not_depend_on_other_rows():
    gradient = drawn(3, COLUMNS)
    _, expected = clip_scale(gradient, 0.7)
    gradient[0], gradient[2] = float("nan"), 1e300
    norm, scale = clip_scale(gradient, 0.7)
    assert scale[1] == expected[1]
    assert norm[0].isnan()
