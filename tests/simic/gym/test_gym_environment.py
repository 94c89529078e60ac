"""Spaces as tensors, masks, restoring of episodes, and the tasks that require memory."""

import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from esper.leyline.errors import UsageError
from esper.simic.gym.agent import FlatMoments
from esper.simic.gym.registration import register_envs
from esper.simic.gym.vector_environment import (
    GymEnvironments,
    actions_of,
    features_of,
    make,
    shape_of,
)
from esper.tamiyo.policy.recurrent import FlatObservation
from scripted_gym import OPTIONS, Scripted, scripted

register_envs()


class Shown(gymnasium.Env):
    """An environment with given spaces that does nothing."""

    def __init__(self, seen: spaces.Space, done: spaces.Space):
        self.observation_space, self.action_space = seen, done


TWO = spaces.Discrete(2)


@pytest.mark.parametrize(
    ("space", "observation", "expected"),
    [
        (spaces.Box(-1, 1, (2, 3)), np.arange(6.0).reshape(2, 3), [0, 1, 2, 3, 4, 5]),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([7, 255], np.uint8), [7, 255]),
        (spaces.Box(-1, 1, ()), np.float32(0.5), [0.5]),
        (spaces.Discrete(4), 2, [0, 0, 1, 0]),
        (spaces.Discrete(3, start=-1), np.int64(-1), [1, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
        (spaces.MultiDiscrete([2, 2], start=[5, 1]), np.array([5, 2]), [1, 0, 0, 1]),
        (spaces.MultiDiscrete([[2], [2]]), np.array([[0], [1]]), [1, 0, 0, 1]),
    ],
)
def test_observations_become_flat_features(space, observation, expected) -> None:
    shape = shape_of(Shown(space, TWO))
    assert features_of(space, observation).tolist() == expected
    assert shape.inputs == len(expected)
    assert shape.measured == isinstance(space, spaces.Box)


def test_composite_observations_are_flattened_as_gymnasium_does() -> None:
    """Only what a Box holds is normalised."""
    box = spaces.Box(-9.0, 9.0, (2,), np.float32)
    inner = spaces.Tuple((spaces.MultiBinary(2), box))
    space = spaces.Dict({"b": inner, "a": spaces.Discrete(3), "c": box})
    space.seed(7)
    shape = shape_of(Shown(space, TWO))
    assert (shape.inputs, shape.measured, shape.raw) == (9, True, ((0, 3), (3, 5)))
    observations = [space.sample() for _ in range(50)]
    rows = np.stack([features_of(space, observation) for observation in observations])
    for row, observation in zip(rows, observations, strict=True):
        assert np.array_equal(row, spaces.flatten(space, observation))
    moments = FlatMoments(shape.inputs, torch.device("cpu"), True, shape.raw)
    seen = FlatObservation(torch.from_numpy(rows).float(), torch.ones(50, 1, 2, dtype=torch.bool))
    moments.update(seen, None)
    normal = moments.normalise(seen).features.numpy()
    assert np.array_equal(normal[:, :5], rows[:, :5])
    np.testing.assert_allclose(normal[:, 5:].mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(normal[:, 5:].std(0), 1.0, atol=1e-5)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ((np.zeros((2, 2)), 1.0, False, {}), "returned 4 values, not observation, reward"),
        (None, "returned 1 values"),
        ((np.zeros(3), 1.0, False, False, {}), r"observes shape \(3,\), which is not Box"),
        (("text", 1.0, False, False, {}), "environment 0 "),
        (RuntimeError("no\nluck"), "raised RuntimeError: no, after 2 steps of an episode"),
    ],
)
def test_a_fault_of_an_environment_is_one_line(result, says) -> None:
    environment = Scripted(masked=False, shortest=7)
    environments = GymEnvironments([environment], 1)
    environments.reset()
    for _ in range(2):
        environments.step(np.zeros((1, 2), np.int64))

    def broken(action):
        if isinstance(result, Exception):
            raise result
        return result

    environment.step = broken
    with pytest.raises(UsageError, match="gym: environment 0 ") as fault:
        environments.step(np.zeros((1, 2), np.int64))
    assert re.search(says, str(fault.value))
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("space", "options", "choices", "expected"),
    [
        (spaces.Discrete(4), (4,), [3], 3),
        (spaces.Discrete(3, start=-1), (3,), [0], -1),
        (spaces.MultiDiscrete([2, 3]), (2, 3), [1, 2], [1, 2]),
        (spaces.MultiDiscrete([2, 2], start=[5, 1]), (2, 2), [0, 1], [5, 2]),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), (2, 3, 4, 5), [1, 2, 3, 4], [[1, 2], [3, 4]]),
        (spaces.MultiBinary(3), (2, 2, 2), [1, 0, 1], [1, 0, 1]),
        (spaces.MultiBinary((2, 1)), (2, 2), [0, 1], [[0], [1]]),
    ],
)
def test_choices_become_actions_of_the_space(space, options, choices, expected) -> None:
    actions = actions_of(Shown(TWO, space))
    assert actions.options == options
    for action in actions.of(np.array([choices, choices])):
        assert space.contains(np.asarray(action) if isinstance(expected, list) else action)
        assert np.array_equal(action, expected)


