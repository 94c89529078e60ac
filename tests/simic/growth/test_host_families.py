"""The growth environment with fully connected hosts and transformers."""

import pytest
import torch

from esper.kasmina.hosts.host import Host
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.config import LearnerConfig
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tamiyo.random_actor import RandomActor
from esper.tolaria.precision import Precision
from support import CPU, F64, names_of, small_gpt, small_host, small_mlp, small_task

MLP, GPT = small_mlp(), small_gpt()

every_host = pytest.mark.parametrize("host", [MLP, GPT], ids=lambda host: type(host).__name__)


def growth(
    hosts: list[Host], environments: list[int], dtype: torch.dtype = torch.float32
) -> GrowthEnv:
    config = GrowthConfig(
        2, group_size=2, episode_length=10, max_batches=1, batch_size=6, dtype=dtype
    )
    tasks = [small_task(host) for host in hosts]
    return GrowthEnv(tasks, torch.tensor(environments), config, Precision("cpu"), CPU)


@every_host
def test_only_blueprints_of_its_family_grow_in_a_host(host: Host) -> None:
    environment, actor, grown = growth([host], list(range(24))), RandomActor(1), set()
    actor.begin(environment.environments, 0)
    observation = environment.reset(0)
    for step in range(10):
        offered = observation.masks.kinds.flatten(0, 1).any(0).nonzero()[:, 0].tolist()
        assert {BLUEPRINTS[kind] for kind in offered} == set(names_of(host))
        result = environment.step(actor.act(observation, step)[0])
        observation, state = result.observation, result.report.after
        assert result.reward.isfinite().all()
        grown |= {BLUEPRINTS[kind] for kind in state.blueprint[state.living].tolist()}
    assert grown == set(names_of(host))


@every_host
def test_an_environment_replays_alone_with_recorded_actions(host: Host) -> None:
    """Alone it gives the same rewards as among others."""

    def rewards(environments: list[int], actions: list[torch.Tensor]) -> torch.Tensor:
        environment = growth([host], environments, F64)
        environment.reset(0)
        return torch.stack([environment.step(taken).reward for taken in actions])

    environment, actor = growth([host], [3, 8, 9], F64), RandomActor(1)
    actor.begin(environment.environments, 0)
    observation, actions = environment.reset(0), []
    for step in range(10):
        actions.append(actor.act(observation, step)[0])
        observation = environment.step(actions[-1]).observation
    together = rewards([3, 8, 9], actions)
    alone = rewards([8], [taken[1:2] for taken in actions])
    torch.testing.assert_close(alone[:, 0], together[:, 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("hosts", [[MLP], [GPT], [small_host(), GPT]], ids=len)
def test_a_policy_learns_from_rollouts_of_such_hosts(hosts: list[Host]) -> None:
    """Also with images and text in one rollout."""
    environment = growth(hosts, list(range(8)))
    agent = growth_agent(LearnerConfig(lstm_hidden=16), 0, CPU)
    before = [p.detach().clone() for p in agent.policy.parameters()]
    metrics = agent.update(collect(environment, agent, 0))
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    after = agent.policy.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
