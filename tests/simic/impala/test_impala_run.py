"""Runs of ``esper train impala``: settings, resuming, refusals, errors, and CartPole."""

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch

from esper.karn.runs import inspect
from esper.karn.store import read_events
from esper.leyline.config import TrainConfig, flatten, unflatten
from esper.leyline.config.reading import with_horizons
from esper.leyline.errors import UsageError
from esper.leyline.events import PolicyUpdateCompleted, TrainingStarted, UpdateRefused
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from esper.simic.run.checkpoint import load_latest
from esper.simic.tools.grow import GrowingPolicy
from esper.simic.training.gym_trainee import GymTrainee
from esper.simic.training.replay import replay
from esper.simic.training.vectorized import resume_ppo, train_impala, train_ppo_vectorized
from processes import refusal
from small_runs import SMALL, assert_same, tensors

GYM = {
    "gym": "CartPole-v1",
    "envs": 3,
    "rollout_steps": 20,
    "lstm_hidden": 8,
    "telemetry_level": "minimal",
}


def command(folder: Path, *words: str) -> int:
    return run_guarded(esper, ["train", *words, "--telemetry-dir", str(folder)])


@pytest.mark.parametrize("settings", [SMALL, GYM], ids=["growth", "gym"])
def test_a_resumed_run_ends_in_the_same_bits(settings: dict, tmp_path: Path) -> None:
    settings = {**settings, "lag": 2, "learning_rate": 1e-2, "lr_decay_steps": 5}
    settings["entropy_decay_steps"] = 5
    whole = train_impala(rounds=5, telemetry_dir=str(tmp_path / "whole"), **settings)
    cut = train_impala(rounds=3, telemetry_dir=str(tmp_path / "cut"), **settings)
    assert len(load_latest(cut.path).parts["lagged_actor"]) == 3
    resume_ppo(cut.path, {"rounds": 5})
    assert_same(load_latest(cut.path).parts, load_latest(whole.path).parts)
    traces = [[u.metrics for u in read_events(r.path, PolicyUpdateCompleted)] for r in (cut, whole)]
    assert traces[0] == traces[1]
    assert traces[0][-1]["lag_kl"] > 0.0


def test_the_lag_and_its_correction_change_what_is_learned(tmp_path: Path) -> None:
    final = []
    for kind in ({"lag": 0}, {"lag": 2}, {"lag": 2, "correction": "none"}):
        run = train_impala(rounds=5, telemetry_dir=str(tmp_path), **GYM, **kind)
        final.append(tensors({"policy": load_latest(run.path).parts["policy"]}))
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert any(not torch.equal(x, final[other][name]) for name, x in final[one].items())


def test_the_command_records_algorithm_settings_and_policy(tmp_path: Path, capsys) -> None:
    flags = "--gym CartPole-v1 --envs 2 --rollout-steps 8 --rounds 2 --lag 1 --lstm-hidden 8"
    assert command(tmp_path, "impala", *flags.split()) == 0
    (run,) = tmp_path.iterdir()
    settings = json.loads((run / "config.json").read_text())["settings"]
    expected = {"algorithm": "impala", "lag": 1, "correction": "vtrace", "ppo_epochs": 1}
    assert {name: settings[name] for name in expected} == expected
    assert settings["discount"] == 0.99  # as for every Gymnasium task
    assert next(read_events(run, TrainingStarted)).policy == "impala"
    capsys.readouterr()
    assert run_guarded(esper, ["runs", str(tmp_path)]) == 0
    assert "impala" in capsys.readouterr().out


def test_runs_of_ppo_have_no_settings_of_impala() -> None:
    assert "lag" not in flatten(TrainConfig())
    assert flatten(TrainConfig())["algorithm"] == "ppo"
    assert unflatten({"algorithm": "impala"}).learner.ppo_epochs == 1
    assert unflatten({"algorithm": "impala", "gym": "CartPole-v1"}).learner.ppo_epochs == 1
    assert unflatten({"gym": "CartPole-v1"}).learner.ppo_epochs == 10


