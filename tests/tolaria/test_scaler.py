"""Loss scaling: an overflow costs only its own environment one update.

Scales are updated like those of one ``torch.amp.GradScaler`` per environment.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.hosts.host import Host
from esper.kasmina.seeds import SeedSignals
from esper.leyline.errors import UsageError
from esper.tolaria import precision as scaler
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.governor import Governor, Reason
from esper.tolaria.precision import (
    GROWTH_INTERVAL,
    MAX_SCALE,
    MIN_SCALE,
    START,
    LossScales,
    Precision,
    ScaleTable,
)
from esper.tolaria.results import EpochResult, Scores, updated_signals
from esper.tolaria.stores import Stack
from support import (
    CPU,
    LIVES,
    Garden,
    Plant,
    assert_identical,
    copied,
    optimisation,
    random_batches,
    random_stack,
    row_of,
    seed_state,
    slot_row_of,
    small_host,
    small_mlp,
    train,
)

HOST = small_host()
SUBJECT, ROWS = 1, 4
F16, F32 = torch.float16, torch.float32
NAN = float("nan")
GARDEN: Garden = [
    {
        0: Plant("conv_heavy", **LIVES["training"]),
        1: Plant("attention", **LIVES["blending"]),
        2: Plant("norm", **LIVES["on the way down"]),
    }
] * ROWS


def scales_of(*powers: int) -> LossScales:
    """Scales 2^p, one per environment."""
    table = ScaleTable.fresh(len(powers), CPU)
    table.scale.copy_(2.0 ** torch.tensor(powers))
    return LossScales(table, torch.arange(len(powers)))


def trained(
    stack: Stack,
    scales: LossScales | None,
    dtype: torch.dtype | None = F16,
    count: int = 1,
    garden: Garden = GARDEN,
    host: Host = HOST,
    momentum: float | None = None,
    max_norm: float = 1.0,
) -> EpochResult:
    """Train one epoch in place."""
    rows = len(garden)
    how = optimisation(rows, 3, dtype=F32, momentum=momentum, max_norm=max_norm)
    how = replace(how, scales=scales)
    backend = TorchBackend(host, Precision("cpu", dtype))
    batches = random_batches(host, rows, count, dtype=F32)
    return train(host, stack, seed_state(garden, 3), batches, how, backend)


def steep(stack: Stack, row: int = SUBJECT) -> Stack:
    """The stack with a host whose gradients overflow at a scale of 2^16, with a finite loss."""
    HOST.layout.views(stack.host)["head.weight"][row] *= 3000.0
    return stack


def rows_of(stack: Stack) -> list[dict[str, Tensor]]:
    return [row_of(stack, n) for n in range(len(stack.host))]


# Effects of an overflow.


def test_an_overflow_skips_only_the_update_of_its_environment() -> None:
    before = steep(random_stack(HOST, ROWS, F32))
    stack, calm = copied(before), random_stack(HOST, ROWS, F32)
    scales, calm_scales = scales_of(16, 16, 15, 14), scales_of(16, 10, 15, 14)
    result = trained(stack, scales)
    expected = trained(calm, calm_scales)
    assert calm_scales.scale.tolist() == [2.0**16, 2.0**10, 2.0**15, 2.0**14]
    assert scales.scale.tolist() == [2.0**16, 2.0**15, 2.0**15, 2.0**14]
    assert scales.table.skipped.tolist() == [0, 1, 0, 0]
    assert scales.table.clean.tolist() == [1, 0, 1, 1]
    assert result.loss.isfinite().all()
    for n in range(ROWS):
        rows, untouched = row_of(stack, n), row_of(before, n)
        if n == SUBJECT:
            # BatchNorm statistics are updated, as with the scaler of torch.
            assert not torch.equal(rows.pop("statistics"), untouched.pop("statistics"))
            assert_identical(rows, untouched)
            continue
        assert_identical(rows, row_of(calm, n))
        assert rows["host update count"] == 1
        assert rows["seed 0 update count"] == 1
        assert result.host_gradient_norm[n] == expected.host_gradient_norm[n]


@pytest.mark.parametrize("momentum", [None, 0.9], ids=["adamw", "sgd"])
def test_a_scale_is_reduced_until_its_environment_learns_again(momentum: float | None) -> None:
    stack, scales = steep(random_stack(HOST, ROWS, F32)), scales_of(*[16] * ROWS)
    result = trained(stack, scales, count=14, momentum=momentum)
    skipped = int(scales.table.skipped[SUBJECT])
    assert 0 < skipped < 14
    assert scales.scale[SUBJECT] == 2.0 ** (16 - skipped)
    assert stack.host_optimizer.step.tolist() == [14, 14 - skipped, 14, 14]
    assert result.host_gradient_norm.isfinite().all()
    assert result.unmeasured is not None
    assert not result.unmeasured.any()


def test_an_overflow_of_an_isolated_seed_skips_only_its_own_update() -> None:
    """An isolated seed does not affect the host, so neither does its overflow."""
    healthy, poisoned = (random_stack(HOST, ROWS, F32) for _ in range(2))
    poisoned.seeds[0][SUBJECT] = NAN
    before = copied(poisoned)
    scales = scales_of(*[10] * ROWS)
    trained(healthy, scales_of(*[10] * ROWS))
    trained(poisoned, scales)
    own = slot_row_of(before, 0, SUBJECT)
    for name, part in own.items():
        torch.testing.assert_close(row_of(poisoned, SUBJECT)[name], part, equal_nan=True)
    for n in range(ROWS):
        rows, expected = row_of(poisoned, n), row_of(healthy, n)
        others = rows.keys() - (own.keys() if n == SUBJECT else set())
        assert_identical({k: rows[k] for k in others}, {k: expected[k] for k in others})
    assert scales.scale.tolist() == [1024.0, 512.0, 1024.0, 1024.0]


def test_a_non_finite_loss_does_not_change_the_scale() -> None:
    stack, scales = random_stack(HOST, ROWS, F32), scales_of(*[10] * ROWS)
    stack.host[SUBJECT] = NAN
    result = trained(stack, scales)
    assert scales.scale.tolist() == [1024.0] * ROWS
    assert scales.table.skipped.tolist() == [0, 1, 0, 0]
    assert judged(result).tolist() == [Reason.NONE, Reason.NOT_FINITE, Reason.NONE, Reason.NONE]


def judged(result: EpochResult) -> Tensor:
    """The governor's verdict, given healthy validation scores."""
    ones = torch.ones(ROWS)
    governor = Governor(random_stack(HOST, ROWS, F32), HOST.classes)
    return governor.check(result, Scores(ones, ones, ones), seed_state(GARDEN, 3).computing)


