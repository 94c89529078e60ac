"""Rounds with numbers that are not finite: reported, kept for replay; three in a row end a run."""

import math

import pytest
import torch

from esper.karn.store import read_events
from esper.leyline.events import TrainingFinished, UpdateRefused
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from esper.simic.run.checkpoint import load_latest
from esper.simic.training import growth_trainee as growth
from esper.simic.training import replay
from esper.simic.training.vectorized import train_ppo_vectorized
from small_runs import SMALL, tensors


def spoiling(monkeypatch, bad_rounds: set[int]) -> None:
    """Put a number that is not finite into the rewards of these rounds."""
    collect = growth.collect

    def spoilt(environment, actor, number, on_step):
        rollout = collect(environment, actor, number, on_step)
        if number in bad_rounds:
            rollout.rewards[1, 2] = math.nan
        return rollout

    monkeypatch.setattr(growth, "collect", spoilt)


def test_three_refusals_in_a_row_end_the_run_with_a_checkpoint(
    tmp_path, monkeypatch, capsys
) -> None:
    spoiling(monkeypatch, {2, 3, 4})
    run = train_ppo_vectorized(rounds=8, telemetry_dir=str(tmp_path), **SMALL)
    assert (run.status, run.exit_code) == ("failed", 1)
    events = list(read_events(run.path, UpdateRefused))
    assert [(e.round, e.in_a_row, e.tensor) for e in events] == [
        (2, 1, "reward"),
        (3, 2, "reward"),
        (4, 3, "reward"),
    ]
    (finished,) = read_events(run.path, TrainingFinished)
    assert finished.status == "failed"
    assert load_latest(run.path).round == 4
    output = capsys.readouterr().err
    assert output.count("warning: the update of round") == 3
    assert "3 updates in a row" in output
    for event in events:
        assert run_guarded(esper, ["replay", str(run.path / event.file)]) == 0


def test_refused_rounds_change_no_weight(tmp_path, monkeypatch) -> None:
    before = train_ppo_vectorized(rounds=1, telemetry_dir=str(tmp_path / "a"), **SMALL)
    spoiling(monkeypatch, {2, 3})
    after = train_ppo_vectorized(rounds=3, telemetry_dir=str(tmp_path / "b"), **SMALL)
    for part in ("policy", "optimizer"):
        mine, theirs = (tensors(load_latest(r.path).parts[part]) for r in (after, before))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs), part


@pytest.mark.parametrize("bad_rounds", [{1, 2, 4, 5}, {2, 4, 6}])
def test_a_round_that_learns_resets_the_count(tmp_path, monkeypatch, bad_rounds) -> None:
    spoiling(monkeypatch, bad_rounds)
    run = train_ppo_vectorized(rounds=6, telemetry_dir=str(tmp_path), **SMALL)
    assert (run.status, run.exit_code) == ("finished", 0)
    assert len(list((run.path / "refused").glob("*.pt"))) == len(bad_rounds)


def test_a_refusal_whose_file_cannot_be_written_does_not_end_the_run(
    tmp_path, monkeypatch, capsys
) -> None:
    spoiling(monkeypatch, {1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replay, "replace_synced", full)
    run = train_ppo_vectorized(rounds=2, telemetry_dir=str(tmp_path), **SMALL)
    assert (run.status, run.exit_code) == ("finished", 0)
    (event,) = read_events(run.path, UpdateRefused)
    assert event.file == ""
    assert "was not written (No space left on device)" in capsys.readouterr().err