def test_an_interrupted_run_says_how_it_is_resumed(tmp_path: Path) -> None:
    run = train_impala(rounds=2, telemetry_dir=str(tmp_path), **GYM).path
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(line for line in events if "FINISHED" not in line))
    found = inspect(run)
    assert (found.policy, found.status) == ("impala", "interrupted")
    assert found.resume == f"esper train impala --resume {run} --rounds 2"
    (run / "events.jsonl").unlink()
    assert inspect(run).policy == "impala"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("impala --lag -1", "lag: must lie between 0 and 1000, got -1"),
        ("impala --lag some", "--lag: must be a whole number"),
        ("impala --rho-clip 0", "rho_clip: must be above 0"),
        ("impala --c-clip 1.5", "c_clip: must be at most rho_clip"),
        ("impala --correction gae", "--correction: must be one of 'vtrace', 'none'"),
        ("impala --algorithm ppo", "--algorithm: esper train impala has no such setting"),
        ("impala --actors -1", "actors: must lie between 0 and 10000, got -1"),
        ("impala --actors 5", "actors: 5 are more than the 4 groups of 8 environments"),
        ("impala --gym CartPole-v1 --actors 9", "actors: 9 are more than the 8 environments"),
        ("impala --ray-address auto", "ray_address: there are no actors; give --actors too"),
        ("impala --actors 2 --devices cpu cpu", "devices: with actors, hosts run on their CPUs"),
        ("ppo --actors 2", "--actors: esper train ppo has no such setting"),
        ("ppo --lag 1", "--lag: esper train ppo has no such setting"),
        ("heuristic --lag 1", "--lag: esper train heuristic has no such setting"),
    ],
)
def test_a_usage_error_is_one_line_and_writes_nothing(
    words: str, says: str, tmp_path: Path, capsys
) -> None:
    place = ["--telemetry-dir", str(tmp_path / "runs")]
    assert says in refusal(capsys, esper, "train", *words.split(), *place)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ended_in_its_first_round_with_actors_begins_anew_without() -> None:
    """The actors have told nothing of the environments yet."""
    fresh, resumed = (
        GymTrainee(with_horizons(unflatten({**GYM, "algorithm": "impala"})), torch.device("cpu"))
        for _ in "ab"
    )
    resumed.restore(fresh.agent.state())
    assert torch.equal(
        fresh.environments.observation.features, resumed.environments.observation.features
    )
    assert resumed.parts().keys() == fresh.parts().keys()


def test_a_run_with_a_lag_keeps_to_actors_or_to_none(tmp_path: Path) -> None:
    run = train_impala(rounds=1, telemetry_dir=str(tmp_path), lag=1, **GYM).path
    with pytest.raises(UsageError, match="actors: the run has 0 and a lag of 1"):
        resume_ppo(run, {"rounds": 2, "actors": 2})


@pytest.mark.parametrize(("program", "default"), [("impala", "1"), ("ppo", "4; with --gym: 10")])
def test_the_help_shows_the_defaults_of_the_command(program: str, default: str, capsys) -> None:
    assert run_guarded(esper, ["train", program, "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"Passes over the rollout of each round. (default: {default})" in text


@pytest.mark.parametrize(
    ("program", "settings", "says"),
    [
        ("ppo", {"algorithm": "impala", "lag": 1}, "use esper train impala"),
        ("impala", {"algorithm": "ppo"}, "use esper train ppo"),
        ("heuristic", {"algorithm": "impala"}, "use esper train impala"),
        ("ppo", {"lag": 1}, "lag: belongs to IMPALA"),
    ],
)
def test_a_file_of_settings_of_another_algorithm_is_refused(
    program: str, settings: dict, says: str, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))
    assert command(tmp_path / "runs", program, "--config-json", str(path)) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_file_of_settings_of_a_run_starts_another(tmp_path: Path) -> None:
    run = train_impala(rounds=1, telemetry_dir=str(tmp_path / "one"), lag=1, **GYM).path
    settings = json.loads((run / "config.json").read_text())["settings"]
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))
    assert command(tmp_path / "other", "impala", "--config-json", str(path)) == 0
    (other,) = (tmp_path / "other").iterdir()
    repeated = json.loads((other / "config.json").read_text())["settings"]
    assert repeated == settings | {"telemetry_dir": str(tmp_path / "other")}


