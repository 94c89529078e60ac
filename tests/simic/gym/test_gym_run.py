"""Runs of Gymnasium tasks from the command line: directory, resuming, faults, usage errors."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from esper.karn.store import read_events
from esper.leyline.config import unflatten
from esper.leyline.config.reading import with_horizons
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    AnalyticsSnapshot,
    GymEpisodes,
    PPOUpdateCompleted,
    TrainingFinished,
    TrainingStarted,
    UpdateRefused,
)
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from esper.simic.run.checkpoint import load_checkpoint, load_latest
from esper.simic.training.gym_trainee import GymTrainee, arguments_of
from esper.simic.training.vectorized import resume_ppo, run_training, train_ppo_vectorized
from processes import refusal
from small_runs import assert_same, timeless

SMALL = ["--envs", "3", "--rollout-steps", "20", "--lstm-hidden", "8", "--ppo-epochs", "2"]
PLUGIN = """
import gymnasium
import numpy as np


class {name}(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self):
        {name}.made += 1
        self.number = {name}.made

    def reset(self, *, seed=None, options=None):
        super().reset(seed={seed})
        self.t = 0
        return self.see(), {{}}

    def step(self, action):
        self.t += 1
        return self.see(), 1.0, self.t == 9, False, {{}}

    def see(self):
        seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        if {bad}:
            seen[1] = np.nan
        return seen


