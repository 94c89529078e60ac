"""Captured functions, tested on a CPU with a recorder that replays by calling the function."""

import logging

import pytest
import torch
from torch import Tensor

from esper.leyline.config import LearnerConfig
from esper.simic.graphs import WARMUPS, CapturedAgent, CapturedFunction, agent_class
from esper.simic.growth.agent import GrowthMoments, growth_agent
from esper.simic.ppo import PPOAgent
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from synthetic import CPU, synthetic_rollout


class Replayer:
    """Like CUDA, computes nothing while recording; a replay writes to the same results."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.warmed = 0

    def warm(self, function):
        self.warmed += 1
        return function()

    def record(self, function):
        self.recorded += 1
        results: dict[str, Tensor] = {}

        def replay() -> None:
            self.replayed += 1
            for name, x in function().items():
                results[name] = results[name].copy_(x) if name in results else x.clone()

        return replay, results


def test_only_recorded_shapes_are_replayed() -> None:
    recorder = Replayer()
    doubled = CapturedFunction(lambda inputs: {"y": 2.0 * inputs["x"]}, recorder, "test")
    kept = []
    for i in range(WARMUPS + 4):
        kept.append(doubled({"x": torch.full((3,), float(i))})["y"])
    assert (recorder.warmed, recorder.recorded, recorder.replayed) == (WARMUPS, 1, 4)
    assert [y[0].item() for y in kept] == [2.0 * i for i in range(WARMUPS + 4)]
    assert torch.equal(doubled({"x": torch.ones(5)})["y"], torch.full((5,), 2.0))
    assert torch.equal(doubled({"x": torch.ones(3).double()})["y"], torch.full((3,), 2.0).double())
    assert recorder.replayed == 4


def test_a_failed_recording_warns_once_and_runs_eagerly(caplog) -> None:
    class Broken(Replayer):
        def record(self, function):
            raise RuntimeError("operation not permitted when stream is capturing\nlong")

    step = CapturedFunction(lambda inputs: {"y": inputs["x"] + 1.0}, Broken(), "update")
    with caplog.at_level(logging.WARNING, "esper"):
        found = [step({"x": torch.tensor(float(i))})["y"].item() for i in range(8)]
    assert found == [i + 1.0 for i in range(8)]
    (record,) = caplog.records
    assert record.getMessage().startswith("update: not captured")


def test_only_cuda_devices_capture_graphs() -> None:
    assert agent_class(CPU, "default") is PPOAgent
    assert agent_class(torch.device("cuda"), "default") is CapturedAgent
    for mode in ("off", "reduce-overhead", "max-autotune"):
        assert agent_class(torch.device("cuda"), mode) is PPOAgent


@pytest.mark.parametrize("missing", [False, True])
def test_a_captured_agent_learns_the_same_bits_as_a_plain_one(missing: bool) -> None:
    config = LearnerConfig(lstm_hidden=8, ppo_epochs=2, minibatches=2)
    plain = growth_agent(config, 0, CPU)
    recorder = Replayer()
    captured = CapturedAgent(
        config, 0, CPU, lambda: FactoredLSTM(8), GrowthMoments(CPU), recorder=recorder
    )
    results = []
    for agent in (plain, captured):
        if missing:
            for parameter in agent.policy.head_parameters("slot"):
                parameter.requires_grad_(False)
        rounds = [
            agent.update(synthetic_rollout(agent, 5, 8, 2, seed=i, episode=i)) for i in range(3)
        ]
        results.append(rounds)
    assert recorder.recorded == 2
    assert recorder.replayed > 10
    assert results[0] == results[1]
    for mine, theirs in zip(plain.policy.parameters(), captured.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
