"""Frozen weights during a rollout, and the cost of its steps."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.simic.gym.collect import collect, play
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.recurrent import FlatObservation
from scripted_gym import agent_for, scripted

ENVS, STEPS = 4, 9
FAST = {"learning_rate": 0.05, "ppo_epochs": 2, "normalise_observations": False}
KINDS = [{"critic": "separate"}, {"critic": "shared"}, {"memory": "none"}]


def check_against_single_calls(fresh: PPOAgent[Any], rollout: Rollout[Any], number: int) -> None:
    """Compare the rollout with single calls of a policy without frozen weights."""
    fresh.hidden = rollout.hidden
    fresh.continue_rollout(torch.arange(ENVS), number)
    for t in range(STEPS):
        seen = rollout.observation
        actions, log_prob, value = fresh.act(FlatObservation(seen.features[t], seen.masks[t]), t)
        assert torch.equal(actions, rollout.actions[t])
        torch.testing.assert_close(log_prob, rollout.log_prob[t], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value, rollout.values[t], rtol=1e-5, atol=1e-6)
        fresh.reset_state(~rollout.valid[t])


@pytest.mark.parametrize("kind", KINDS)
def test_every_rollout_uses_the_current_weights(kind) -> None:
    """After an update, and after loading the state of another learner."""
    environments, other = scripted(ENVS), agent_for(scripted(ENVS), seed=8, **kind)
    agent = agent_for(environments, **FAST, **kind)
    for number in range(3):
        rollout = collect(environments, agent, STEPS, number)
        fresh = agent_for(scripted(ENVS), **FAST, **kind)
        fresh.load_state(agent.state())
        check_against_single_calls(fresh, rollout, number)
        if number == 0:
            agent.update(rollout)
        else:
            agent.load_state(other.state())


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_rollout_keeps_no_frozen_weights(kind) -> None:
    environments = scripted(ENVS)
    agent, fresh = (agent_for(environments, **FAST, **kind) for _ in range(2))

    def stop(step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(environments, agent, STEPS, 0, stop)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.mul_(1.5).add_(0.1)
    fresh.policy.load_state_dict(agent.policy.state_dict())
    seen = environments.observation
    for learner in (agent, fresh):
        learner.begin(torch.arange(ENVS), 1)
    for mine, expected in zip(agent.act(seen, 0), fresh.act(seen, 0), strict=True):
        assert torch.equal(mine, expected)


def test_an_evaluation_uses_the_current_weights() -> None:
    agent, other = (agent_for(scripted(ENVS), seed=seed) for seed in (3, 8))
    with torch.no_grad():
        for parameter in other.policy.parameters():
            parameter.mul_(8.0)

    def taken(learner: PPOAgent[Any]) -> list[Any]:
        environments = scripted(ENVS, masked=False)
        play(learner, environments)
        return [environment.log for environment in environments.environments]

    before, wanted = taken(agent), taken(other)
    assert before != wanted
    agent.load_state(other.state())
    assert taken(agent) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_do_not_detach_gradients(kind) -> None:
    agent = agent_for(scripted(ENVS), **FAST, **kind)
    rollout = collect(scripted(ENVS), agent, STEPS, 0)
    with agent.policy.frozen_weights():
        hidden = rollout.hidden or agent.policy.initial_hidden(ENVS)
        evaluation = agent.policy.evaluate_actions(rollout.observation, rollout.actions, hidden)
    (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
    assert all(parameter.grad is not None for parameter in agent.policy.parameters())


class Run(TorchDispatchMode):
    """Counts the dispatched tensor operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, call, types, arguments=(), named=None) -> Any:
        self.operations[call.overloadpacket.__name__] += 1
        return call(*arguments, **(named or {}))


def operations(count: int, steps: int, **kind: Any) -> Counter[str]:
    """Operations of a rollout in which no episode ends and noise is drawn once."""
    environments = scripted(count, shortest=99, longest=99)
    agent = agent_for(environments, **kind)
    with Run() as run:
        collect(environments, agent, steps, 0)
    return run.operations


@pytest.mark.parametrize("kind", KINDS)
def test_the_operations_of_a_step_do_not_depend_on_the_number_of_environments(kind) -> None:
    operations(3, 20, **kind)  # fills what a process caches once
    assert operations(2, 20, **kind) == operations(40, 20, **kind)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_neither_copy_weights_nor_generate_noise(kind) -> None:
    """That is done once per rollout, whatever its length."""
    short, long = operations(4, 10, **kind), operations(4, 30, **kind)
    trunks = 2 if kind.get("critic") == "separate" else 1
    # Encodings and outputs of two trunks, and what the actor sees beside its memory.
    joined = 2 * (trunks - 1) + (kind.get("memory") != "none")
    for name in ("cat", "clone", "bitwise_and", "__rshift__"):
        assert long[name] - short[name] == (20 * joined if name == "cat" else 0), name
