"""Growth as Gymnasium environments, against the growth environment itself."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import esper
from esper.leyline.actions import Op
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.simic.tools.growth_vector import moves
from esper.simic.training.setup import build_environment

SETTINGS = {"max_batches": 1, "episode_length": 12, "threads": 1}
COUNT = 8

esper.register_envs()


def drawn(mask: np.ndarray, widths: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Random actions among those that a mask allows, ``[N, components]``."""
    parts = np.split(mask, np.cumsum(widths)[:-1], axis=1)
    return np.stack([(generator.random(part.shape) * part).argmax(1) for part in parts], 1)


@pytest.mark.parametrize("task", ["digits_shift", "suite"])
def test_every_action_of_the_mask_is_legal_and_gives_what_the_growth_environment_gives(
    task,
) -> None:
    """Tasks of a suite differ in their slots, so observations are padded to the most."""
    settings = {**SETTINGS, "task": [task], "envs": COUNT, "group_size": 2, "seed": 5}
    growth = build_environment(unflatten(settings), [torch.device("cpu")])
    env = gymnasium.make_vec(
        f"esper/{task}-v0", num_envs=COUNT, observation="dict", autoreset_mode="SameStep",
        group_size=2, **SETTINGS,
    )  # fmt: skip
    observation, info = env.reset(seed=5)
    reference, generator = growth.reset(0), np.random.default_rng(0)
    table = moves(env.single_observation_space["slots"].shape[0])
    germinations = 0
    for step in range(2 * SETTINGS["episode_length"]):
        slots = reference.slots.shape[1]
        assert env.observation_space.contains(observation)
        assert (observation["host"] == reference.host.numpy()).all()
        assert (observation["slots"][:, :slots] == reference.slots.numpy()).all()
        assert not observation["slots"][:, slots:].any()
        assert (observation["blueprints"][:, :slots] == reference.blueprints.numpy()).all()
        actions = drawn(info["action_mask"], env.single_action_space.nvec, generator)
        heads = torch.cat([table[actions[:, 0]], torch.from_numpy(actions[:, 1:])], 1)
        germinations += int((heads[:, 0] == Op.GERMINATE).sum())
        expected = growth.step(heads)
        observation, reward, terminated, truncated, info = env.step(actions)
        assert expected.report.success.all()
        assert reward.tolist() == expected.reward.double().tolist()
        assert (terminated == expected.done).all()
        assert not truncated.any()
        reference = expected.observation
        if expected.done:
            assert info["_final_obs"].all()
            assert info["final_info"]["success"].all()
            assert (info["final_obs"][3]["host"] == reference.host[3].numpy()).all()
            reference = growth.reset(step // SETTINGS["episode_length"] + 1)
        else:
            assert info["success"].all()
    assert germinations > COUNT


def test_an_action_outside_the_mask_is_legal_in_the_environment_neither() -> None:
    env = gymnasium.make_vec("esper/digits_shift-v0", num_envs=2, **SETTINGS)
    _, info = env.reset(seed=1)
    illegal = np.flatnonzero(~info["action_mask"][0, : env.single_action_space.nvec[0]])
    assert len(illegal)
    for move in illegal:
        _, _, _, _, after = env.step(np.array([[move, 0, 0, 0, 0, 0], [0] * 6]))
        assert after["success"].tolist() == [False, True]
        env.reset(seed=1)


@pytest.mark.parametrize("observation", ["flat", "dict"])
@pytest.mark.filterwarnings("ignore:.*A Box observation space")
def test_a_single_environment_passes_the_checker_of_gymnasium(observation) -> None:
    env = gymnasium.make("esper/digits_shift-v0", observation=observation, **SETTINGS)
    check_env(env.unwrapped)
    flat = gymnasium.make_vec("esper/digits_shift-v0", num_envs=1, group_size=1, **SETTINGS)
    first, _ = env.reset(seed=2)
    batch, _ = flat.reset(seed=2)
    if observation == "flat":
        assert (batch[0] == first).all()
    else:
        assert (batch[0, : len(first["host"])] == first["host"]).all()


def test_by_default_an_episode_begins_in_the_step_after_the_last_one_as_in_gymnasium() -> None:
    """Its wrappers ask for it."""
    env = gymnasium.make_vec("esper/digits_shift-v0", num_envs=2, **SETTINGS)
    counted = gymnasium.wrappers.vector.RecordEpisodeStatistics(env)
    counted.reset(seed=1)
    second, still = env.unwrapped.growth.reset(1), np.zeros((2, 6), np.int64)
    counted.reset(seed=1)
    rewards = np.zeros(2)
    for _ in range(SETTINGS["episode_length"]):
        _, reward, over, _, info = counted.step(still)
        rewards += reward
    assert over.all()
    assert info["episode"]["r"] == pytest.approx(rewards)
    observation, reward, over, _, info = counted.step(np.full((2, 6), 99))
    assert not reward.any()
    assert not over.any()
    assert "action_mask" in info
    assert (observation[:, : second.host.shape[1]] == second.host.numpy()).all()


def test_episodes_follow_a_seed_or_differ() -> None:
    env = gymnasium.make_vec("esper/digits_shift-v0", num_envs=2, **SETTINGS)
    first, _ = env.reset(seed=1)
    second, _ = env.reset()
    again, _ = env.reset(seed=1)
    other, _ = env.reset(seed=2)
    assert (first == again).all()
    assert (first != second).any()
    assert (first != other).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observation": "image"}, "observation: must be flat or dict"),
        ({"autoreset_mode": "Disabled"}, "autoreset_mode: must be NextStep or SameStep"),
        ({"seed": 3}, "seed: give it to reset"),
        ({"max_batches": 0}, "max_batches"),
        ({"learning_speed": 1.0}, "learning_speed"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message) -> None:
    with pytest.raises(UsageError, match=message):
        gymnasium.make_vec("esper/digits_shift-v0", num_envs=2, **settings)


def test_wrong_actions_are_refused() -> None:
    env = gymnasium.make_vec("esper/digits_shift-v0", num_envs=2, **SETTINGS)
    env.reset(seed=1)
    with pytest.raises(ValueError, match=r"shape \(1, 6\), not \(2, 6\)"):
        env.step(np.zeros((1, 6), np.int64))
    with pytest.raises(ValueError, match="outside"):
        env.step(np.full((2, 6), 99))
