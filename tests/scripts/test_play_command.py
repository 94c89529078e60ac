"""The policy of a Gymnasium task in use: the best checkpoint, ``esper play``, ``load_policy``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esper
from esper.karn.store import read_events
from esper.kasmina.rng import Purpose, random_bits
from esper.leyline.errors import UsageError
from esper.leyline.events import GymEvaluation, TrainingFinished
from esper.scripts.exported_files import write_exports
from esper.scripts.main import esper as command
from esper.simic.gym.vector_environment import make
from esper.simic.run.checkpoint import best_checkpoint, load_checkpoint, load_latest
from esper.simic.training.gym_trainee import EVALUATION
from esper.simic.training.vectorized import resume_ppo, train_ppo_vectorized
from processes import refusal
from scripted_gym import Scripted, scripted
from small_runs import SMALL, assert_same

CART = {
    "gym": "CartPole-v1",
    "envs": 3,
    "rollout_steps": 24,
    "lstm_hidden": 8,
    "ppo_epochs": 2,
    "evaluation_episodes": 4,
}
SOURCE = """
import gymnasium
from scripted_gym import Scripted

gymnasium.register("test/Scripted-v0", Scripted)
"""


def train(folder: Path, **settings: Any) -> Path:
    return train_ppo_vectorized(telemetry_dir=str(folder), **{**CART, **settings}).path


def evaluations(run: Path) -> list[tuple[int, float, bool]]:
    return [(e.round, e.episode_return, e.best) for e in read_events(run, GymEvaluation)]


def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path: Path) -> None:
    run = train(tmp_path, rounds=8, evaluate_every=2, keep_checkpoints=1, learning_rate=1e-2)
    rows = evaluations(run)
    assert [number for number, *_ in rows] == [2, 4, 6, 8]
    highest = max(mean for _, mean, _ in rows)
    first = next(number for number, mean, _ in rows if mean == highest)
    assert [number for number, _, best in rows if best][-1] == first
    best = best_checkpoint(run)
    assert best is not None
    assert load_checkpoint(best).round == first
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "000008",
        f"best-{first:06d}",
    ]
    returns = [e.episode_return for e in esper.load_policy(run).play(4)]
    assert np.mean(returns) == highest


def test_a_resumed_run_keeps_the_same_best_checkpoint(tmp_path: Path) -> None:
    settings = {"evaluate_every": 1, "learning_rate": 1e-2, "lr_decay_steps": 6}
    settings["entropy_decay_steps"] = 6
    whole = train(tmp_path / "whole", rounds=6, **settings)
    cut = train(tmp_path / "cut", rounds=3, **settings)
    resume_ppo(cut, {"rounds": 6})
    assert evaluations(cut) == evaluations(whole)
    one, other = best_checkpoint(cut), best_checkpoint(whole)
    assert one is not None
    assert other is not None
    assert one.name == other.name
    assert_same(load_checkpoint(one).parts, load_checkpoint(other).parts)
    assert_same(load_latest(cut).parts, load_latest(whole).parts)


def test_evaluations_change_no_bit_of_the_training(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(n), rounds=4, evaluate_every=n) for n in (0, 1)]
    assert evaluations(runs[0]) == []
    assert best_checkpoint(runs[0]) is None
    parts = [load_latest(run).parts for run in runs]
    for part in parts:
        del part["evaluation"]
    assert_same(*parts)


def test_a_run_ends_at_the_return_that_it_is_to_reach(tmp_path: Path) -> None:
    run = train(tmp_path, rounds=9, evaluate_every=2, stop_at=0.0)
    assert load_latest(run).round == 2
    assert [event.status for event in read_events(run, TrainingFinished)] == ["finished"]
    resume_ppo(run, {"stop_at": 1e9, "rounds": 5})
    assert load_latest(run).round == 5


def plugin_run(folder: Path, **settings: Any) -> tuple[Path, str]:
    """A run on masked MultiDiscrete actions that a plugin registers."""
    file = folder / "tasks_of_mine.py"
    file.write_text(SOURCE)
    return train(folder / "runs", gym="test/Scripted-v0", plugin=(str(file),), **settings), str(
        file
    )


@pytest.mark.parametrize("memory", ["lstm", "none"])
def test_act_takes_the_actions_of_play(memory: str, tmp_path: Path) -> None:
    """Step by step from raw observations, in an environment that only the test has."""
    run, _ = plugin_run(tmp_path, rounds=2, memory=memory)
    policy = esper.load_policy(run, trust=True)
    for number, episode in enumerate(policy.play(5)):
        identity = torch.tensor([EVALUATION + number])
        seed = int(random_bits(policy.config.world.seed, identity, Purpose.GYM_RESET, 0, 0, 1))
        (environment,) = make("test/Scripted-v0", {}, 1)
        observation, info = environment.reset(seed=seed)
        state, total, over = None, 0.0, False
        while not over:
            action, state = policy.act(observation, state, info["action_mask"])
            observation, reward, terminated, truncated, info = environment.step(action)
            total, over = total + float(reward), terminated or truncated
        assert total == pytest.approx(episode.episode_return)


def test_a_batch_is_acted_like_its_observations_alone(tmp_path: Path) -> None:
    run, _ = plugin_run(tmp_path, rounds=2)
    policy = esper.load_policy(run, trust=True)
    draw = np.random.default_rng(0)
    state, alone = None, [None] * 3
    for _ in range(4):
        batch = draw.normal(size=(3, 2, 2))
        masks = [tuple((draw.random(n) < 0.6) | (np.arange(n) == 0) for n in (3, 2)) for _ in "abc"]
        actions, state = policy.act(batch, state, masks)
        for i in range(3):
            action, alone[i] = policy.act(batch[i], alone[i], masks[i])
            assert np.array_equal(action, actions[i])
            assert all(mask[a] for mask, a in zip(masks[i], action - np.array([1, 0]), strict=True))
    with pytest.raises(ValueError, match="observation has shape"):
        policy.act(np.zeros(3))
    with pytest.raises(ValueError, match="state belongs to 3 episodes, not 1"):
        policy.act(np.zeros((2, 2)), state)
    drawn = {
        tuple(policy.act(np.zeros((2, 2)), generator=torch.Generator().manual_seed(i))[0])
        for i in range(20)
    }
    assert len(drawn) > 1


def test_the_command_prints_the_returns(tmp_path: Path, capsys) -> None:
    run, file = plugin_run(tmp_path, rounds=2, evaluate_every=1)
    capsys.readouterr()
    assert command(["play", str(run), "--episodes", "6", "--plugin", file]) == 0
    text = capsys.readouterr().out
    returns = [e.episode_return for e in esper.load_policy(run, trust=True).play(6)]
    assert f"mean return {np.mean(returns):.2f} [" in text
    assert f"lowest {min(returns):.2f}, highest {max(returns):.2f}" in text
    assert command(["play", str(run), "--episodes", "1", "--no-greedy", "--latest", "--trust"]) == 0
    assert "over 1 episodes, drawn actions" in capsys.readouterr().out


ALONE = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in ("esper", "esper_lab", "esper_growth"), name

sys.meta_path.insert(0, Refusal())
import json
import gymnasium, numpy as np, torch

if sys.argv[2] != "CartPole-v1":
    exec(compile(sys.argv[4], "task", "exec"))
step, returns = torch.export.load(sys.argv[1]).module(), []
width, sizes = int(sys.argv[5]), json.loads(sys.argv[6])
for seed in json.loads(sys.argv[7]):
    environment = gymnasium.make(sys.argv[2])
    observation, info = environment.reset(seed=seed)
    state, total, over = [torch.zeros(1, 1, width) for _ in range(2 if width else 0)], 0.0, False
    while not over:
        mask = torch.zeros(1, len(sizes), max(sizes), dtype=torch.bool)
        for i, size in enumerate(sizes):
            legal = info["action_mask"] if "action_mask" in info else np.ones(size)
            legal = legal[i] if len(sizes) > 1 else legal
            mask[0, i, :size] = torch.from_numpy(np.asarray(legal) > 0)
        flat = torch.tensor(np.ravel(observation), dtype=torch.float64)[None]
        actions, *state = step(flat, mask, *state)
        if sys.argv[2] == "test/Mixed-v0":
            numbers, *state = state
            action = {"aim": numbers[0].numpy(), "fire": int(actions[0, 0])}
        else:
            action = actions[0].numpy() if len(sizes) > 1 else int(actions[0, 0])
        observation, reward, terminated, truncated, info = environment.step(action)
        total, over = total + float(reward), terminated or truncated
    returns.append(total)
print(json.dumps(returns))
"""
MASKED = '''
class Masked(gymnasium.Env):
    """Normal observations; a mask of MultiDiscrete actions; the reward depends on both."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2, 2), np.float64)
    action_space = gymnasium.spaces.MultiDiscrete([3, 2], start=[1, 0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 12
        return self.see()

    def step(self, action):
        assert all(m[a - s] for m, a, s in zip(self.legal, action, (1, 0)))
        self.left -= 1
        reward = float(self.seen[0, 0] * action[0] + self.seen[1, 1] * action[1])
        seen, info = self.see()
        return seen, reward, self.left == 0, False, info

    def see(self):
        self.seen = self.np_random.normal(size=(2, 2))
        self.legal = [self.np_random.random(n) < 0.5 for n in (3, 2)]
        for mask in self.legal:
            mask[self.np_random.integers(len(mask))] = True
        return self.seen, {"action_mask": tuple(m.astype(np.int8) for m in self.legal)}


class Mixed(Masked):
    """The same with a Box beside a head."""

    action_space = gymnasium.spaces.Dict(
        aim=gymnasium.spaces.Box(-2.0, 1.0, (2,)), fire=gymnasium.spaces.Discrete(3)
    )

    def step(self, action):
        self.legal[1][:] = True
        head = np.array([action["fire"] + 1, 0])
        seen, reward, *rest = super().step(head)
        return seen, reward + float(action["aim"] @ self.seen[0]), *rest

    def see(self):
        seen, info = super().see()
        return seen, {"action_mask": info["action_mask"][0]}


gymnasium.register("test/Masked-v0", lambda: Masked())
gymnasium.register("test/Mixed-v0", lambda: Mixed())
'''


