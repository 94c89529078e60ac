"""``--name`` and ``--seeds``: named runs, and several seeds in one command."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from esper.karn.runs import inspect
from esper.scripts import report
from esper.scripts.progress import LiveProgress
from esper.scripts.several_seeds import training_seeds_table
from esper.scripts.train import train
from esper.simic.run.checkpoint import load_latest
from processes import called
from small_runs import SMALL, assert_same, events_of, tensors, timeless

FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
ROUNDS = "--rounds=2"


def trained(where: Path, *words: str, policy: str = "ppo"):
    done = called([policy, *FLAGS, *words], where, train)
    assert "Traceback" not in done.stderr
    return done


def refused(where: Path, *words: str, flags: tuple[str, ...] = tuple(FLAGS)) -> str:
    done = called(["ppo", *flags, *words], where, train)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


def weights(run: Path):
    return tensors(load_latest(run).parts["policy"])


def shown(table) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.fixture(autouse=True)
def without_reports(monkeypatch) -> None:
    """Drawing takes longer than such a run; those of ``group`` are drawn."""
    monkeypatch.setattr(report, "write_report", lambda runs, target: target)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    where = tmp_path_factory.mktemp("group")
    done = trained(where, ROUNDS, "--name", "both", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    return where, done.stdout


def test_a_run_has_the_name_it_is_given(tmp_path: Path) -> None:
    assert trained(tmp_path, "--rounds=1", "--name", "mine").returncode == 0
    run = tmp_path / "runs" / "mine"
    assert json.loads((run / "config.json").read_text())["settings"]["name"] == "mine"
    before = (run / "events.jsonl").read_bytes()
    assert "name: runs/mine exists" in refused(tmp_path, "--rounds=1", "--name", "mine")
    assert (run / "events.jsonl").read_bytes() == before
    words = ("--resume", str(run), "--rounds=2", "--name=b")
    assert "name: the run has mine" in refused(tmp_path, *words, flags=())


def test_each_seed_is_the_run_of_that_seed(group, tmp_path: Path) -> None:
    where, _ = group
    assert trained(tmp_path, ROUNDS, "--seed=43", "--name=alone").returncode == 0
    alone, run = tmp_path / "runs" / "alone", where / "runs" / "both" / "seed-43"
    assert timeless(run) == timeless(alone)
    assert_same(weights(run), weights(alone))
    assert (run.parent / "report.html").read_text().count("seed-42") > 3


def test_the_table_shows_the_last_round_of_each_seed(group) -> None:
    where, out = group
    runs = [where / "runs" / "both" / f"seed-{seed}" for seed in (42, 43)]
    returns = []
    for run in runs:
        last = events_of(run, "EPISODE_OUTCOME")[-1]
        returns.append(np.mean(last["episode_return"]))
        row = next(line for line in out.splitlines() if line.startswith(f"│ {run.name[-2:]} "))
        assert f" {returns[-1]:+.3f} " in row
    mean = next(line for line in out.splitlines() if line.startswith("│ mean "))
    assert f" {np.mean(returns):+.3f} " in mean


def test_the_interval_is_students() -> None:
    gains = [1.0, 2.5, 0.5, 4.0]
    text = shown(training_seeds_table({i: {"gain": gain} for i, gain in enumerate(gains)}))
    low, high = stats.t.interval(0.95, 3, np.mean(gains), stats.sem(gains))
    assert f"[{low:+.1f}, {high:+.1f}]" in text
    assert "+2.0" in text


def test_a_run_without_events_has_no_figures(tmp_path: Path) -> None:
    words = ("--rounds=1", "--seeds=2", "--telemetry-level=off", "--name=quiet")
    flags = [flag for flag in FLAGS if "telemetry" not in flag]
    done = called(["ppo", *flags, *words], tmp_path, train)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("│ 43 "))
    assert row.split()[3::2] == ["-"] * 4
    again = called(["ppo", *flags, *words], tmp_path, train)
    assert again.stdout.count("is finished") == 2


def test_a_run_whose_checkpoints_were_removed_is_not_finished(group, tmp_path: Path) -> None:
    """It says that it is, although nothing is left of what it learned."""
    where, _ = group
    shutil.copytree(where / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "both" / "seed-42" / "checkpoints")
    done = trained(tmp_path, ROUNDS, "--name=both", "--seeds=2")
    assert done.returncode == 0, done.stderr
    assert "seed-42 has no checkpoint, so it begins anew" in done.stderr
    assert done.stdout.count("is finished") == 1
    again, before = (place / "runs" / "both" / "seed-42" for place in (tmp_path, where))
    assert_same(weights(again), weights(before))


def test_the_same_command_repeats_nothing_and_more_seeds_are_added(group) -> None:
    where, _ = group
    place = where / "runs" / "both"
    before = {run: (place / run / "events.jsonl").read_bytes() for run in ("seed-42", "seed-43")}
    done = trained(where, ROUNDS, "--name=both", "--seeds=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is finished") == 2
    assert {run: (place / run / "events.jsonl").read_bytes() for run in before} == before
    assert inspect(place / "seed-44").status == "finished"


@pytest.mark.parametrize("policy", ["ppo", "rule"])
def test_a_signal_ends_all_seeds_and_the_same_command_resumes(
    policy: str, tmp_path: Path, monkeypatch
) -> None:
    words = ("--rounds=3", "--name=cut", "--seeds=3", "--checkpoint-every=1")
    words = words[:3] if policy == "rule" else words
    flags = [f for f in FLAGS if policy == "ppo" or ("lstm" not in f and "minib" not in f)]
    stepped, calls = LiveProgress.stepped, []

    def interrupted(self, step) -> None:
        calls.append(step)
        if len(calls) == 14:  # in the second round of the second seed
            os.kill(os.getpid(), signal.SIGINT)
        stepped(self, step)

    monkeypatch.setattr(LiveProgress, "stepped", interrupted)
    done = called([policy, *flags, *words], tmp_path, train)
    assert done.returncode == 130
    assert "to go on: esper train" in done.stdout
    place = tmp_path / "runs" / "cut"
    assert sorted(path.name for path in place.iterdir()) == ["seed-42", "seed-43", "seeds.json"]
    assert inspect(place / "seed-43").status == "interrupted"
    assert inspect(place / "seed-43").rounds_done == 1
    done = called([policy, *flags, *words], tmp_path, train)
    assert done.returncode == 0, done.stderr
    assert "seed-42 is finished" in done.stdout
    assert ("begins anew" in done.stderr) == (policy == "rule")
    assert all(inspect(place / f"seed-{n}").status == "finished" for n in (42, 43, 44))
    called([policy, *flags, "--rounds=3", "--name=whole", "--seed=43"], tmp_path, train)
    assert timeless(place / "seed-43") == timeless(tmp_path / "runs" / "whole")


def test_more_rounds_continue_each_seed(tmp_path: Path) -> None:
    assert trained(tmp_path, "--rounds=1", "--name=on", "--seeds=2").returncode == 0
    assert trained(tmp_path, "--rounds=2", "--name=on", "--seeds=2").returncode == 0
    place = tmp_path / "runs" / "on"
    for run in (place / "seed-42", place / "seed-43"):
        assert inspect(run).rounds_done == 2
        assert len(json.loads((run / "config.json").read_text())["resumed"]) == 1


def test_other_settings_are_refused_by_name(group) -> None:
    where, _ = group
    error = refused(where, ROUNDS, "--name=both", "--seeds=2", "--clip=0.1")
    assert "esper: clip: the runs in runs/both have 0.2, got 0.1" in error
    assert "name: runs/both exists" in refused(where, ROUNDS, "--name=both")


def test_a_refused_first_run_leaves_nothing(tmp_path: Path) -> None:
    error = refused(tmp_path, "--seeds=2", "--task=nope", "--telemetry-dir=deep/er")
    assert "task: there is no task" in error
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_is_named_and_stays(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "both"
    trained(tmp_path, "--rounds=1", "--name=both", "--seeds=2")
    (place / "seed-44").mkdir()
    (place / "seed-44" / "thesis.tex").touch()
    error = refused(tmp_path, "--rounds=1", "--name=both", "--seeds=3")
    assert "seed-44 is in the way" in error
    assert (place / "seed-44" / "thesis.tex").exists()
