"""The environment takes a fully connected host like any other."""

import torch

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.config import LearnerConfig
from esper.simic.agents import growth_agent
from esper.simic.environment import GrowthEnv
from esper.simic.rollout import collect
from esper.simic.step import GrowthConfig
from esper.tamiyo.baselines import RandomActor
from esper.tolaria.precision import Precision
from oracles.naive import MLP_BRANCHES
from support import CPU, F64, small_mlp, small_task


def growth(environments: list[int], dtype: torch.dtype = torch.float32) -> GrowthEnv:
    config = GrowthConfig(
        2, group_size=2, episode_length=10, max_batches=1, batch_size=6, dtype=dtype
    )
    task = small_task(small_mlp())
    return GrowthEnv([task], torch.tensor(environments), config, Precision("cpu"), CPU)


def test_its_own_blueprints_and_no_others_grow_in_an_mlp() -> None:
    environment, actor, grown = growth(list(range(24))), RandomActor(1), set()
    actor.begin(environment.environments, 0)
    observation = environment.reset(0)
    for step in range(10):
        offered = observation.masks.kinds.flatten(0, 1).any(0).nonzero()[:, 0].tolist()
        assert {BLUEPRINTS[kind] for kind in offered} == set(MLP_BRANCHES)
        result = environment.step(actor.act(observation, step)[0])
        observation, state = result.observation, result.report.after
        assert result.reward.isfinite().all()
        grown |= {BLUEPRINTS[kind] for kind in state.blueprint[state.living].tolist()}
    assert grown == set(MLP_BRANCHES)


def test_recorded_actions_replay_alone_in_an_mlp() -> None:
    """Among others, and by itself."""

    def rewards(environments: list[int], actions: list[torch.Tensor]) -> torch.Tensor:
        environment = growth(environments, F64)
        environment.reset(0)
        return torch.stack([environment.step(taken).reward for taken in actions])

    environment, actor = growth([3, 8, 9], F64), RandomActor(1)
    actor.begin(environment.environments, 0)
    observation, actions = environment.reset(0), []
    for step in range(10):
        actions.append(actor.act(observation, step)[0])
        observation = environment.step(actions[-1]).observation
    together = rewards([3, 8, 9], actions)
    alone = rewards([8], [taken[1:2] for taken in actions])
    torch.testing.assert_close(alone[:, 0], together[:, 1], rtol=1e-9, atol=1e-9)


def test_a_policy_learns_from_rollouts_of_mlps() -> None:
    environment = growth(list(range(8)))
    agent = growth_agent(LearnerConfig(lstm_hidden=16), 0, CPU)
    before = [p.detach().clone() for p in agent.policy.parameters()]
    metrics = agent.update(collect(environment, agent, 0))
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    after = agent.policy.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
