"""Truncated episodes: values of their final observations, what is learned there, and any units."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from esper.leyline.config import unflatten
from esper.leyline.config.reading import with_horizons
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.collect import collect
from esper.simic.gym.vector_environment import GymEnvironments
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import even_split
from scripted_gym import CPU, Scripted, agent_for, scripted

STEPS = 40


class Forever(gymnasium.Env):
    """Rewards 1 in every step, shows nothing and never terminates."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return np.ones(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return np.ones(2, np.float32), 1.0, False, False, {}


def values_after(limit: int, rounds: int, **settings: Any) -> list[float]:
    """Values along an episode that is truncated after ``limit`` steps, the final one included."""
    config = with_horizons(unflatten({"gym": "Forever", "rounds": rounds, **settings}))
    count, length = config.world.envs, config.gymnasium.rollout_steps
    environments = GymEnvironments([TimeLimit(Forever(), limit) for _ in range(count)], 1)
    agent = gym_agent(config, environments.shape, CPU)
    environments.reset()
    agent.begin(torch.arange(count), 0)
    for number in range(rounds):
        agent.update(collect(environments, agent, length, number))
    environments.reset()
    agent.begin(torch.arange(count), 0)
    values = []
    for t in range(limit + 1):
        values.append(
            float(agent.return_moments.restore(agent.act(environments.observation, t)[2])[0])
        )
        if t < limit:
            environments.step(np.zeros((count, 1), np.int64))
    return values


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
@pytest.mark.parametrize("memory", ["lstm", "none"])
def test_truncation_leaves_the_value_that_of_the_endless_task(memory: str, algorithm: str) -> None:
    small = {"discount": 0.9, "envs": 4, "rollout_steps": 64, "lstm_hidden": 16, "ppo_epochs": 8}
    small |= {"minibatches": 2, "learning_rate": 3e-3}
    values = values_after(5, 20, memory=memory, algorithm=algorithm, **small)
    assert all(value == pytest.approx(10.0, rel=0.05) for value in values), values


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("memory", ["lstm", "none"])
@pytest.mark.parametrize("limit", [10, 20, 50])
def test_truncation_leaves_the_value_at_the_defaults(limit: int, memory: str, critic: str) -> None:
    values = values_after(limit, 60, memory=memory, critic=critic)
    assert all(value == pytest.approx(100.0, rel=0.05) for value in values), values


def prepared(**settings: Any) -> tuple[PPOAgent, Any, Any]:
    """An agent, a rollout in which episodes are truncated, and its sequences."""
    environments = scripted(5)
    agent = agent_for(environments, minibatches=3, ppo_epochs=1, **settings)
    agent.update(collect(environments, agent, STEPS, 0))
    agent.return_moments.update(torch.tensor([1.0, 3.0, 8.0]))
    rollout = collect(environments, agent, STEPS, 1)
    return agent, rollout, agent._prepare_batch(rollout).sequences


@pytest.mark.parametrize("settings", [{}, {"critic": "separate"}, {"memory": "none"}])
def test_the_second_half_of_an_update_has_the_values_of_the_weights_of_then(settings: dict) -> None:
    """Each step's value as the policy gives it one step at a time; ratios stay those of before."""
    agent, rollout, _ = prepared(**settings)
    before = agent._prepare_batch(rollout)
    collected = rollout.values.clone()
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    later = agent._prepare_batch(rollout, before)
    assert torch.equal(rollout.values, collected)
    agent.hidden = rollout.hidden
    for t in range(STEPS):
        features, masks = rollout.observation.features[t], rollout.observation.masks[t]
        value = agent.value(type(rollout.observation)(features, masks))
        agent.act(type(rollout.observation)(features, masks), t)
        agent.reset_state(~rollout.valid[t])
        valid = rollout.valid[t]
        expected = agent.return_moments.restore(value)[valid]
        torch.testing.assert_close(later.estimates.values[t, valid], expected, rtol=1e-4, atol=1e-4)
    changed = (later.estimates.values - before.estimates.values).abs()
    assert float(changed[rollout.valid].min()) > 0.0
    assert torch.equal(later.sequences.old_log_prob, before.sequences.old_log_prob)


