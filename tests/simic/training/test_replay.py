"""Files of refused updates, written by a run and replayed by ``esper replay``."""

import math

import pytest
import torch

from esper.leyline.config import LearnerConfig, TrainConfig, flatten
from esper.leyline.errors import UsageError
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from esper.simic.growth.agent import growth_agent
from esper.simic.training.replay import replay, write_refusal
from synthetic import CPU, synthetic_rollout

CONFIG = TrainConfig(learner=LearnerConfig(lstm_hidden=8))


def refused(tmp_path, spoil):
    agent = growth_agent(CONFIG.learner, CONFIG.world.seed, CPU)
    agent.update(synthetic_rollout(agent, 4, 8, 2, seed=1))
    rollout = synthetic_rollout(agent, 4, 8, 2, seed=2, episode=1)
    spoil(agent, rollout)
    agent.update(rollout)
    return write_refusal(tmp_path, 2, agent, flatten(CONFIG)), agent


def nan_reward(agent, rollout) -> None:
    rollout.rewards[2, 3] = math.nan


def infinite_moment(agent, rollout) -> None:
    agent.optimizer.states[agent.policy.op_head.out.bias]["exp_avg"][1] = math.inf


def gradient_that_overflows(agent, rollout) -> None:
    """A huge weight after a tiny one: the outputs are finite, the tiny one's gradient is not."""
    with torch.no_grad():
        agent.policy.value_head.hidden.weight.mul_(0.0)
        agent.policy.value_head.hidden.bias.fill_(1e-30)
        agent.policy.value_head.out.weight.fill_(1e30)
    rollout.rewards[:] = torch.randn(rollout.rewards.shape) * 1e15


@pytest.mark.parametrize(
    ("spoil", "tensor"),
    [
        (nan_reward, "reward"),
        (infinite_moment, "optimizer/op_head.out.bias/exp_avg"),
        (gradient_that_overflows, "gradient/"),
    ],
)
def test_a_replay_finds_the_same_tensor(tmp_path, spoil, tensor, capsys) -> None:
    path, _ = refused(tmp_path, spoil)
    seen = replay(path)
    assert seen.run_tensor.startswith(tensor)
    assert seen.replay_tensor == seen.run_tensor
    assert run_guarded(esper, ["replay", str(path)]) == 0
    assert seen.run_tensor in capsys.readouterr().out


def test_a_replay_without_the_fault_reports_none(tmp_path, capsys) -> None:
    path, _ = refused(tmp_path, nan_reward)
    content = torch.load(path, weights_only=True)
    content["rollout"]["rewards"][2, 3] = 0.0
    torch.save(content, path)
    assert replay(path).replay_tensor is None
    assert run_guarded(esper, ["replay", str(path)]) == 1
    assert "every number is finite" in capsys.readouterr().out


def test_an_invalid_file_is_reported_in_one_line(tmp_path, capsys) -> None:
    text = tmp_path / "text.pt"
    text.write_text("hello")
    other = tmp_path / "other.pt"
    torch.save({"schema": 99}, other)
    for path in (tmp_path / "missing.pt", text, other, tmp_path):
        with pytest.raises(UsageError, match=r"^file: "):
            replay(path)
        assert run_guarded(esper, ["replay", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert run_guarded(esper, ["replay"]) == 2
