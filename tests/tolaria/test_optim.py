"""Clipping, updates and tuning of rows against torch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from esper.kasmina.hosts.host import Host
from esper.kasmina.seeds import SeedState
from esper.leyline.errors import UsageError
from esper.runtime.tasks import TUNINGS
from esper.tolaria.optim import clip_scale, relative_rates, update_
from esper.tolaria.stores import AdamState
from oracles.naive import NaiveEnvironment
from residual_hosts import residual_host
from support import (
    CPU,
    F64,
    Garden,
    Plant,
    assert_identical,
    assert_same,
    assert_same_environment,
    naive_environments,
    names_of,
    optimisation,
    random_batches,
    random_stack,
    row_of,
    seed_state,
    small_gpt,
    small_host,
    small_mlp,
    small_task,
    task_engine,
    train,
    train_naively,
)

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


WAYS = ("auto_rgn", "last", "all", "auto_rgn")


def tuned(environment: NaiveEnvironment, way: str) -> None:
    """Train the host of an oracle in one of ``TUNINGS``."""
    optimizer = environment.host_optimizer
    (group,) = optimizer.param_groups
    named = dict(environment.host.named_parameters())
    blocks: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in named.items():
        number = "".join(filter(str.isdigit, name.partition(".")[0]))
        blocks.setdefault(number or "head", []).append(parameter)
    optimizer.param_groups = [group | {"params": block} for block in blocks.values()]

    def set_rates(optimizer: torch.optim.Optimizer, *_: object) -> None:
        def norm(tensors: list[Tensor]) -> Tensor:
            return torch.cat([tensor.detach().flatten() for tensor in tensors]).norm()

        ratios = [
            norm([p.grad for p in g["params"]]) / norm(g["params"]) for g in optimizer.param_groups
        ]
        for g, ratio in zip(optimizer.param_groups, ratios, strict=True):
            g["lr"] = environment.host_rate * float(ratio / max(ratios))

    if way == "auto_rgn":
        optimizer.register_step_pre_hook(set_rates)
    elif way == "last":
        for name, parameter in named.items():
            if not name.startswith("head"):
                parameter.register_hook(torch.zeros_like)
        for g in optimizer.param_groups[:-1]:
            g["lr"] = 0.0


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("host", [small_host(), small_mlp()], ids=lambda host: type(host).__name__)
def test_every_host_is_tuned_in_its_own_way(host: Host, momentum: float | None):
    garden: Garden = [{0: Plant(names_of(host)[0])}, {}, {1: Plant(names_of(host)[1])}, {}]
    stack = random_stack(host, len(WAYS))
    ways = torch.tensor([TUNINGS.index(way) for way in WAYS])
    settings = replace(
        optimisation(len(WAYS), len(host.slots), 0.3, momentum=momentum), tuning=ways
    )
    batches = random_batches(host, len(WAYS))
    environments = naive_environments(host, stack, garden, settings)
    for environment, way in zip(environments, WAYS, strict=True):
        tuned(environment, way)
    before = stack.host.clone()
    result = train(host, stack, seed_state(garden, len(host.slots)), batches, settings)
    train_naively(environments, batches)
    for n, environment in enumerate(environments):
        assert_same_environment(host, stack, n, environment)
        assert_same(result.host_gradient_norm[n], environment.host_norm, f"norm of {n}")
    head = host.block_sizes[-1]
    assert torch.equal(stack.host[1, :-head], before[1, :-head])
    assert not torch.equal(stack.host[1, -head:], before[1, -head:])


@pytest.mark.usefixtures("backend")
def test_a_host_that_is_tuned_whole_does_not_notice_the_others():
    host, rows = small_host(), 3
    batches = random_batches(host, rows)
    stacks = [random_stack(host, rows) for _ in range(2)]
    settings = optimisation(rows, len(host.slots))
    state = SeedState.dormant((rows, len(host.slots)), CPU)
    train(host, stacks[0], state, batches, settings)
    train(host, stacks[1], state, batches, replace(settings, tuning=torch.tensor([1, 0, 2])))
    assert_identical(row_of(stacks[0], 1), row_of(stacks[1], 1))
    for n in (0, 2):
        assert not torch.equal(stacks[0].host[n], stacks[1].host[n])


def test_rates_are_finite_without_gradient_or_weight():
    gradient = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 2.0]])
    parameters = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    found = relative_rates(gradient, parameters, (2, 1), torch.tensor([2, 2]))
    assert found[0].tolist() == [0.0, 0.0]
    assert found[1, 0] == 1.0
    assert 0.0 < found[1, 1] < 1e-6


@pytest.mark.parametrize(
    "host",
    [small_host(), small_mlp(), small_gpt(), residual_host()],
    ids=lambda h: type(h).__name__,
)
def test_blocks_cover_every_parameter_and_end_between_modules(host: Host):
    assert sum(host.block_sizes) == host.layout.size
    assert len(host.block_sizes) > 2
    ends = torch.tensor(host.block_sizes).cumsum(0).tolist()
    assert {*ends} <= {*host.layout.offsets, host.layout.size}


def test_the_engine_tunes_each_row_as_its_task_says():
    tasks = [replace(small_task(small_host()), tuning=way) for way in TUNINGS]
    assert task_engine(*reversed(tasks)).optimisation(0).tuning.tolist() == [2, 1, 0]
    assert task_engine(tasks[0]).optimisation(0).tuning is None


def test_an_unknown_way_is_refused_with_its_field():
    with pytest.raises(UsageError, match=r"^tuning: must be one of all, last, auto_rgn, got 'x'"):
        replace(small_task(small_host()), tuning="x")