@pytest.mark.parametrize("settings", [{}, {"critic": "separate"}, {"memory": "none"}])
def test_values_of_final_observations_are_those_of_windows(settings: dict) -> None:
    """In float64, one episode at a time, with an empty memory at the begin of its window."""
    agent, rollout, _ = prepared(**settings)
    policy = agent.policy.double()
    cut = rollout.cut_offs
    places = []
    for n in range(5):
        for t in range(STEPS):
            if not rollout.truncated[t, n]:
                continue
            places.append((t + 1, n))
            ((index,),) = (
                ((cut.first + cut.lengths == t + 1) & (cut.environment == n)).nonzero().tolist()
            )
            begin = int(cut.first[index])
            assert bool(rollout.valid[begin : t + 1, n].all())
            if begin == 0 or not agent.policy.memory_width:
                assert begin == t + 1 or agent.policy.memory_width
            hidden = tuple(state.double() for state in policy.initial_hidden(1))
            for step in range(begin, t + 2):
                rows = rollout.observation if step < STEPS else None
                features = rollout.last_observation.features[n : n + 1]
                masks = rollout.last_observation.masks[n : n + 1]
                if rows is not None:
                    features = rows.features[step, n : n + 1]
                    masks = rows.masks[step, n : n + 1]
                moments = agent.moments.features
                x = ((features.double() - moments.mean) / moments.deviation).clamp(-10, 10)
                *_, value, hidden = policy.act(type(rollout.observation)(x, masks), hidden, None)
            expected = agent.return_moments.restore(value)[0]
            assert float(cut.values[t + 1, n]) == pytest.approx(float(expected), abs=1e-4)
    assert len(places) > 5
    known = [tuple(place) for place in (~cut.values.isnan()).nonzero().tolist()]
    assert sorted(known) == sorted(places)


def test_the_critic_alone_learns_from_final_observations_and_windows() -> None:
    agent, rollout, sequences = prepared()
    cut, moments = rollout.cut_offs, agent.return_moments
    weight, critic = sequences.weight, sequences.critic_weight
    assert weight.sum() == rollout.valid.sum()
    finals = cut.final.sum()
    assert critic.sum() == rollout.valid.sum() + finals + cut.lengths.sum()
    alone = sequences.counts == 0
    assert torch.equal(weight[:, alone], torch.zeros_like(weight[:, alone]))
    assert all(bool((state[:, alone] == 0).all()) for state in sequences.hidden)
    ends = (critic > weight) & ~alone
    expected = moments.scale(cut.values[:-1][cut.final])
    assert sorted(sequences.targets[ends].tolist()) == sorted(expected.tolist())
    # A window learns the targets of the steps that it repeats.
    whole = sequences.targets[:, ~alone].T[weight[:, ~alone].T > 0].tolist()
    assert set(sequences.targets[:, alone][critic[:, alone] > 0].tolist()) <= set(whole)


def test_minibatches_have_nearly_equal_numbers_of_steps() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        lengths = torch.randint(1, 128, (60,), generator=generator).tolist()
        counts = [length * (i < 40) for i, length in enumerate(lengths)]
        order = torch.randperm(60, generator=generator).tolist()
        minibatches = even_split(order, counts, lengths, 4)
        assert sorted(i for part in minibatches for i in part.tolist()) == [*range(60)]
        for sizes in (counts, [n - c for n, c in zip(lengths, counts, strict=True)]):
            loads = [sum(sizes[i] for i in part.tolist()) for part in minibatches]
            assert max(loads) < 1.2 * min(loads)


def test_a_memoryless_policy_learns_from_steps_without_padding() -> None:
    agent, rollout, sequences = prepared(memory="none")
    assert sequences.weight is None
    assert sequences.actions.shape[:2] == (1, int(rollout.valid.sum()))
    sizes = [len(part) for part in agent._draw_minibatches(sequences)]
    assert max(sizes) - min(sizes) <= 1


class Scaled(Scripted):
    """Observations and rewards in other units."""

    def __init__(self, observations: float, rewards: float):
        super().__init__()
        self.units = observations, rewards

    def reset(self, **arguments: Any) -> tuple[Any, dict]:
        seen, info = super().reset(**arguments)
        return seen * self.units[0], info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        seen, reward, *rest = super().step(action)
        return seen * self.units[0], reward * self.units[1], *rest


@pytest.mark.parametrize("power", [-27, -10, 10, 27])
def test_the_units_of_observations_and_rewards_change_nothing(power: int) -> None:
    """By powers of two, which are exact: the same bits after three updates."""
    weights = []
    for units in ((1.0, 1.0), (2.0**power, 2.0**-power)):
        environments = GymEnvironments([Scaled(*units) for _ in range(4)], 3)
        environments.reset()
        agent = agent_for(environments, ppo_epochs=2)
        for number in range(3):
            agent.update(collect(environments, agent, 24, number))
        weights.append([p.detach().clone() for p in agent.policy.parameters()])
    assert all(map(torch.equal, *weights))


def test_rewards_that_never_change_leave_the_policy_finite() -> None:
    environments = GymEnvironments([Scaled(0.0, 0.0) for _ in range(4)], 3)
    environments.reset()
    agent = agent_for(environments)
    for number in range(2):
        agent.update(collect(environments, agent, 24, number))
    assert agent.refusal is None
    assert all(bool(p.isfinite().all()) for p in agent.policy.parameters())