def test_an_epoch_of_overflows_causes_no_rollback_while_the_scale_can_be_reduced() -> None:
    stack, scales = steep(random_stack(HOST, ROWS, F32)), scales_of(16, 16, 16, 16)
    result = trained(stack, scales)
    assert result.unmeasured is not None
    assert result.unmeasured.tolist() == [False, True, False, False]
    assert result.host_gradient_norm.isnan().tolist() == [False, True, False, False]
    assert judged(result).tolist() == [Reason.NONE] * ROWS
    state = seed_state(GARDEN, 3)
    signals = updated_signals(
        SeedSignals.unknown((ROWS, 3), CPU), state, HOST.slots, result, torch.full((ROWS, 3), NAN),
        torch.ones(ROWS), torch.ones(ROWS, 3), HOST.parameter_count,
    )  # fmt: skip
    assert signals.health.isnan().all(1).tolist() == [False, True, False, False]
    assert not signals.exploding[SUBJECT].any()


def test_overflows_at_the_least_scale_cause_a_rollback() -> None:
    """An isolated seed with NaN affects only its own gradient, at any scale."""
    for power, reason in ((1, Reason.NONE), (0, Reason.NOT_FINITE)):
        stack, scales = random_stack(HOST, ROWS, F32), scales_of(*[power + 1] * ROWS)
        stack.seeds[0][SUBJECT] = NAN
        result = trained(stack, scales)
        assert result.loss.isfinite().all()
        assert scales.scale[SUBJECT] == 2.0**power
        assert judged(result).tolist() == [Reason.NONE, reason, Reason.NONE, Reason.NONE]


# What scaling must not change.


@pytest.mark.parametrize("host", [HOST, small_mlp()], ids=["cnn", "mlp"])
def test_in_float32_powers_of_two_change_no_bit(host: Host) -> None:
    """Gradients are unscaled before clipping, norms and moments."""
    kinds = ("conv_heavy", "attention") if host is HOST else ("mlp", "mlp_small")
    garden: Garden = [{0: Plant(kinds[0], **LIVES["training"]), 1: Plant(kinds[1])}] * ROWS
    plain, scaled = (random_stack(host, ROWS, F32) for _ in range(2))
    settings = {"dtype": None, "count": 3, "garden": garden, "host": host, "max_norm": 0.5}
    expected = trained(plain, None, **settings)
    result = trained(scaled, scales_of(0, 5, 10, 16), **settings)
    assert (expected.host_gradient_norm > 0.5).any(), "otherwise nothing was clipped"
    for rows, wanted in zip(rows_of(scaled), rows_of(plain), strict=True):
        assert_identical(rows, wanted)
    assert torch.equal(result.host_gradient_norm, expected.host_gradient_norm)
    assert expected.unmeasured is None
    for norms, wanted in zip(result.seed_tensor_norms, expected.seed_tensor_norms, strict=True):
        torch.testing.assert_close(norms, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_match_float32_up_to_rounding(dtype: torch.dtype) -> None:
    """SGD without momentum writes the gradient into the parameters, clipped."""
    exact, mixed = (random_stack(HOST, ROWS, F32) for _ in range(2))
    before = copied(exact)
    expected = trained(exact, None, None, momentum=0.0)
    scales = scales_of(10, 12, 8, 6) if dtype == F16 else None
    result = trained(mixed, scales, dtype, momentum=0.0)
    tolerance = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.loss, expected.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        result.host_gradient_norm, expected.host_gradient_norm, rtol=tolerance, atol=0
    )
    for wanted, found, start in zip(
        [exact.host, *exact.seeds], [mixed.host, *mixed.seeds], [before.host, *before.seeds],
        strict=True,
    ):  # fmt: skip
        change, wanted_change = found - start, wanted - start
        assert (change - wanted_change).norm() <= tolerance * wanted_change.norm()
    assert not torch.equal(exact.host, before.host)
    assert not torch.equal(exact.seeds[0], before.seeds[0])


