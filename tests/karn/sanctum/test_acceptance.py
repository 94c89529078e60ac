"""Acceptance test: the policy page shows gradient norms of all heads after one update."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("textual_plotext", reason="Sanctum is not installed")

from esper.karn.sanctum.policy_page import ROWS
from esper.simic.ppo import PPOAgent
from esper.simic.training.vectorized import train_ppo_vectorized
from karn.sanctum.screen import shown

SMALL = {
    "envs": 4, "group_size": 4, "episode_length": 8, "max_batches": 1, "batch_size": 8,
    "lstm_hidden": 16, "minibatches": 2, "rounds": 1, "backend": "torch", "use_amp": True,
}  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def train(tmp_path: Path, device: str = "cpu") -> Path:
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return train_ppo_vectorized(telemetry_dir=str(tmp_path), device=device, **SMALL).path


def gradients(run: Path, size: tuple[int, int]) -> dict[str, tuple[str, str]]:
    """Return the gradient norm and state of each head as shown on the screen."""
    lines = shown(run, "2", size=size)
    heading = next(line for line in lines if "gradient norm  " in line)
    end = heading.index("gradient norm") + len("gradient norm")
    rows = lines[lines.index(heading) + 1 :][: len(ROWS)]
    return {
        row.split()[0]: (row[end - 13 : end].strip(), row[end:].split("  ")[-1]) for row in rows
    }


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
@pytest.mark.parametrize("device", DEVICES)
def test_after_the_first_update_every_head_has_a_finite_gradient_norm(
    tmp_path: Path, device: str, size: tuple[int, int]
) -> None:
    found = gradients(train(tmp_path, device), size)
    assert list(found) == list(ROWS)
    for head, (norm, state) in found.items():
        assert math.isfinite(float(norm)), head
        assert "missing" not in state
        assert "not finite" not in state
    assert float(found["op"][0]) > 0
    assert float(found["value"][0]) > 0


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_missing_and_nan_gradients_are_shown_as_such(
    tmp_path: Path, size: tuple[int, int], monkeypatch
) -> None:
    begin = PPOAgent.__init__

    def broken(agent: PPOAgent, *arguments: object, **settings: object) -> None:
        begin(agent, *arguments, **settings)  # type: ignore[arg-type]
        for parameter in agent.policy.head_parameters("op"):
            cut_off(parameter)
        for parameter in agent.policy.head_parameters("value"):
            parameter.register_hook(lambda gradient: gradient * float("nan"))

    monkeypatch.setattr(PPOAgent, "__init__", broken)
    found = gradients(train(tmp_path), size)
    assert found.pop("op")[0] == "missing"
    assert found.pop("value")[0] == "NaN"
    assert all(math.isfinite(float(norm)) for norm, _ in found.values())


def cut_off(parameter: nn.Parameter) -> None:
    """Imitate a broken autocast cache: the parameter is used, but gets no gradient."""
    parameter.requires_grad_(False)