gymnasium.register("test/{name}-v0", {name})
"""


def plugin(folder: Path, name: str, seed: str = "seed", bad: str = "False") -> list[str]:
    """Flags of a task defined by a plug-in."""
    path = folder / f"{name}.py"
    path.write_text(PLUGIN.format(name=name, seed=seed, bad=bad))
    return ["--gym", f"test/{name}-v0", "--plugin", str(path)]


def train(folder: Path, *flags: str) -> int:
    """``esper train ppo`` in this process."""
    return run_guarded(esper, ["train", "ppo", "--telemetry-dir", str(folder), *flags])


def run_of(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


def test_a_run_writes_settings_events_and_a_table(tmp_path: Path, capsys) -> None:
    evaluated = ["--evaluate-every", "3"]
    assert train(tmp_path, "--gym", "CartPole-v1", "--rounds", "3", *SMALL, *evaluated) == 0
    run = run_of(tmp_path)
    assert run.name.endswith("-CartPole-v1")
    settings = json.loads((run / "config.json").read_text())["settings"]
    expected = {"gym": "CartPole-v1", "envs": 3, "rollout_steps": 20, "rounds": 3}
    expected |= {"discount": 0.99, "memory": "lstm", "threads": 1}
    assert {name: settings[name] for name in expected} == expected
    assert "task" not in settings
    assert "episode_length" not in settings
    started = next(read_events(run, TrainingStarted))
    assert (started.gym, started.tasks, started.envs) == ("CartPole-v1", ["CartPole-v1"], 3)
    episodes = list(read_events(run, GymEpisodes))
    assert [e.round for e in episodes] == [1, 2, 3]
    lengths = [length for e in episodes for length in e.length]
    returns = [value for e in episodes for value in e.episode_return]
    assert lengths == returns  # CartPole's reward is 1 per step
    assert 3 * 20 * 3 * 0.5 < sum(lengths) <= 3 * 20 * 3
    updates = list(read_events(run, PPOUpdateCompleted))
    for update in updates:
        assert update.metrics["first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        for head in ("action", "value"):
            assert update.metrics[f"head_grad_norms/{head}"] > 0.0
    assert len(list(read_events(run, AnalyticsSnapshot))) == 3
    out = capsys.readouterr().out
    assert "round 3/3  return " in out
    assert re.search(r"\nbest policy: evaluation \d+\.\d\d in round 3, kept in best-000003\n", out)
    for words in ("mean of a round", "return", "episodes per round", "steps per second"):
        assert words in out


CASES = [
    ["--gym", "CartPole-v1"],
    ["--gym", "FrozenLake-v1", "--gym-args", "is_slippery=true"],
    ["--gym", "esper/MemoryChain-v0", "--gym-args", "length=5", "--memory", "none"],
    ["--gym", "Pendulum-v1"],
    ["--gym", "CartPole-v1", "--vectorization", "async"],
    ["--gym", "CartPole-v1", "--vectorization", "vector", "--episode-limit", "33"],
]
NAMES = ["CartPole", "FrozenLake", "MemoryChain", "Pendulum", "processes", "VectorEnv"]


@pytest.mark.parametrize("flags", CASES, ids=NAMES)
def test_a_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, flags: list[str]
) -> None:
    """FrozenLake slips at random; in all tasks episodes continue across rounds."""
    adaptive = ["--lr-adaptive-kl", "0.01", "--entropy-decay-steps", "4"]
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    assert train(straight, *flags, *SMALL, *adaptive, "--rounds", "4") == 0
    assert train(parted, *flags, *SMALL, *adaptive, "--rounds", "2") == 0
    assert train(parted, "--resume", str(run_of(parted)), "--rounds", "4") == 0
    a, b = (load_latest(run_of(folder)) for folder in (straight, parted))
    assert (a.round, b.round) == (4, 4)
    assert_same(a.parts, b.parts)
    assert timeless(run_of(straight)) == timeless(run_of(parted))


def test_a_run_interrupted_within_a_round_ends_in_the_same_bits(tmp_path: Path) -> None:
    """The checkpoint is of the last complete round, although environments were stepped since."""
    flags = {"gym": "CartPole-v1", "envs": 3, "rollout_steps": 20, "lstm_hidden": 8}
    config = unflatten({**flags, "rounds": 3, "telemetry_dir": str(tmp_path / "a")})
    straight = run_training(config, "ppo").path

    class Impatient:
        def started(self, *arguments) -> None: ...
        def round_done(self, summary) -> None: ...

        def __init__(self) -> None:
            self.steps = 0

        def stepped(self, step) -> None:
            self.steps += 1
            if self.steps == 20 + 13:
                signal.raise_signal(signal.SIGTERM)

    settings = {"telemetry_dir": str(tmp_path / "b"), "checkpoint_every": 1000}
    parted = unflatten(settings, config)
    summary = run_training(parted, "ppo", observer=Impatient())
    assert (summary.status, summary.exit_code) == ("interrupted", 143)
    assert load_latest(summary.path).round == 1
    resume_ppo(summary.path, {})
    assert_same(load_latest(straight).parts, load_latest(summary.path).parts)
    assert timeless(straight) == timeless(summary.path)


def test_an_environment_that_cannot_be_replayed_is_refused(tmp_path: Path, capsys) -> None:
    flags = plugin(tmp_path, "Unseeded", seed="None")
    assert train(tmp_path / "runs", *flags, *SMALL, "--rounds", "1") == 0
    run = run_of(tmp_path / "runs")
    before = (run / "events.jsonl").read_bytes()
    capsys.readouterr()
    flags = ["--resume", str(run), "--rounds", "2", "--trust"]
    error = refusal(capsys, esper, "train", "ppo", *flags)
    assert error.startswith("esper: resume: environment 0 did not reproduce its saved observation")
    assert (run / "events.jsonl").read_bytes() == before


def test_a_number_that_is_not_finite_is_refused_and_replayed(tmp_path: Path, capsys) -> None:
    """The second of three environments observes NaN from step three of its first episodes on."""
    flags = plugin(tmp_path, "Broken", bad="self.number == 2 and self.t > 2")
    assert train(tmp_path / "runs", *flags, *SMALL, "--rounds", "9") == 1
    run = run_of(tmp_path / "runs")
    assert "3 updates in a row" in capsys.readouterr().err
    refused = list(read_events(run, UpdateRefused))
    assert [(r.round, r.tensor) for r in refused] == [
        (r, "observation/features") for r in (1, 2, 3)
    ]
    assert [f.status for f in read_events(run, TrainingFinished)] == ["failed"]
    config = with_horizons(unflatten({"gym": "CartPole-v1", "lstm_hidden": 8}))
    trainee = GymTrainee(config, torch.device("cpu"))
    saved = load_latest(run).parts["policy"]
    assert saved.keys() == trainee.agent.state()["policy"].keys()
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())
    for event in refused:
        assert run_guarded(esper, ["replay", str(run / event.file)]) == 0
        assert "observation/features; now: observation/features" in capsys.readouterr().out


def test_a_refused_update_changes_no_weight(tmp_path: Path) -> None:
    flags = plugin(tmp_path, "Spoiled", bad="self.number > 3 and self.t > 2")
    assert train(tmp_path / "runs", *flags, *SMALL, "--rounds", "1") == 0
    run = run_of(tmp_path / "runs")
    before = load_latest(run).parts
    # The three environments created now observe NaN after three steps.
    resume_ppo(run, {"rounds": 2})
    assert [r.round for r in read_events(run, UpdateRefused)] == [2]
    after = load_latest(run).parts
    for part in ("policy", "optimizer"):
        assert_same(after[part], before[part])
    assert_same(after["moments"]["return"], before["moments"]["return"])


MISTAKES = [
    (["--gym", "CartPol-v1"], "gym: there is no environment 'CartPol-v1'; did you mean"),
    (["--gym", "CartPole-v1", "--task", "digits"], "task: belongs to growing networks"),
    (["--gym", "CartPole-v1", "--slots", "r0c0"], "slots: belongs to growing networks"),
    (["--gym", "CartPole-v1", "--max-epochs", "3"], "episode_length: belongs to growing"),
    (["--gym", "CartPole-v1", "--reward", "paired"], "reward: belongs to growing networks"),
    (["--gym", "CartPole-v1", "--amp"], "use_amp: belongs to growing networks"),
    (["--gym", "CartPole-v1", "--rollout-steps", "0"], "rollout_steps: must lie between 1"),
    (["--gym", "CartPole-v1", "--memory", "gru"], "--memory: must be one of 'lstm', 'none'"),
    (["--gym", "CartPole-v1", "--gym-args", "length"], "gym_args: must be NAME=VALUE"),
    (["--gym", "CartPole-v1", "--gym-args", "a=1", "a=2"], "gym_args: a is given twice"),
    (["--gym", "CartPole-v1", "--gym-args", "a=1"], "gym: CartPole-v1 cannot be created"),
    (["--rollout-steps", "5"], "rollout_steps: belongs to a Gymnasium task; give --gym ID"),
    (["--memory", "none"], "memory: belongs to a Gymnasium task"),
]


@pytest.mark.parametrize(("flags", "says"), MISTAKES)
def test_a_usage_error_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys, flags: list[str], says: str
) -> None:
    place = ["--telemetry-dir", str(tmp_path / "runs")]
    error = refusal(capsys, esper, "train", "ppo", *place, *flags)
    assert error.startswith(f"esper: {says}"), error
    assert not (tmp_path / "runs").exists()


def test_the_kind_of_a_run_comes_from_flags_or_file_and_cannot_change(
    tmp_path: Path, capsys
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"gym": "CartPole-v1", "n_envs": 3, "rollout_steps": 9}))
    flags = ["--config-json", str(file), "--rounds", "1", "--lstm-hidden", "8"]
    assert train(tmp_path / "runs", *flags, "--rollout-steps", "12") == 0
    settings = json.loads((run_of(tmp_path / "runs") / "config.json").read_text())["settings"]
    assert (settings["envs"], settings["rollout_steps"], settings["ppo_epochs"]) == (3, 12, 10)
    file.write_text(json.dumps({"rollout_steps": 9}))
    assert train(tmp_path / "more", *flags, "--gym", "CartPole-v1", "--envs", "2") == 0
    capsys.readouterr()
    growth = unflatten({})
    with pytest.raises(UsageError, match="gym: 'CartPole-v1' would change the kind of run"):
        unflatten({"gym": "CartPole-v1"}, growth)
    assert "--gym" in refusal(capsys, esper, "train", "heuristic", "--gym", "CartPole-v1")
    run = run_of(tmp_path / "runs")
    for changed in ({"gym": "Acrobot-v1"}, {"gym_args": ["a=1"]}, {"critic": "separate"}):
        (name,) = changed
        with pytest.raises(UsageError, match=f"^{name}: the run has"):
            resume_ppo(run, {**changed, "rounds": 2})


def test_arguments_of_an_environment_are_json_or_text() -> None:
    given = ("a=1", "b=true", "c=null", "d=0.5", 'e="x"', "f=x=y", "g=[1, 2]", "h=")
    values = (1, True, None, 0.5, "x", "x=y", [1, 2], "")
    assert arguments_of(given) == dict(zip("abcdefgh", values, strict=True))


def test_a_gymnasium_task_trains_from_python(tmp_path: Path) -> None:
    task = {"gym": "esper/MemoryChain-v0", "gym_args": ["length=2"], "envs": 2, "rollout_steps": 16}
    place = {"telemetry_dir": str(tmp_path), "telemetry_level": "off"}
    summary = train_ppo_vectorized(rounds=1, **task, **place)
    (done,) = summary.rounds
    assert done.episodes == 2 * 4
    assert done.episode_length == 3.0
    assert not (summary.path / "events.jsonl").exists()
    checkpoint = load_checkpoint(summary.path / "checkpoints" / "000001")
    assert checkpoint.parts["environments"]["episode"].tolist() == [4, 4]


@pytest.mark.slow
def test_memory_chain_of_length_eight_is_solved(tmp_path: Path) -> None:
    summary = train_ppo_vectorized(
        gym="esper/MemoryChain-v0", rounds=24, seed=1, telemetry_dir=str(tmp_path)
    )
    assert summary.rounds[-1].episode_return > 0.9
