"""Advantages relative to the other environments of the group that share the host."""

from copy import copy

import pytest
import torch
from torch import Tensor

from esper.leyline.config import LearnerConfig, check, unflatten
from esper.leyline.errors import UsageError
from esper.runtime.tasks import find
from esper.simic.algorithms.impala import ImpalaConfig
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.collect import collect
from esper.simic.growth.group_baseline import GroupedEstimator
from esper.simic.impala import VTraceEstimator
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.simic.training.setup import build_agent
from esper.tamiyo.policy.features import Observation
from support import small_environments
from synthetic import CPU

SIZE = 3
COUNT = 6


@pytest.fixture(scope="module")
def rollout() -> Rollout[Observation]:
    settings = {"seed": 3, "group_size": SIZE, "episode_length": 5, "batch_size": 8, "threads": 1}
    env = small_environments([find("digits_shift")], COUNT, **settings)
    return collect(env, agent(True), 0)


def agent(grouped: bool, impala: ImpalaConfig | None = None) -> PPOAgent[Observation]:
    config = LearnerConfig(lstm_hidden=8)
    return growth_agent(
        config, 0, CPU, learner_arguments=impala and impala.learner_arguments(config),
        baseline_group=SIZE if grouped else None,
    )  # fmt: skip


def advantages(learner: PPOAgent[Observation], rollout: Rollout[Observation]) -> Tensor:
    found = learner.estimator.estimate(
        rollout, learner.policy, learner.moments, learner.return_moments
    )
    return found.advantages


def test_what_a_host_can_gain_does_not_move_the_advantages_of_its_group(
    rollout: Rollout[Observation],
) -> None:
    bonus = torch.tensor([7.0] * SIZE + [-4.0] * SIZE)
    richer = copy(rollout)
    richer.rewards = rollout.rewards.clone()
    richer.rewards[-1] += bonus
    torch.testing.assert_close(
        advantages(agent(True), richer), advantages(agent(True), rollout), atol=1e-5, rtol=1e-5
    )
    moved = advantages(agent(False), richer) - advantages(agent(False), rollout)
    assert (moved[-1] - bonus).abs().max() < 1e-5, "without the baseline they move"


def test_vtrace_takes_the_baseline_too(rollout: Rollout[Observation]) -> None:
    learner = agent(True, ImpalaConfig())
    assert isinstance(learner.estimator, GroupedEstimator)
    assert isinstance(learner.estimator.estimator, VTraceEstimator)
    found = advantages(learner, rollout).view(-1, COUNT // SIZE, SIZE)
    assert found.mean(2).abs().max() < 1e-5


@pytest.mark.parametrize(("envs", "size"), [(12, 8), (8, 1)])
def test_groups_that_are_not_whole_are_refused(envs: int, size: int) -> None:
    with pytest.raises(UsageError, match=r"^group_baseline: needs whole groups"):
        check(unflatten({"group_baseline": True, "envs": envs, "group_size": size}))


@pytest.mark.parametrize(
    ("settings", "group"),
    [
        ({}, 8),
        ({"envs": 12}, None),
        ({"group_size": 1}, None),
        ({"envs": 12, "group_size": 6}, 6),
        ({"group_baseline": False}, None),
        ({"algorithm": "impala"}, None),
        ({"algorithm": "impala", "group_baseline": True}, 8),
    ],
)
def test_ppo_takes_the_baseline_where_groups_are_whole(settings, group) -> None:
    config = unflatten(settings)
    check(config)
    assert config.baseline_group == group
    learner = build_agent(config, CPU)
    grouped = isinstance(learner.estimator, GroupedEstimator)
    assert grouped == (group is not None)
    assert not grouped or learner.estimator.group_size == group