MIXED = spaces.Dict(
    {
        "aim": spaces.Box(np.array([[-1.0, 0.0]]), np.array([[1.0, 10.0]]), dtype=np.float64),
        "fire": spaces.Discrete(3, start=2),
        "parts": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-2, 2, (), np.float32))),
    }
)


def test_numbers_are_squashed_into_the_bounds_of_their_box() -> None:
    """Heads come first in a policy's action, then the numbers of all Boxes."""
    actions = actions_of(Shown(TWO, MIXED))
    assert (actions.options, actions.components) == ((3, 2, 2), 3)
    assert actions.starts == (2, 0, 0)
    assert np.stack(actions.bounds).tolist() == [[-1, 0, -2], [1, 10, 2]]
    choices = np.array([[1, 0, 1, 0.0, 99.0, -0.5], [2, 1, 1, -99.0, 0.0, 0.5]], np.float32)
    one, two = actions.of(choices)
    assert one["fire"] == 3
    assert one["parts"][0].tolist() == [0, 1]
    assert one["aim"] == pytest.approx(np.array([[0.0, 10.0]]))
    assert two["aim"] == pytest.approx(np.array([[-1.0, 5.0]]))
    assert float(two["parts"][1]) == pytest.approx(2.0 * np.tanh(0.5))
    for action in (one, two):
        assert MIXED.contains(action)
    box = actions_of(Shown(TWO, spaces.Box(-3, 5, (2, 1))))
    (only,) = box.of(np.array([[0.0, 1.0]], np.float32))
    assert only == pytest.approx(np.array([[1.0], [1.0 + 4.0 * np.tanh(1.0)]]))


@pytest.mark.parametrize(
    ("seen", "done", "says"),
    [
        (
            spaces.Dict({"a": spaces.Text(4)}),
            TWO,
            r"gym: observations of Shown are Dict\('a'.*wrap",
        ),
        (spaces.Tuple((TWO, spaces.Sequence(TWO))), TWO, r"observations of Shown are Tuple"),
        (spaces.Text(4), TWO, r"observations of Shown are Text"),
        (spaces.Box(0, 1, (0,)), TWO, r"are 0 numbers"),
        (spaces.Box(0, 1, (2000, 2000)), TWO, r"are 4000000 numbers"),
        (
            TWO,
            spaces.Box(0, np.inf, (2,)),
            r"gym: actions of Shown are Box.*Box of floats with bou",
        ),
        (TWO, spaces.Box(0, 9, (2,), np.int64), r"actions of Shown are Box"),
        (TWO, spaces.Dict({"a": spaces.Text(2)}), r"actions of Shown are Dict"),
    ],
)
def test_other_spaces_are_refused_in_one_line(seen, done, says) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        GymEnvironments([Shown(seen, done)], 1)
    assert "\n" not in str(refused.value)


