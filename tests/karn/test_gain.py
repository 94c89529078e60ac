"""The gain has one definition and one unit, whoever shows it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import esper.karn
from esper.karn.report import write_report
from esper.karn.report.gather import RunData
from esper.karn.report.tables import final_table
from esper.karn.runs import inspect
from esper.karn.sanctum.record_pages import mean
from esper.karn.store import read_events
from esper.leyline.config import unflatten
from esper.leyline.events import EpisodeOutcome
from esper.nissa.trackers import scalars
from esper.scripts.runs import runs
from esper.simic.training.vectorized import run_training
from report_pages import check
from small_runs import SMALL, events_of

OLD = Path(__file__).parents[1] / "recorded" / "old_schema"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def mean_difference(line: dict, own: str, twin: str) -> float:
    return 100.0 * float(np.mean(np.array(line[own]) - np.array(line[twin])))


def test_all_readers_show_the_gain_of_the_recorder(tmp_path, monkeypatch, capsys) -> None:
    config = unflatten(SMALL | {"rounds": 2, "episode_length": 12, "telemetry_dir": str(tmp_path)})
    summary = run_training(config, "random")
    run, last = summary.path, summary.rounds[-1]
    line = events_of(run, "EPISODE_OUTCOME")[-1]
    wanted = (
        mean_difference(line, "test_utility", "twin_test_utility"),
        mean_difference(line, "utility", "twin_utility"),
    )
    assert wanted[0] != pytest.approx(wanted[1])

    sql = "SELECT avg(gain), avg(validation_gain) FROM episodes WHERE round = 2"
    (row,) = esper.karn.query(run, sql).to_pylist()
    (of_run,) = esper.karn.query(run, "SELECT gain, validation_gain FROM runs").to_pylist()
    info, data = inspect(run), RunData(run)
    assert runs([str(tmp_path), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    outcome = list(read_events(run, EpisodeOutcome))[-1]
    score, tracked = mean(outcome), scalars(outcome)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import runs as benchmark

    played = benchmark.Run(run)
    for found in (
        (last.gain, last.validation_gain),
        tuple(row.values()),
        tuple(of_run.values()),
        (info.gain, info.validation_gain),
        (listed["gain"], listed["validation_gain"]),
        (score.gain, score.validation_gain),
        (tracked["episodes/gain"], tracked["episodes/validation_gain"]),
        tuple(data.outcomes[name][-1].mean() for name in ("gain", "validation_gain")),
        tuple(
            100.0 * played.gain(played.outcomes[-1:], measure).value
            for measure in ("test_utility", "utility")
        ),
    ):
        assert found == pytest.approx(wanted, abs=1e-9)
    cells = {row[0]: row[1] for row in final_table([data]).rows}
    assert cells["gain, points"].startswith(f"{wanted[0]:+.1f}")
    assert cells["validation difference, points"].startswith(f"{wanted[1]:+.1f}")


def test_a_run_without_test_scores_has_a_gain_on_validation_only(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    (old,) = esper.karn.query(
        OLD, "SELECT count(*) AS all, count(gain) AS gains, count(validation_gain) AS validation, "
        "count(test_accuracy) AS tests FROM episodes"
    ).to_pylist()  # fmt: skip
    assert old == {"all": 12, "gains": 0, "validation": 12, "tests": 0}
    assert esper.karn.query(OLD, "SELECT gain FROM runs").to_pylist() == [{"gain": None}]
    info = inspect(OLD)
    assert info.gain is None
    assert info.validation_gain is not None
    assert runs([str(OLD)]) == 0
    shown = next(line for line in capsys.readouterr().out.splitlines() if "3/3" in line)
    assert shown.split("3/3")[1].split()[:2] == ["-", f"{info.validation_gain:+.1f}"]

    cells = {row[0]: row[1] for row in final_table([RunData(OLD)]).rows}
    assert cells["gain, points"] == cells["test accuracy grown, %"] == "–"
    assert cells["validation difference, points"] != "–"
    page = check(write_report([OLD], tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "This run has no test scores" in page.text
    assert "Validation difference" in page.plots
    assert "Gain over the twin" not in page.plots

    outcome = next(iter(read_events(OLD, EpisodeOutcome)))
    assert (outcome.gain, mean(outcome).gain) == ([], None)
    assert "episodes/gain" not in scalars(outcome)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "runs", raising=False)
    import runs as benchmark

    with pytest.raises(SystemExit, match="has no test_utility"):
        benchmark.Run(OLD).gain([outcome])
