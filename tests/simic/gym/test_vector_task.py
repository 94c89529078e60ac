"""The environments of a VectorEnv, beside the VectorEnv itself."""

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from test_gym_environment import choices_of

from esper.leyline.errors import UsageError
from esper.simic.gym.vector_task import VectorEnvironments
from scripted_gym import Scripted


def vector_env(mode: AutoresetMode = AutoresetMode.NEXT_STEP, count: int = 3, **arguments):
    return SyncVectorEnv([lambda: Scripted(**arguments)] * count, autoreset_mode=mode)


def environments(limit: int = 10**9, **arguments) -> VectorEnvironments:
    mine = VectorEnvironments(vector_env(**arguments), 3, 5, limit)
    mine.reset()
    return mine


def test_steps_are_those_of_the_vector_env() -> None:
    """It is also what it is told: one seed at the begin, actions from the smallest value."""
    mine, draw, reference = environments(), np.random.default_rng(0), vector_env()
    seeds = [env.log[0]["seed"] for env in mine.envs.envs]
    observation, info = reference.reset(seed=seeds[0])
    returns = np.zeros(3)
    ended = []
    for _ in range(40):
        rows = mine.observation.features.numpy()
        assert np.array_equal(rows, observation.reshape(3, 4).astype(np.float32))
        for i in np.flatnonzero(~mine.over):
            mask = mine.observation.masks[i].numpy()
            for head, expected in enumerate(info["action_mask"][i]):
                assert np.array_equal(mask[head, : len(expected)], expected > 0)
        choices, over = choices_of(mine, draw), mine.over
        observation, reward, terminated, truncated, info = reference.step(choices + [1, 0])
        mine.step(choices)
        assert np.array_equal(mine.reward, reward)
        assert np.array_equal(mine.over, terminated | truncated)
        returns = np.where(over, 0.0, returns + reward)
        ended += mine.ended
        for episode in mine.ended:
            assert episode.episode_return == pytest.approx(returns[episode.environment - 5])
    assert len(ended) > 10
    assert {episode.terminated for episode in ended} == {True, False}


def test_a_limit_truncates_all_episodes_and_bounds_what_is_repeated() -> None:
    mine, draw = environments(11), np.random.default_rng(0)
    for t in range(1, 40):
        begun = mine.over
        mine.step(choices_of(mine, draw))
        assert len(mine.state()["actions"]) <= 11
        if t % 12 == 11:
            assert mine.over.all()
            # One that has just begun has taken no step, so no episode of it ends.
            assert {e.environment - 5 for e in mine.ended} == set(np.flatnonzero(~begun))
            assert not mine.truncated[begun].any()
        if t % 12 == 0:
            assert not mine.over.any()
            assert not mine.returns.any()
    log = mine.envs.envs[0].log
    seeds = [episode["seed"] for episode in log if episode["seed"] is not None]
    assert len(set(seeds)) == 4


def test_restored_environments_go_on_with_the_same_bits() -> None:
    first, draw = environments(30), np.random.default_rng(0)
    for _ in range(44):
        first.step(choices_of(first, draw))
    state = {name: x.clone() for name, x in first.state().items()}
    second = environments(30)
    second.load(state)
    for _ in range(25):
        choices = choices_of(first, draw)
        for one in (first, second):
            one.step(choices)
        for name, x in first.observation.tensors().items():
            assert torch.equal(x, second.observation.tensors()[name])
        assert np.array_equal(first.reward, second.reward)
        assert first.ended == second.ended
    state["features"][1] += 1.0
    with pytest.raises(UsageError, match="environment 1 did not reproduce"):
        environments(30).load(state)
    with pytest.raises(ValueError, match="the environments differ"):
        environments(30, count=2).load(state)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_episodes_that_begin_in_another_way_are_refused(mode: AutoresetMode) -> None:
    with pytest.raises(UsageError, match="gym: episodes begin in another way than NextStep"):
        VectorEnvironments(vector_env(mode), 3)


def test_faults_are_one_line() -> None:
    mine = environments(masked=False)
    mine.envs.step = lambda actions: 1 / 0
    choices = np.zeros((3, 2), np.int64)
    says = "gym: the VectorEnv raised ZeroDivisionError: division by zero, after 0 steps"
    with pytest.raises(UsageError, match=says):
        mine.step(choices)
    mine.envs.step = lambda actions: (1, 2)
    with pytest.raises(UsageError, match="gym: the VectorEnv did not return 5 values"):
        mine.step(choices)
    mine.envs.step = lambda actions: (np.zeros((3, 7)), np.zeros(3), *np.zeros((2, 3), bool), {})
    with pytest.raises(UsageError, match="gym: the VectorEnv does not observe Box"):
        mine.step(choices)
