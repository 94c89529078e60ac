"""Environments in a process each, beside the same in one process."""

import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from test_gym_environment import choices_of

from esper.leyline.errors import UsageError
from esper.simic.gym.process_environments import ProcessEnvironments
from esper.simic.gym.vector_environment import GymEnvironments
from scripted_gym import Scripted, scripted

LIMIT = 5


class Failing(Scripted):
    """Raises in its fourth step."""

    def step(self, action):
        if len(self.log[-1]["steps"]) == 3:
            raise RuntimeError("the motor\nis broken")
        return super().step(action)


def one(kind: type[Scripted], identity: int, **arguments) -> GymEnvironments:
    return GymEnvironments([kind(**arguments)], 3, identity, LIMIT)


def in_processes(kinds: list[type[Scripted]], first: int = 0, **arguments) -> ProcessEnvironments:
    makers = [partial(one, kind, first + i, **arguments) for i, kind in enumerate(kinds)]
    return ProcessEnvironments(makers, 3, first, LIMIT)


def assert_equal(a, b) -> None:
    for name, x in a.observation.tensors().items():
        assert torch.equal(x, b.observation.tensors()[name]), name
    for name in ("reward", "terminated", "over", "returns", "lengths", "identities"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert a.ended == b.ended


def test_the_bits_are_those_of_one_process_also_after_restoring() -> None:
    mine = in_processes([Scripted] * 3, first=7)
    reference = scripted(3, 3, 7)
    reference.limit = LIMIT
    mine.reset()
    draw, ends = np.random.default_rng(0), 0
    for t in range(40):
        assert_equal(mine, reference)
        choices = choices_of(reference, draw)
        mine.step(choices)
        reference.step(choices)
        ends += len(reference.ended)
        if t == 22:
            state = mine.state()
            assert all(torch.equal(x, state[name]) for name, x in reference.state().items())
            mine.close()
            mine = in_processes([Scripted] * 3, first=7)
            mine.load(state)
            mine.ended = reference.ended
            mine.reward, mine.terminated = reference.reward.copy(), reference.terminated.copy()
    assert ends > 10
    mine.close()


def test_a_fault_is_one_line_that_names_its_environment(capfd) -> None:
    mine = in_processes([Scripted, Failing], masked=False, shortest=9, longest=9)
    mine.reset()
    draw = np.random.default_rng(0)
    says = "gym: environment 1 raised RuntimeError: the motor, after 3 steps"
    for _ in range(3):
        mine.step(choices_of(mine, draw))
    choices = choices_of(mine, draw)
    with pytest.raises(UsageError, match=says):
        mine.step(choices)
    mine.close()
    assert "Traceback" not in capfd.readouterr().err


def test_the_end_of_a_process_is_one_line() -> None:
    mine = in_processes([Scripted] * 2)
    mine.reset()
    os.kill(mine._envs.processes[1].pid, signal.SIGKILL)
    choices = choices_of(mine, np.random.default_rng(0))
    with pytest.raises(UsageError, match="gym: the process of an environment ended"):
        mine.step(choices)
    mine.close()


def test_a_state_of_other_environments_is_refused() -> None:
    mine = in_processes([Scripted] * 2)
    mine.reset()
    with pytest.raises(ValueError, match="the environments differ"):
        mine.load(scripted(3).state())
    state = scripted(2, seed=4).state()
    with pytest.raises(UsageError, match="environment 0 did not reproduce its saved observation"):
        mine.load(state)
    mine.close()
