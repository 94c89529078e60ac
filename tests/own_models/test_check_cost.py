"""``esper.check`` on a ResNet-18: bounded memory, and a price for growing and for a policy."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import esper
from esper.leyline.config import WorldConfig
from esper.leyline.phases import duration
from esper.own_models import step_cost
from esper.own_models.objectives import objective
from esper.own_models.step_cost import Cost, policy_price
from own_modules import ResidualNet, images, loader

TESTS = Path(__file__).parents[1]
MEASURE = """
import sys
import torch
import torch.nn.functional as F
import esper
from esper.tolaria.memory import forget_peak, peak_resident
from own_modules import ResNet18
torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(8, 3, 64, 64), torch.randint(1000, (8,))
esper.check
forget_peak()
before = peak_resident()
model = ResNet18()
assert sum(p.numel() for p in model.parameters()) > 11_000_000
if sys.argv[1] == "check":
    report = esper.check(model, [(x, y)], progress=False)
    assert report.ok and len(report.slots) == 8
else:
    optimizer = torch.optim.AdamW(model.parameters())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
after = peak_resident()
print("unknown" if before is None else after - before)
"""


def test_a_check_takes_at_most_the_memory_of_a_training_step_and_a_half() -> None:
    """Peaks of fresh processes: one that has run for long would reuse freed memory."""
    peaks = []
    for kind in ("check", "step"):
        command = [sys.executable, "-c", MEASURE, kind]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS)
        peaks.append(done.stdout.strip())
    if "unknown" in peaks:
        pytest.skip("this system does not tell how much memory a process has")
    check, step = map(int, peaks)
    assert step > 4 * 11_000_000 * 4
    assert check <= 1.5 * step


def test_growing_and_a_policy_are_priced_from_the_cost_of_a_step() -> None:
    torch.manual_seed(0)
    train, validation = loader(*images(64)), loader(*images(32, 1))
    report = esper.check(
        ResidualNet(), train, epochs=10, held_back={"validation": validation}, progress=False
    )
    assert report.splits == {"train": "64", "validation": "32"}
    assert report.target == "int64 [16]"
    assert report.policy is not None
    world = WorldConfig()
    steps = world.rounds * world.envs * 40 * 4
    assert report.policy.seconds == pytest.approx(steps * report.step_with_seeds.seconds)
    assert report.policy.bytes == world.envs * report.memory_with_seeds
    assert policy_price(1.0, 1.0, 100).batches == 8
    text = str(report)
    assert f"10 epochs of training: {duration(10 * 4 * report.step.seconds)} without" in text
    assert f"at least {duration(report.policy.seconds)} and" in text


def test_a_pass_that_other_work_slowed_down_does_not_count(monkeypatch) -> None:
    seconds = {2: [5.0, 1.0, 9.0, 1.0], 4: [2.0, 2.0, 30.0]}

    def measured(model: object, inputs: torch.Tensor, *others: object) -> Cost:
        return Cost(100.0 * len(inputs), seconds[len(inputs)].pop(0))

    monkeypatch.setattr(step_cost, "step_cost", measured)
    monkeypatch.setattr(step_cost, "SECONDS", 0.0)
    x, y = images(64)
    cost = step_cost.predicted_cost(ResidualNet(), x, y, objective("cross_entropy"), 64)
    assert cost == Cost(6400.0, 1.0 + 0.5 * 62)
