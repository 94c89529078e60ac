"""Environments of a group whose seeds start from the same weights, in float64."""

import pytest
import torch
from torch import Tensor

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime import data
from esper.runtime.tasks import Task
from support import F64, small_environments
from wishes import Wish, Wishes, wished_actions

LENGTH, SIZE, PARTED, PARTS = 14, 3, 2, 9
"""Steps, environments per group, the environment that acts differently, and when it does."""


def accuracy(environments: Tensor, common_seeds: bool, backend: str) -> Tensor:
    """Validation expected accuracy in every step, ``[T, N]``."""
    host = CnnHost(channels=(3, 4), classes=10, image=(8, 8, 1))
    task = Task("tiny", "digits on a tiny host", host, lambda: data.digits())
    settings = {"seed": 5, "group_size": SIZE, "episode_length": LENGTH, "dtype": F64}
    settings |= {"common_seeds": common_seeds, "batch_size": 8, "backend": backend}
    env = small_environments([task], environments, **settings)
    wishes: Wishes = {n: [Wish("conv_heavy")] for n in range(2 * SIZE)}
    wishes[PARTED] = [*wishes[PARTED], Wish("norm", slot=1, start=PARTS)]
    observation, found = env.reset(0), []
    for step in range(LENGTH):
        done = env.step(wished_actions(wishes, environments, observation, step))
        observation = done.observation
        found.append(done.report.scores.expected[: len(environments)].clone())
    return torch.stack(found)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_group_stays_equal_until_its_actions_differ(backend: str) -> None:
    every = accuracy(torch.arange(2 * SIZE), True, backend)
    own, other = every[:, :SIZE], every[:, SIZE:]
    assert torch.equal(own[:, 0], own[:, 1])
    assert torch.equal(own[:PARTS, 0], own[:PARTS, PARTED])
    assert not torch.equal(own[:, 0], own[:, PARTED])
    assert torch.equal(other[:, :1].expand_as(other), other)
    assert not torch.equal(own[:, 0], other[:, 0])


def test_without_common_seeds_each_environment_draws_its_own() -> None:
    own = accuracy(torch.arange(SIZE), False, "auto")
    assert torch.equal(own[:2, 0], own[:2, 1])  # a germinated seed computes nothing
    assert not torch.equal(own[:PARTS, 0], own[:PARTS, 1])


def test_a_part_of_a_group_has_the_seeds_of_the_whole() -> None:
    whole = accuracy(torch.arange(2 * SIZE), True, "auto")
    part = accuracy(torch.tensor([1, PARTED, SIZE + 1]), True, "auto")
    assert torch.equal(part, whole[:, [1, PARTED, SIZE + 1]])
