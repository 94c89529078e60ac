"""The rollout buffer: every number is stored at its step and environment."""

from types import SimpleNamespace

import torch
from torch import Tensor

from esper.leyline.actions import HEADS
from esper.simic.growth.collect import collect
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.features import Observation
from synthetic import changed, random_observation

LENGTH, ENVIRONMENTS, SLOTS = 5, 4, 3


def place(t: int) -> Tensor:
    """``1000 t + n`` of each environment."""
    return 1000 * t + torch.arange(ENVIRONMENTS)


def marked_observation(t: int) -> Observation:
    """Every number encodes environment n and step t, the masks in binary."""
    like = random_observation((ENVIRONMENTS,), SLOTS, seed=0)
    tensors = {}
    for name, tensor in like.tensors().items():
        mark = place(t).view(-1, *[1] * (tensor.ndim - 1)).expand_as(tensor)
        if tensor.dtype == torch.bool:
            tensors[name] = ((mark // 1000 + mark) % 3) == 0
        else:
            tensors[name] = mark.to(tensor.dtype)
    return changed(like, **tensors)


def act(t: int) -> tuple[Tensor, Tensor, Tensor]:
    actions = place(t)[:, None] + 10_000 * torch.arange(len(HEADS))
    return actions, place(t) + 0.25, place(t) + 0.5


def assert_everything_in_place(rollout: Rollout) -> None:
    for t in range(LENGTH):
        for name, tensor in marked_observation(t).tensors().items():
            kept = rollout.observation.tensors()[name]
            assert kept.shape == (LENGTH, *tensor.shape)
            assert kept.dtype == tensor.dtype
            assert torch.equal(kept[t], tensor), name
        for n in range(ENVIRONMENTS):
            mark = 1000 * t + n
            assert rollout.actions[t, n].tolist() == [mark + 10_000 * h for h in range(len(HEADS))]
            assert rollout.log_prob[t, n].item() == mark + 0.25
            assert rollout.values[t, n].item() == mark + 0.5
            assert rollout.rewards[t, n].item() == mark + 0.75
            assert rollout.terminated[t, n].item() == (t == LENGTH - 1)


def test_every_field_is_stored_at_its_step_and_environment() -> None:
    rollout = Rollout(LENGTH, marked_observation(0), act(0)[0])
    for t in range(LENGTH):
        rollout.write(t, marked_observation(t), *act(t))
        rollout.outcome(t, (place(t) + 0.75).double(), t == LENGTH - 1)
    assert_everything_in_place(rollout)


def test_the_buffer_keeps_observations_that_the_environment_overwrites() -> None:
    rollout = Rollout(LENGTH, marked_observation(0), act(0)[0])
    observation = marked_observation(1)
    rollout.write(1, observation, *act(1))
    for tensor in observation.tensors().values():
        tensor.zero_()
    assert bool((rollout.observation.host[1, 1] == 1001.0).all())


class Script:
    """An environment and an actor that only count."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(episode_length=LENGTH)
        self.environments = torch.arange(ENVIRONMENTS)
        self.log: list[tuple] = []
        self.t = 0

    def reset(self, episode: int) -> Observation:
        self.log.append(("reset", episode))
        return marked_observation(0)

    def begin(self, environments: Tensor, episode: int) -> None:
        self.log.append(("begin", environments.tolist(), episode))

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        assert torch.equal(observation.host, marked_observation(step).host)
        self.log.append(("act", step))
        return act(step)

    def step(self, actions: Tensor) -> SimpleNamespace:
        assert torch.equal(actions, act(self.t)[0])
        reward, self.t = (place(self.t) + 0.75).double(), self.t + 1
        self.log.append(("step", self.t - 1))
        return SimpleNamespace(
            observation=marked_observation(self.t), reward=reward, done=self.t == LENGTH
        )


def test_collect_pairs_observation_action_and_reward_of_each_step() -> None:
    script, calls = Script(), []
    rollout = collect(script, script, 7, lambda t, actions, step: calls.append((t, step.done)))
    assert_everything_in_place(rollout)
    assert sorted(script.log[:2]) == [("begin", [0, 1, 2, 3], 7), ("reset", 7)]
    assert script.log[2:] == [(what, t) for t in range(LENGTH) for what in ("act", "step")]
    assert calls == [(t, t == LENGTH - 1) for t in range(LENGTH)]