def test_scaling_preserves_gradients_that_would_underflow() -> None:
    """A head with tiny weights gives gradients below the smallest float16 number."""

    def first_layer(scales: LossScales | None, dtype: torch.dtype | None) -> Tensor:
        stack = random_stack(HOST, ROWS, F32)
        HOST.layout.views(stack.host)["head.weight"].mul_(2e-5)
        trained(stack, scales, dtype, garden=[{}] * ROWS)
        return HOST.layout.views(stack.host_optimizer.first)["conv0.weight"].clone()

    exact = first_layer(None, None)
    unscaled, scaled = first_layer(None, F16), first_layer(scales_of(*[16] * ROWS), F16)
    assert (unscaled - exact).norm() > 0.3 * exact.norm()
    assert (scaled - exact).norm() < 0.01 * exact.norm()


# Updates of a scale.


def test_scale_updates_match_torchs_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with one torch scaler per environment, over random overflows."""
    monkeypatch.setattr(scaler, "GROWTH_INTERVAL", 7)
    draw = random.Random(3)
    chance = [0.02, 0.1, 0.2, 0.0]
    scales = scales_of(10, 12, 8, 6)
    oracles = [
        torch.amp.GradScaler("cpu", init_scale=2.0**p, growth_interval=7) for p in (10, 12, 8, 6)
    ]
    weights = [nn.Parameter(torch.zeros(1)) for _ in oracles]
    optimizers = [torch.optim.SGD([w], lr=0.0) for w in weights]
    for _ in range(60):
        skipped = [draw.random() < p for p in chance]
        scales.adjust(torch.tensor(skipped), torch.ones(ROWS))
        for oracle, weight, optimizer, bad in zip(
            oracles, weights, optimizers, skipped, strict=True
        ):
            weight.grad = None
            oracle.scale(weight.sum()).backward()
            if bad:
                weight.grad = torch.full_like(weight, float("inf"))
            oracle.step(optimizer)
            oracle.update()
        expected = [min(max(oracle.get_scale(), MIN_SCALE), MAX_SCALE) for oracle in oracles]
        assert scales.scale.tolist() == expected
    assert len(set(scales.scale.tolist())) == ROWS


def test_the_scale_stays_within_its_bounds() -> None:
    scales, ones = scales_of(16, 0), torch.ones(2)
    for _ in range(GROWTH_INTERVAL):
        scales.adjust(torch.tensor([False, True]), ones)
    assert scales.scale.tolist() == [MAX_SCALE, MIN_SCALE]
    assert scales.adaptable.tolist() == [True, False]
    assert scales.table.skipped.tolist() == [0, GROWTH_INTERVAL]


def test_updating_some_rows_keeps_the_scales_of_others() -> None:
    table = ScaleTable.fresh(5, CPU)
    assert table.scale.tolist() == [START] * 5
    LossScales(table, torch.tensor([3, 1])).adjust(torch.tensor([True, False]), torch.ones(2))
    assert table.scale.tolist() == [START, START, START, START / 2, START]
    assert table.clean.tolist() == [0, 1, 0, 0, 0]
    assert table.skipped.tolist() == [0, 0, 0, 1, 0]


def test_a_state_with_another_number_of_environments_is_rejected() -> None:
    table = ScaleTable.fresh(3, CPU)
    state = table.state()
    table.scale.mul_(2)
    assert state["scale"].tolist() == [START] * 3, "a state must be a copy"
    table.load(state)
    assert table.scale.tolist() == [START] * 3
    with pytest.raises(UsageError, match=r"^resume: .* 3 .* 4.*--envs"):
        ScaleTable.fresh(4, CPU).load(state)
