"""Encoders of the user's own: registered by a plugin, trained, resumed, played and exported."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import esper
from esper.leyline.errors import UsageError
from esper.runtime.encoders import ENCODERS, encoder
from esper.scripts.main import esper as command
from esper.simic.gym.structured_encoder import structure, structured_encoder
from esper.simic.run.checkpoint import load_latest
from esper.simic.training.vectorized import resume_ppo, train_ppo_vectorized
from processes import refusal
from small_runs import assert_same

SOURCE = '''
import gymnasium
import numpy as np
from gymnasium import spaces
from torch import nn
import torch

from esper.runtime.encoders import encoder


class Picture(gymnasium.Env):
    """The action is to be the column of the bright pixel, one further if the flag is set."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (1, 4, 4), np.uint8), flag=spaces.Discrete(2)
    )
    action_space = spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self.draw(), {}

    def step(self, action):
        reward = float(action == self.column + self.flag)
        self.left -= 1
        return self.draw(), reward, self.left == 0, False, {}

    def draw(self):
        image = np.zeros((1, 4, 4), np.uint8)
        row, self.column, self.flag = (int(self.np_random.integers(n)) for n in (4, 4, 2))
        image[0, row, self.column] = 255
        return {"image": image, "flag": self.flag}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 24))

    def forward(self, observation):
        image = self.image(observation["image"] / 255.0)
        return torch.cat([image, observation["flag"]], 1)


@encoder
def small_picture(space):
    assert space["image"].shape == (1, 4, 4)
    return Net()


gymnasium.register("test/Picture-v0", lambda: Picture())
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> str:
    """One file for all tests: a process runs a plugin once."""
    file = tmp_path_factory.mktemp("plugin") / "pictures.py"
    file.write_text(SOURCE)
    return str(file)


def train(folder: Path, plugin: str, **settings) -> Path:
    fixed = {"gym": "test/Picture-v0", "plugin": (plugin,), "encoder": "small_picture"}
    fixed |= {"memory": "none", "normalise_observations": False, "rollout_steps": 64}
    return train_ppo_vectorized(telemetry_dir=str(folder), **(fixed | settings)).path


def test_a_convolutional_encoder_learns_and_is_played_and_exported(
    tmp_path: Path, plugin: str
) -> None:
    run = train(tmp_path / "runs", plugin, rounds=6)
    names = load_latest(run).parts["policy"]
    assert any(name.endswith("encoder.module.image.0.weight") for name in names)
    policy = esper.load_policy(run, trust=True)
    returns = [episode.episode_return for episode in policy.play(20)]
    assert np.mean(returns) > 3.0  # 1.6 by chance
    image = np.zeros((1, 4, 4), np.uint8)
    image[0, 2, 1] = 255
    action, _ = policy.act({"image": image, "flag": 1})
    flat = torch.zeros(1, 18, dtype=torch.float64)
    flat[0, 4 * 2 + 1], flat[0, 16 + 1] = 255.0, 1.0
    exported = policy.export().module()(flat, torch.ones(1, 1, 5, dtype=torch.bool))[0]
    assert int(exported[0, 0]) == action


def test_a_resumed_run_with_an_encoder_ends_in_the_same_bits(tmp_path: Path, plugin: str) -> None:
    settings = {"memory": "lstm", "rollout_steps": 16, "envs": 2, "lr_decay": "none"}
    settings |= {"entropy_decay": "none", "critic": "separate"}
    whole = train(tmp_path / "whole", plugin, rounds=3, **settings)
    cut = train(tmp_path / "cut", plugin, rounds=2, **settings)
    resume_ppo(cut, {"rounds": 3, "plugin": (plugin,)})
    assert_same(load_latest(cut).parts["policy"], load_latest(whole).parts["policy"])


def test_observations_have_the_structure_of_their_space() -> None:
    space = spaces.Tuple(
        (
            spaces.Dict(b=spaces.Box(0, 1, (2, 2)), a=spaces.Discrete(3)),
            spaces.MultiBinary(2),
            spaces.MultiDiscrete([2, 2]),
        )
    )
    value = space.sample()
    flat = torch.from_numpy(spaces.flatten(space, value)).float()[None].expand(3, -1)
    nested, bits, options = structure(space, flat)
    assert torch.equal(nested["b"][1], torch.from_numpy(value[0]["b"]))
    assert nested["a"][0].argmax() == value[0]["a"]
    assert bits[2].tolist() == value[1].tolist()
    assert options.shape == (3, 4)


def test_a_faulty_encoder_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    space = spaces.Box(0, 1, (3,))

    def broken(box: spaces.Box) -> nn.Module:
        raise ZeroDivisionError("no\nlayers")

    monkeypatch.setitem(ENCODERS, "broken", broken)
    with pytest.raises(UsageError, match="encoder: broken raised ZeroDivisionError: no"):
        structured_encoder("broken", space)
    with pytest.raises(UsageError, match="'broken' is already registered"):
        encoder(broken)
    monkeypatch.setitem(ENCODERS, "flat", lambda box: nn.Flatten(0))
    with pytest.raises(UsageError, match=r"gives \[6\] for 2 observations, not \[2, width\]"):
        structured_encoder("flat", space)
    words = ["train", "ppo", "--gym", "CartPole-v1", "--encoder", "picture"]
    error = refusal(capsys, command, *words, "--telemetry-dir", str(tmp_path / "runs"))
    assert error.startswith("esper: encoder: there is none called 'picture'")
    assert not (tmp_path / "runs").exists()
