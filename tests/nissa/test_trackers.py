"""Trackers get scalars over rounds; missing libraries are reported before anything is written."""

import importlib.util
import math
import sys
import time
from pathlib import Path
from statistics import fmean
from unittest.mock import MagicMock

import pytest

from esper.karn.store import read_events
from esper.leyline.errors import UsageError
from esper.leyline.events import AnomalyDetected, EpisodeOutcome, PPOUpdateCompleted, decode
from esper.nissa import trackers
from esper.nissa.trackers import TensorBoard, WandB, scalars
from esper.scripts.main import esper
from esper.simic.training.vectorized import train_ppo_vectorized
from processes import WATCHDOG, refusal
from small_runs import SMALL

RUN = Path(__file__).parents[1] / "recorded" / "anomalous"
TINY = SMALL | {"rounds": 1, "telemetry_level": "normal"}

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves that TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(point.step, point.value) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def told(sink: TensorBoard | WandB) -> None:
    """Give a sink every event of the recorded run."""
    for line in (RUN / "events.jsonl").read_bytes().splitlines():
        sink.write(decode(line))
    sink.close()


@needs_tensorboard
def test_tensorboard_shows_every_update_and_outcome(tmp_path: Path) -> None:
    told(TensorBoard(tmp_path))
    found = curves(tmp_path)
    losses = [(u.round, u.metrics["value_loss"]) for u in read_events(RUN, PPOUpdateCompleted)]
    assert found["update/value_loss"] == [(r, pytest.approx(v)) for r, v in losses]
    outcomes = [
        (o.round, sum(map(float, o.accuracy)) / len(o.accuracy))
        for o in read_events(RUN, EpisodeOutcome)
    ]
    assert found["episodes/accuracy"] == [(r, pytest.approx(v)) for r, v in outcomes]
    style = dict(found["update/head_grad_norms/style"])
    assert math.isnan(style[5])
    assert 5 not in dict(found["update/head_grad_norms/tempo"]), "a missing norm is not shown"
    assert len(found["speed/environment_steps_per_second"]) == 6


@needs_tensorboard
def test_a_run_with_tensorboard_enabled_writes_its_files(tmp_path: Path) -> None:
    run = train_ppo_vectorized(telemetry_dir=str(tmp_path), tensorboard=True, **TINY).path
    found = curves(run / "tensorboard")
    assert [step for step, _ in found["update/entropy"]] == [1]
    (outcome,) = read_events(run, EpisodeOutcome)
    own, twin = (fmean(map(float, s)) for s in (outcome.test_utility, outcome.twin_test_utility))
    assert found["episodes/gain"] == [(1, pytest.approx(100.0 * (own - twin), abs=1e-4))]
    assert "episodes/validation_gain" in found
    other = train_ppo_vectorized(telemetry_dir=str(tmp_path), **TINY).path
    assert not (other / "tensorboard").exists()


@pytest.mark.slow
@needs_wandb
def test_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    told(WandB(tmp_path))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # wandb's own process writes, and may not have finished yet.
    deadline = time.monotonic() + WATCHDOG
    while b"anomaly/missing_gradient" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    content = file.read_bytes()
    for name in ("episodes/accuracy", "update/head_grad_norms/style", "anomaly/missing_gradient"):
        assert name.encode() in content, name


def test_a_wandb_run_is_finished_if_it_was_begun(tmp_path: Path, monkeypatch) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    WandB(tmp_path).close()
    assert wandb.mock_calls == []
    told(WandB(tmp_path))
    wandb.init.return_value.finish.assert_called_once_with()
    logs = [call.args[0] for call in wandb.init.return_value.log.call_args_list]
    assert {"update/head_grad_norms/style", "anomaly/missing_gradient"} <= set().union(*logs)
    assert all(len(log) > 1 and "round" in log for log in logs)
    (call,) = wandb.init.call_args_list
    assert (call.kwargs["mode"], call.kwargs["name"]) == ("offline", tmp_path.name)


def test_a_missing_metric_has_no_scalar() -> None:
    seen = list(read_events(RUN, PPOUpdateCompleted))[-1]
    values = scalars(seen)
    assert "update/head_grad_norms/tempo" not in values
    assert math.isnan(values["update/head_grad_norms/style"])
    assert not scalars(next(read_events(RUN, AnomalyDetected)))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_library_is_reported_in_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch, capsys, name: str
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: None)
    runs = tmp_path / "runs"
    errors = refusal(capsys, esper, "train", "ppo", f"--{name}", "--telemetry-dir", str(runs))
    assert errors.startswith(f"esper: {name}: ")
    assert "esper-growth[trackers]" in errors
    assert not runs.exists()


def test_a_tracker_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="telemetry_level off"):
        train_ppo_vectorized(
            telemetry_dir=str(tmp_path / "runs"),
            tensorboard=True,
            **TINY | {"telemetry_level": "off"},
        )
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_fails_does_not_stop_training(tmp_path, monkeypatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no tracker today")

    monkeypatch.setattr(TensorBoard, "write", fail)
    summary = train_ppo_vectorized(telemetry_dir=str(tmp_path), tensorboard=True, **TINY)
    assert summary.exit_code == 0
    assert capsys.readouterr().err.count("no tracker today") == 1
    assert len(list(read_events(summary.path, EpisodeOutcome))) == 1


def test_the_files_of_tensorboard_are_closed_if_they_were_begun(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker.close()
    writer = tracker._writer = MagicMock()
    tracker.close()
    assert [call[0] for call in writer.mock_calls] == ["close"]
