"""Gradient health compared with values by hand; signals of a seed from step to step."""

import pytest
import torch

from esper.kasmina.seeds import SeedSignals
from esper.leyline.stages import Stage
from esper.tolaria.backends import EpochResult
from esper.tolaria.signals import gradient_health, updated_signals
from support import CPU, F64, LIVES, Plant, seed_state, small_host

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