def test_a_run_is_resumed_by_its_own_command_with_its_own_lag(tmp_path: Path, capsys) -> None:
    impala = train_impala(rounds=1, telemetry_dir=str(tmp_path / "a"), lag=1, **GYM).path
    ppo = train_ppo_vectorized(rounds=1, telemetry_dir=str(tmp_path / "b"), **GYM).path
    capsys.readouterr()
    for run, wrong, right in ((impala, "ppo", "impala"), (ppo, "impala", "ppo")):
        before = sorted(run.rglob("*"))
        said = refusal(capsys, esper, "train", wrong, "--resume", str(run), "--rounds", "2")
        assert f"resume it with esper train {right}" in said
        assert sorted(run.rglob("*")) == before
    with pytest.raises(UsageError, match="lag: the run has 1, and resuming cannot change it"):
        resume_ppo(impala, {"rounds": 2, "lag": 2})
    with pytest.raises(UsageError, match="lag: belongs to IMPALA"):
        resume_ppo(ppo, {"rounds": 2, "lag": 2})
    words = ["train", "impala", "--resume", str(impala), "--rounds", "2"]
    assert run_guarded(esper, words) == 0
    with pytest.raises(UsageError, match="train_impala"):
        train_ppo_vectorized(algorithm="impala", **GYM)


def test_a_refused_update_is_replayed_with_its_algorithm(tmp_path: Path, monkeypatch) -> None:
    collected = GymTrainee.collect

    def spoilt(self, hub, number, on_step):
        rollout = collected(self, hub, number, on_step)
        if number == 3:
            rollout.rewards[4, 1] = float("nan")
        return rollout

    monkeypatch.setattr(GymTrainee, "collect", spoilt)
    run = train_impala(rounds=4, telemetry_dir=str(tmp_path), lag=1, **GYM).path
    (refused,) = read_events(run, UpdateRefused)
    assert (refused.round, refused.tensor) == (3, "reward")
    found = replay(run / refused.file)
    assert (found.run_tensor, found.replay_tensor) == ("reward", "reward")
    content = torch.load(run / refused.file, weights_only=True)
    content["rollout"]["rewards"][4, 1] = 0.0
    torch.save(content, run / refused.file)
    assert replay(run / refused.file).replay_tensor is None


def test_a_policy_grows_with_its_newest_weights(tmp_path: Path) -> None:
    settings = {**SMALL, "lag": 2, "learning_rate": 1e-2}
    run = train_impala(rounds=3, telemetry_dir=str(tmp_path), **settings).path
    agent = GrowingPolicy.named(str(run)).agent(0)
    newest = load_latest(run).parts["policy"]
    oldest = load_latest(run).parts["lagged_actor"]["0"]["policy"]
    weights = agent.policy.state_dict()
    assert all(torch.equal(weights[name], x) for name, x in newest.items())
    assert not all(torch.equal(weights[name], x) for name, x in oldest.items())


def test_cartpole_is_learned(tmp_path: Path) -> None:
    summary = train_impala(
        gym="CartPole-v1", rounds=20, learning_rate=5e-3, lstm_hidden=16, seed=2,
        telemetry_dir=str(tmp_path), telemetry_level="minimal",
    )  # fmt: skip
    lengths = [r.episode_length for r in summary.rounds if r.episodes]
    assert fmean(lengths[:2]) < 35.0
    assert fmean(lengths[-4:]) > 200.0