MASKS = [
    (OPTIONS, ([1, 0, 1], [0, 1]), [[1, 0, 1], [0, 1, 0]]),
    (OPTIONS, [np.array([1, 0, 1]), np.array([False, True])], [[1, 0, 1], [0, 1, 0]]),
    (OPTIONS, np.array([0, 0, 1, 1, 1], np.int8), [[0, 0, 1], [1, 1, 0]]),
    (OPTIONS, None, [[1, 1, 1], [1, 1, 0]]),
    ((3,), np.array([True, False, True]), [[1, 0, 1]]),
    ((3,), [0, 0, 1], [[0, 0, 1]]),
]


@pytest.mark.parametrize(("options", "mask", "expected"), MASKS)
def test_masks_are_accepted_in_every_form(options, mask, expected) -> None:
    rows = np.ones((len(options), max(options)), dtype=bool)
    actions = actions_of(Shown(TWO, spaces.MultiDiscrete(options)))
    for before in (mask, None):  # the mask of the previous step must not matter
        actions.write_mask(before, rows)
        actions.write_mask(mask, rows)
        assert rows.tolist() == np.array(expected, dtype=bool).tolist()


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (([0, 0, 0], [1, 1]), "action_mask of environment 0 leaves action 0 without an option"),
        (([1, 0, 0], [0, 0]), "leaves action 1 without an option"),
        (([1, 1], [1, 1]), r"has a part of shape \(2,\) for 3 options"),
        (([1, 1, 1],), "has 1 parts for 2 actions"),
        (np.ones(6), "has 6 numbers, not 5"),
        ("all", "action_mask of environment 0"),
    ],
)
def test_an_invalid_mask_names_its_environment(mask, says) -> None:
    environment = Scripted(masked=False)
    environments = GymEnvironments([environment], 1)
    see = environment._see
    environment._see = lambda: (see()[0], {"action_mask": mask})
    with pytest.raises(UsageError, match=says):
        environments.reset()


def choices_of(environments: GymEnvironments, draw: np.random.Generator) -> np.ndarray:
    """Legal choices."""
    masks = environments.observation.masks.numpy()
    return np.where(masks, draw.random(masks.shape), -1.0).argmax(-1)


def test_every_episode_is_seeded_by_run_environment_and_number() -> None:
    logs = []
    for seed, count in ((3, 4), (3, 2), (4, 4)):
        environments, draw = scripted(count, seed), np.random.default_rng(0)
        for _ in range(60):
            environments.step(choices_of(environments, draw))
        logs.append([[e["seed"] for e in env.log] for env in environments.environments])
    for n in range(2):  # independent of the other environments
        shared = min(len(logs[0][n]), len(logs[1][n]))
        assert shared > 5
        assert logs[0][n][:shared] == logs[1][n][:shared]
    seeds = [seed for log in (logs[0], logs[2]) for own in log for seed in own]
    assert len(set(seeds)) == len(seeds)


def test_episodes_report_unnormalised_returns() -> None:
    environments, draw = scripted(3), np.random.default_rng(0)
    ended = []
    for _ in range(40):
        environments.step(choices_of(environments, draw))
        ended += environments.ended
    for n, environment in enumerate(environments.environments):
        mine = [e for e in ended if e.environment == n]
        finished = environment.log if environments.over[n] else environment.log[:-1]
        assert [e.length for e in mine] == [len(episode["steps"]) for episode in finished]
        for episode, logged in zip(mine, finished, strict=True):
            total = sum(step["reward"] for step in logged["steps"])
            assert episode.episode_return == pytest.approx(total)
    assert {e.terminated for e in ended} == {True, False}