@pytest.mark.parametrize(
    ("gym", "memory"),
    [
        pytest.param("CartPole-v1", "lstm", marks=pytest.mark.slow),
        pytest.param("test/Masked-v0", "lstm", marks=pytest.mark.slow),
        pytest.param("test/Masked-v0", "none", marks=pytest.mark.slow),
        ("test/Mixed-v0", "lstm"),
    ],
)
def test_the_exported_file_plays_the_same_episodes_without_esper(
    gym: str, memory: str, tmp_path: Path, capsys
) -> None:
    """In a process that refuses to import Esper: every return of 100 episodes."""
    file, out = tmp_path / "tasks_of_mine.py", tmp_path / "policy.pt2"
    file.write_text(f"import gymnasium\nimport numpy as np\n{MASKED}")
    plugins = () if gym == "CartPole-v1" else (str(file),)
    run = train(tmp_path / "runs", gym=gym, plugin=plugins, rounds=2, memory=memory)
    assert command(["play", str(run), "--episodes", "2", "--trust", "--out", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    policy, episodes = esper.load_policy(run, trust=True), 100
    identities = torch.arange(EVALUATION, EVALUATION + episodes)
    seed = policy.config.world.seed
    seeds = random_bits(seed, identities, Purpose.GYM_RESET, 0, 0, 1)[:, 0].tolist()
    width = 8 if memory == "lstm" else 0
    sizes = {"CartPole-v1": [2], "test/Masked-v0": [3, 2], "test/Mixed-v0": [3]}[gym]
    words = [str(out), gym, "-", MASKED, str(width), str(sizes), str(seeds)]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = [episode.episode_return for episode in policy.play(episodes)]
    # Numbers of Box actions are rounded otherwise in a batch, and in an exported graph.
    rounding = 1e-5 if gym == "test/Mixed-v0" else 0.0
    assert json.loads(done.stdout) == pytest.approx(expected, rel=1e-9, abs=rounding)


def test_the_first_episodes_are_filmed(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    pytest.importorskip("pygame")
    run = train(tmp_path / "runs", rounds=1)
    command(["play", str(run), "--episodes", "6", "--video", str(tmp_path / "videos")])
    videos = sorted((tmp_path / "videos").glob("*.mp4"))
    assert len(videos) == 5
    assert all(video.stat().st_size > 1000 for video in videos)


def test_the_setting_of_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^onnx: cannot write .*none/policy\.onnx"):
        write_exports({"onnx": (tmp_path / "none" / "policy.onnx", b"content")})


@pytest.mark.slow
def test_the_onnx_file_gives_the_actions_of_the_policy(tmp_path: Path, capsys) -> None:
    """Of every step of 20 episodes; esper evaluate is esper play for a run of a Gymnasium task."""
    runtime = pytest.importorskip("onnxruntime")
    file, out = tmp_path / "tasks_of_mine.py", tmp_path / "policy.onnx"
    file.write_text(f"import gymnasium\nimport numpy as np\n{MASKED}")
    run = train(tmp_path / "runs", gym="test/Mixed-v0", plugin=(str(file),), rounds=2)
    words = ["evaluate", str(run), "--episodes", "2", "--trust", "--onnx", str(out)]
    assert command(words) == 0
    assert "mean return " in capsys.readouterr().out
    policy, session = esper.load_policy(run, trust=True), runtime.InferenceSession(out)
    names = [one.name for one in session.get_inputs()]
    assert names == ["observation", "mask", "state_0", "state_1"]
    assert [one.name for one in session.get_outputs()][:2] == ["actions", "numbers"]
    for number in range(20):
        (environment,) = make("test/Mixed-v0", {}, 1)
        observation, info = environment.reset(seed=number)
        state, theirs, over = None, [np.zeros((1, 1, 8), np.float32)] * 2, False
        while not over:
            mask = np.asarray(info["action_mask"])[None, None] > 0
            flat = np.ravel(observation)[None].astype(np.float64)
            inputs = dict(zip(names, [flat, mask, *theirs], strict=True))
            actions, numbers, *theirs = session.run(None, inputs)
            action, state = policy.act(observation, state, info["action_mask"])
            assert int(actions[0, 0]) == action["fire"]
            assert numbers[0] == pytest.approx(action["aim"], abs=1e-5)
            observation, _, terminated, truncated, info = environment.step(action)
            over = terminated or truncated


def test_what_cannot_be_played_is_one_line(tmp_path: Path, capsys) -> None:
    run, _ = plugin_run(tmp_path, rounds=1, evaluate_every=1)
    growth = train_ppo_vectorized(telemetry_dir=str(tmp_path / "growth"), rounds=1, **SMALL).path
    capsys.readouterr()
    assert "run: " in refusal(capsys, command, "play", str(tmp_path))
    assert "trained no Gymnasium task" in refusal(capsys, command, "play", str(growth))
    assert "episodes: " in refusal(capsys, command, "play", str(run), "--episodes", "0")
    error = refusal(capsys, command, "play", str(run), "--onnx", str(tmp_path / "policy.pt"))
    assert error.startswith("esper: onnx: ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.leyline.extras.find_spec", lambda name: None)
        error = refusal(capsys, command, "play", str(run), "--video", str(tmp_path / "videos"))
    assert error == "esper: video: needs the library moviepy; pip install 'esper-growth[video]'\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.leyline.extras.find_spec", lambda name: name)
        error = refusal(capsys, command, "evaluate", str(run), "--video", str(tmp_path))
    assert "give a new or an empty folder" in error
    best = best_checkpoint(run)
    assert best is not None
    (best / "policy.pt").write_bytes(b"nothing")
    assert "is corrupt" in refusal(capsys, command, "play", str(run), "--trust")
    assert command(["play", str(run), "--trust", "--latest", "--episodes", "1"]) == 0
    with pytest.raises(UsageError, match="run: "):
        esper.load_policy(tmp_path / "none")


def test_an_episode_is_truncated_at_the_limit() -> None:
    """What a checkpoint holds of it, and what resuming repeats, is bounded."""
    environments = scripted(3, shortest=50, longest=60)
    environments.limit = 9
    for _ in range(30):
        choices = environments.observation.masks.float().argmax(-1).numpy()
        environments.step(choices)
        assert all(episode.length == 9 and not episode.terminated for episode in environments.ended)
        assert int(environments.state()["lengths"].max()) <= 9
    assert isinstance(environments.environments[0], Scripted)
    assert len(environments.environments[0].log) == 4
