"""Runs that learn from records: what they leave, how they resume, stop and are refused."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.karn.report import write_report
from esper.karn.runs import inspect
from esper.karn.store import read_events
from esper.leyline.config import unflatten
from esper.leyline.config.offline import ImitationConfig, OfflineConfig
from esper.leyline.errors import UsageError
from esper.leyline.events import PolicyUpdateCompleted, TrainingFinished, TrainingStarted
from esper.leyline.metrics import METRICS
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from esper.simic.offline import offline_run
from esper.simic.offline.offline_run import (
    OfflineSummary,
    build_trainer,
    learn_offline,
    resumed_config,
)
from esper.simic.offline.recorded_data import read_data
from esper.simic.records.episodes import read_episodes
from esper.simic.run import run_process
from esper.simic.run.checkpoint import load_latest
from esper.simic.tools.grow import GrowingPolicy
from esper.simic.trainer import Trainer
from esper.simic.training.vectorized import run_training
from processes import refusal
from small_runs import SMALL, assert_same, tensors
from synthetic import CPU
from virtual_device import virtual_device

SETTINGS: dict[str, Any] = {
    "epochs": 4, "batch_size": 4, "lstm_hidden": 8, "threads": 1, "held_out": 0.25,
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> str:
    place = {"telemetry_dir": str(tmp_path_factory.mktemp("runs")), "record": True, "rounds": 4}
    more = {"envs": 6, "episode_length": 8}
    return str(run_training(unflatten(SMALL | place | more), "random").path)


def learned(
    recorded: str, place: Path, kind: type = ImitationConfig, **more: Any
) -> OfflineSummary:
    given = SETTINGS | {"records": (recorded,), "telemetry_dir": str(place)} | more
    return learn_offline(kind(**given))


def updates(run: Path) -> list[PolicyUpdateCompleted]:
    return list(read_events(run, PolicyUpdateCompleted))


# --- what a run leaves ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["bc", "awr", "vine", "vtrace"])
def test_a_run_is_one_that_other_commands_take(method: str, recorded: str, tmp_path: Path) -> None:
    run = learned(recorded, tmp_path, OfflineConfig, method=method, learning_rate=1e-2)
    assert (run.status, run.exit_code) == ("finished", 0)
    content = json.loads((run.path / "config.json").read_text())
    assert content["settings"]["algorithm"] == "offline"
    assert content["settings"]["task"] == ["digits_shift"]
    assert content["offline"]["settings"]["method"] == method
    assert content["offline"]["settings"]["records"] == [str(Path(recorded).resolve())]
    started = next(read_events(run.path, TrainingStarted))
    assert (started.policy, started.tasks, started.rounds) == ("offline", ["digits_shift"], 4)
    events = updates(run.path)
    assert [event.round for event in events] == [1, 2, 3, 4]
    assert all(set(event.metrics) <= set(METRICS) for event in events)
    assert "held_out_policy_loss" in events[0].metrics
    assert ("held_out_expected_gain" in events[0].metrics) == (method == "vine")
    info = inspect(run.path)
    assert (info.status, info.policy, info.rounds_done) == ("finished", "offline", 4)
    page = write_report([run.path], tmp_path / "report.html").read_text()
    assert f"learned by offline from the records of {Path(recorded).name}" in page
    assert "epochs" in page
    grower = GrowingPolicy.named(str(run.path))
    assert grower.episodes == 4 * 6
    agent = grower.agent(seed=3)
    parts = load_latest(run.path).parts
    assert_same(dict(agent.policy.state_dict()), parts["policy"])
    assert load_latest(run.path).round == run.best
    assert (run.best == 4) or method != "vtrace"


def test_the_policy_that_is_kept_is_the_one_with_the_lowest_held_out_loss(
    recorded: str, tmp_path: Path
) -> None:
    """Its loss is that of its checkpoint, computed anew; it is also the latest checkpoint."""
    run = learned(recorded, tmp_path, learning_rate=0.02, epochs=30, patience=5, keep_checkpoints=2)
    losses = [summary.metrics["held_out_policy_loss"] for summary in run.epochs]
    assert losses.index(min(losses)) + 1 == run.best < len(losses) == run.best + 5 < 30
    assert [epoch.epoch for epoch in run.epochs if epoch.best][-1] == run.best
    assert len(list((run.path / "checkpoints").iterdir())) == 2
    assert inspect(run.path).rounds_done == len(losses)
    config = ImitationConfig(**SETTINGS, records=(recorded,))
    data = read_data(config)
    trainer = build_trainer(config, data, CPU, 1)
    trainer.load_state(load_latest(run.path).parts)
    agent = GrowingPolicy.named(str(run.path)).agent(seed=0)
    episodes = read_episodes([Path(recorded)])
    with torch.no_grad():
        found = agent.policy.evaluate_actions(
            agent.moments.normalise(episodes.observation),
            episodes.actions,
            agent.policy.initial_hidden(episodes.count),
        )
    expected = -found.log_prob[:, data.held_out].mean().item()
    assert min(losses) == pytest.approx(expected, rel=1e-5)
    means = [summary.metrics["negative_log_likelihood"] for summary in run.epochs]
    assert means[-1] < means[0]


def test_every_epoch_takes_each_episode_once_in_another_order(
    recorded: str, tmp_path: Path, monkeypatch
) -> None:
    seen: list[float] = []

    def step(self: Trainer, batch: Any, own: Callable = Trainer.step) -> Any:
        seen.extend(batch.returns[0].tolist())
        return own(self, batch)

    monkeypatch.setattr(Trainer, "step", step)
    learned(recorded, tmp_path, epochs=3)
    data = read_data(ImitationConfig(**SETTINGS, records=(recorded,)))
    count = len(data.training)
    epochs = [seen[i : i + count] for i in range(0, len(seen), count)]
    expected = sorted(data.returns[0, data.training].tolist())
    assert [sorted(epoch) for epoch in epochs] == [expected] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_without_held_out_episodes_the_last_epoch_is_kept(recorded: str, tmp_path: Path) -> None:
    run = learned(recorded, tmp_path, held_out=0.0, epochs=3, patience=1)
    assert [epoch.best for epoch in run.epochs] == [True] * 3
    assert load_latest(run.path).round == run.best == 3
    assert "held_out_policy_loss" not in run.epochs[0].metrics


def test_the_same_settings_give_the_same_bits_and_another_seed_others(
    recorded: str, tmp_path: Path
) -> None:
    runs = [learned(recorded, tmp_path, seed=seed).path for seed in (1, 1, 2)]
    one, same, other = (tensors(load_latest(run).parts) for run in runs)
    assert all(torch.equal(x, same[name]) for name, x in one.items())
    assert any(not torch.equal(x, other[name]) for name, x in one.items() if "policy/" in name)


def test_records_of_other_tasks_lengths_and_policies_are_learned_from_together(
    recorded: str, tmp_path: Path
) -> None:
    place = {"telemetry_dir": str(tmp_path), "record": True, "rounds": 1, "task": ["digits_deep"]}
    other = run_training(unflatten(SMALL | place), "heuristic").path
    run = learned(recorded, tmp_path / "out", records=(recorded, str(other)))
    assert run.status == "finished"
    settings = json.loads((run.path / "config.json").read_text())["settings"]
    assert settings["task"] == ["digits_shift", "digits_deep"]


# --- arithmetic -----------------------------------------------------------------------------------


def test_cuda_learns_in_half_precision_by_default_and_a_cpu_if_asked(monkeypatch) -> None:
    cuda, asked = torch.device("cuda:0"), []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: bool(asked))
    half = offline_run.half_precision
    assert half("auto", cuda, "amp") == torch.float16
    asked.append("supported")
    assert half("auto", cuda, "amp") == torch.bfloat16
    assert half("auto", CPU, "amp") == torch.bfloat16
    monkeypatch.setenv("ESPER_DISABLE_AMP", "1")
    assert half("auto", cuda, "amp") is None


@pytest.mark.parametrize(("amp", "dtype"), [(None, None), (False, None), (True, torch.bfloat16)])
def test_the_setting_amp_decides_on_a_cpu(amp, dtype, recorded: str) -> None:
    config = ImitationConfig(**SETTINGS, records=(recorded,), amp=amp)
    assert build_trainer(config, read_data(config), CPU, 1).policy.amp_dtype == dtype


def test_a_batch_that_does_not_fit_into_a_device_is_refused_with_one_that_does(
    recorded: str, tmp_path: Path
) -> None:
    given = {"device": "cuda:0", "epochs": 1, "compile": "off", "lstm_hidden": 64}
    with virtual_device() as machine:
        run = learned(recorded, tmp_path, **given)
        needed = machine.ledger(torch.device("cuda:0")).peak
    assert machine.faults == []
    (started,) = read_events(run.path, TrainingStarted)
    assert started.amp_policy_dtype == "bfloat16"
    with (
        virtual_device(capacity=int(0.9 * needed)),
        pytest.raises(UsageError, match=r"^batch_size: 4 do not fit into .* cuda:0: [^\n]* fit$"),
    ):
        learned(recorded, tmp_path, **given)


def test_learning_runs_with_the_arithmetic_that_the_settings_say(recorded, tmp_path, monkeypatch):
    seen = []
    own = offline_run.arithmetic
    monkeypatch.setattr(offline_run, "arithmetic", lambda *given: seen.append(given) or own(*given))
    learned(recorded, tmp_path, epochs=1, tf32=False)
    learned(recorded, tmp_path, epochs=1)
    assert seen == [(CPU, 1, False), (CPU, 1, True)]


def test_the_trainer_compiles_as_the_settings_say(recorded: str, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: asked.append(options["mode"]) or f)
    for mode in ("auto", "off", "default", "max-autotune"):
        config = ImitationConfig(**SETTINGS, records=(recorded,), compile=mode)
        build_trainer(config, read_data(config), CPU, 1)
    assert asked == ["default", "max-autotune"]


# --- resuming and stopping ------------------------------------------------------------------------


def resumed(run: Path, **given: Any) -> OfflineSummary:
    return learn_offline(resumed_config(ImitationConfig, run, given), resume=run)


def test_a_resumed_run_ends_in_the_same_bits(recorded: str, tmp_path: Path) -> None:
    """Also where its best epoch was not its last: it repeats the epochs in between."""
    settings = {"learning_rate": 0.02, "held_out": 0.3, "patience": 20}
    whole = learned(recorded, tmp_path / "whole", epochs=12, **settings)
    cut = learned(recorded, tmp_path / "cut", epochs=9, **settings)
    assert 1 < cut.best < 9
    again = resumed(cut.path, epochs=12)
    assert [epoch.epoch for epoch in again.epochs] == list(range(cut.best + 1, 13))
    assert again.best == whole.best
    traces = [[u.metrics for u in updates(run.path)] for run in (whole, again)]
    assert traces[0] == traces[1]
    assert_same(load_latest(again.path).parts, load_latest(whole.path).parts)
    content = json.loads((cut.path / "config.json").read_text())
    assert content["settings"]["rounds"] == content["offline"]["settings"]["epochs"] == 12
    assert len(content["resumed"]) == 1


@pytest.mark.parametrize("content", [None, [], 3, "text", {}, {"settings": []}, {"settings": {}}])
def test_a_run_that_does_not_say_how_it_learns_is_refused(
    content: Any, recorded: str, tmp_path: Path
) -> None:
    path = learned(recorded, tmp_path, epochs=1).path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"offline": content}))
    with pytest.raises(UsageError, match=r"^resume: .* does not say how"):
        resumed(path.parent, epochs=2)
    for name in config["offline"]["settings"]:
        settings = {n: x for n, x in config["offline"]["settings"].items() if n != name}
        path.write_text(json.dumps(config | {"offline": {"settings": settings}}))
        with pytest.raises(UsageError, match=r"^resume: .* does not say how"):
            resumed(path.parent, epochs=2)


def test_a_signal_ends_a_run_that_can_be_resumed(recorded, tmp_path, monkeypatch) -> None:
    steps = []

    def step(self: Trainer, batch: Any, own: Callable = Trainer.step) -> Any:
        steps.append(1)
        if len(steps) == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return own(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        run = learned(recorded, tmp_path / "cut", held_out=0.0)
    assert (run.status, run.exit_code) == ("interrupted", 128 + signal.SIGTERM)
    assert 0 < len(run.epochs) < 4
    assert inspect(run.path).status == "interrupted"
    assert inspect(run.path).resume == f"esper train imitation --resume {run.path} --rounds 4"
    resumed(run.path)
    whole = learned(recorded, tmp_path / "whole", held_out=0.0)
    assert_same(load_latest(run.path).parts, load_latest(whole.path).parts)


def test_a_run_that_diverges_stops_and_keeps_its_best_epoch(
    recorded, tmp_path, monkeypatch, capsys
) -> None:
    def step(self: Trainer, batch: Any, own: Callable = Trainer.step) -> Any:
        if self.steps >= 7:
            batch = batch._replace(returns=batch.returns * float("nan"))
        return own(self, batch)

    monkeypatch.setattr(Trainer, "step", step)
    run = learned(recorded, tmp_path)
    assert (run.status, run.exit_code) == ("failed", 1)
    assert "produced non-finite values, so learning stops" in capsys.readouterr().err
    assert load_latest(run.path).round == run.best < len(run.epochs) < 4
    assert next(read_events(run.path, TrainingFinished)).status == "failed"
    weights = load_latest(run.path).parts["policy"]
    assert all(bool(x.isfinite().all()) for x in weights.values())


@pytest.mark.parametrize(("last_step", "kept"), [(1, "no epoch"), (2, "the best epoch, 1,")])
def test_weights_that_the_last_step_of_an_epoch_spoils_are_not_saved(
    last_step, kept, recorded, tmp_path, monkeypatch, capsys
) -> None:
    def step(self: Trainer, batch: Any, own: Callable = Trainer.step) -> Any:
        metrics = own(self, batch)
        if self.steps == last_step:
            next(self.policy.parameters()).data.view(-1)[0] = float("nan")
        return metrics

    monkeypatch.setattr(Trainer, "step", step)
    run = learned(recorded, tmp_path, held_out=0.0, batch_size=1000)
    assert (run.status, run.exit_code) == ("failed", 1)
    stopped = f"epoch {last_step} produced non-finite values, so learning stops; {kept} is kept"
    assert stopped in capsys.readouterr().err
    assert run.best == last_step - 1
    assert len(list((run.path / "checkpoints").glob("[0-9]*"))) == run.best


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_run_fails(
    recorded, tmp_path, monkeypatch, capsys
) -> None:
    def save(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_process, "save", save)
    run = learned(recorded, tmp_path, held_out=0.0, epochs=1)
    assert (run.status, run.exit_code) == ("failed", 1)
    said = capsys.readouterr().err
    assert "epoch 1 was not saved (No space left on device)" in said


# --- the command ----------------------------------------------------------------------------------


def command(place: Path, *words: str) -> int:
    return run_guarded(esper, ["train", *words, "--telemetry-dir", str(place)])


def test_the_commands_learn_and_say_what_they_do(recorded, tmp_path, capsys) -> None:
    words = ["--epochs=2", "--batch-size=8", "--lstm-hidden=8", "--held-out=0.25", "--threads=1"]
    assert command(tmp_path, "imitation", "--records", recorded, *words) == 0
    assert command(tmp_path, "offline", "--records", recorded, *words, "--method=vtrace") == 0
    out = capsys.readouterr().out
    assert "24 recorded episodes, 6 of them held out" in out
    assert "epoch 2/2  policy loss " in out
    assert "kept: epoch 2" in out
    first, second = sorted(tmp_path.iterdir())
    settings = [json.loads((r / "config.json").read_text())["settings"] for r in (first, second)]
    assert [s["algorithm"] for s in settings] == ["imitation", "offline"]
    assert (first / "report.html").exists()
    assert command(tmp_path, "imitation", "--resume", str(first), "--epochs", "3") == 0
    assert "epoch 3/3" in capsys.readouterr().out


REFUSED: dict[str, tuple[list[str], str]] = {
    "no records": (["imitation"], "records: no run is named"),
    "no run": (["offline", "--records", "nowhere"], "records: nowhere is not a run directory"),
    "no name": (["offline", "--records", ""], "records: . is not a run directory"),
    "no user": (["offline", "--records", "~nosuchuser/x"], "records: ~nosuchuser/x is not a run"),
    "null": (["offline", "--records", "x\0y"], "records: x\\x00y/config.json holds no id"),
    "long": (["offline", "--records", 300 * "x"], "records: xxx"),
    "run without records": (["imitation", "--records", "{run}"], "records: {run} has no records"),
    "method": (["offline", "--records", "{recorded}", "--method", "sac"], "--method: must be one"),
    "method of imitation": (["imitation", "--method", "bc"], "--method: esper train imitation has"),
    "batch size": (["offline", "--batch-size", "0"], "batch_size: must lie between 1"),
    "share": (["imitation", "--held-out", "1"], "held_out: must lie between 0 and 0.9"),
    "c_clip": (
        ["offline", "--records", "{recorded}", "--c-clip", "2"], "c_clip: must be at most rho_clip",
    ),
    "device": (
        ["imitation", "--records", "{recorded}", "--device", "tpu"],
        "device: 'tpu' is not a device",
    ),
    "float16": (
        ["imitation", "--records", "{recorded}", "--amp", "--amp-dtype", "float16"],
        "amp: float16 needs a CUDA device",
    ),
    "another command": (["offline", "--resume", "{run}"], "resume: {run} learns by imitation"),
    "no more epochs": (["imitation", "--resume", "{run}"], "epochs: the best epoch of {run} is 1"),
    "another setting": (
        ["imitation", "--resume", "{run}", "--epochs", "3", "--lr", "0.5"],
        "learning_rate: the run has 0.001, and resuming cannot change it",
    ),
    "resume nothing": (["imitation", "--resume", "nowhere"], "resume: nowhere is not a run"),
    "ppo": (["ppo", "--resume", "{run}"], "resume: {run} learns by imitation"),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(recorded: str, tmp_path_factory) -> Path:
    return learned(recorded, tmp_path_factory.mktemp("runs"), epochs=1).path


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_one_line_and_leaves_nothing(
    case, recorded, finished, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.name != "lock"}
    words, message = REFUSED[case]
    places = {"run": finished, "recorded": recorded}
    words = [word.format(**places) for word in words]
    said = refusal(capsys, esper, "train", *words, "--telemetry-dir", str(tmp_path / "runs"))
    assert said.startswith(f"esper: {message.format(**places)}")
    assert list(tmp_path.iterdir()) == []
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.name != "lock"} == before


def test_other_records_than_before_are_refused(recorded, tmp_path, monkeypatch) -> None:
    run = learned(recorded, tmp_path, epochs=1).path
    path = run / "config.json"
    content = json.loads(path.read_text())
    content["offline"]["episodes"] = 99
    path.write_text(json.dumps(content))
    with pytest.raises(Exception, match=r"^records: .* has learned from 99 \(episodes\)"):
        resumed(run, epochs=2)