def test_environments_are_restored_from_seed_and_actions() -> None:
    """The restored observation has the same bits, and so do the following steps."""
    first, draw = scripted(6), np.random.default_rng(0)
    for _ in range(23):
        first.step(choices_of(first, draw))
    assert first.over.any()
    assert not first.over.all()
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    second = scripted(6)
    second.load(state)
    for name in ("over", "reward", "returns", "lengths", "terminated", "truncated", "episode"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    for _ in range(10):
        choices = choices_of(first, draw)
        for environments in (first, second):
            environments.step(choices)
        for a, b in zip(
            first.observation.tensors().values(), second.observation.tensors().values(), strict=True
        ):
            assert torch.equal(a, b)
        assert np.array_equal(first.reward, second.reward)
        assert first.ended == second.ended


def test_an_environment_that_does_not_follow_its_seed_is_named() -> None:
    class Stubborn(Scripted):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=None if self.log else 1)

    class Late(Scripted):
        """Its rewards and episode ends follow the seed, its observations do not."""

        def _see(self):
            seen, info = super()._see()
            return seen + next(noise), info

    environments = GymEnvironments([Scripted(), Stubborn(longest=99, shortest=50)], 3)
    environments.reset()
    state = environments.state()
    with pytest.raises(UsageError, match="resume: environment 1 did not reproduce"):
        environments.load(state)
    noise = iter(range(100))
    environments = GymEnvironments([Scripted(), Scripted(), Late()], 3)
    environments.reset()
    with pytest.raises(UsageError, match="resume: environment 2 did not reproduce"):
        environments.load(environments.state())
    with pytest.raises(ValueError, match="the environments differ"):
        scripted(2).load(scripted(3).state())


# --- making -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("CartPol-v1", {}, "there is no environment 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ("CartPole-v7", {}, "there is no environment 'CartPole-v7'; did you mean"),
        ("xyzzy", {}, "give the id of a registered one, or module:id"),
        ("nosuchmodule:Env-v0", {}, "'nosuchmodule:Env-v0', whose module is not imported"),
        ("", {}, "gym: "),
        ("/x/", {}, "gym: "),
        ("CartPole-v1", {"lenght": 3}, "CartPole-v1 cannot be created .*lenght"),
        ("esper/MemoryChain-v0", {"length": 0}, "length must be a whole number of at least 1"),
        ("esper/MemoryChain-v0", {"length": "8"}, "length must be a whole number of at least 1"),
    ],
)
def test_an_environment_that_cannot_be_created_is_reported_in_one_line(
    name: str, arguments: dict, says: str
) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        make(name, arguments, 2)
    assert "\n" not in str(refused.value)


# --- tasks that need memory -------------------------------------------------------------------


def test_masked_cart_pole_is_cart_pole_without_velocities() -> None:
    plain, masked = gymnasium.make("CartPole-v1"), gymnasium.make("esper/MaskedCartPole-v0")
    assert masked.spec.max_episode_steps == 500
    seen, _ = masked.reset(seed=5)
    whole, _ = plain.reset(seed=5)
    assert np.array_equal(seen, whole[[0, 2]])
    for action in (0, 1, 1, 1, 0):
        seen, *rest = masked.step(action)
        whole, *expected = plain.step(action)
        assert masked.observation_space.contains(seen)
        assert np.array_equal(seen, whole[[0, 2]])
        assert rest[:3] == expected[:3]


@pytest.mark.parametrize("length", [1, 8, 32])
def test_the_memory_chain_asks_for_the_bit_it_showed(length: int) -> None:
    environment = gymnasium.make("esper/MemoryChain-v0", length=length)
    bits = []
    for seed in range(20):
        for right in (True, False):
            seen, _ = environment.reset(seed=seed)
            bit = int(seen[0])
            bits.append(bit)
            assert seen.tolist() == [bit, 0]
            for t in range(1, length + 1):
                seen, reward, terminated, truncated, _ = environment.step(t % 2)
                assert (reward, terminated, truncated) == (0.0, False, False)
                assert seen.tolist() == [2, t == length]
                assert environment.observation_space.contains(seen)
            _, reward, terminated, truncated, _ = environment.step(bit if right else 1 - bit)
            assert (reward, terminated, truncated) == (1.0 if right else -1.0, True, False)
    assert set(bits) == {0, 1}
