"""Every command that may take long says how far it is: a run on its line, others now and then."""

import io
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from esper.leyline import phases
from esper.leyline.config import unflatten
from esper.leyline.config.algorithm import algorithms
from esper.leyline.phases import Phase, current_phase, duration, phase, track
from esper.scripts import grown_files, progress_lines, replay, watched
from esper.scripts.main import COMMANDS, LIVE, esper
from esper.scripts.progress import LiveProgress, print_summary
from esper.simic.training.replay import ReplayResult
from esper.simic.training.vectorized import run_training, train_ppo_vectorized
from own_modules import SOURCE
from small_runs import SMALL

SETTINGS = {"envs": 4, "group_size": 2, "episode_length": 4, "max_batches": 1, "batch_size": 8}


def shown(tmp_path: Path, terminal: bool, width: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    config = unflatten({**SETTINGS, "rounds": 2, "telemetry_dir": str(tmp_path)})
    with LiveProgress(console) as progress:
        summary = run_training(config, "ppo", observer=progress)
        if terminal:
            console.print(progress.progress.get_renderable())
    print_summary(console, summary)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 99, 100, 160])
def test_the_live_line_shows_all_fields_at_any_width(tmp_path: Path, width: int) -> None:
    text = shown(tmp_path, terminal=True, width=width)
    (last,) = [line for line in text.splitlines() if "round 2/2" in line][-1:]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last)
    for wanted in ("steps/s", "val. acc", "twin", "entropy", "lr 0.001", "0:00:00"):
        assert wanted in plain, wanted
    assert "…" not in plain
    assert ("━" in plain) == (width >= 100)


def test_without_a_terminal_every_round_is_one_line_and_a_table_ends_it(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=False, width=80)
    rounds = [line for line in text.splitlines() if line.startswith("round ")]
    assert [line.split()[1] for line in rounds] == ["1/2", "2/2"]
    for words in ("gain", "validation difference", "entropy", "lr"):
        assert all(words in line for line in rounds)
    for wanted in (
        "mean of an episode", "gain, points", "validation difference, points",
        "test accuracy grown", "validation accuracy of the twin", "parameters added",
        "seeds germinated", "seeds fossilised", "seeds pruned", "environment steps per second",
        "finished after", "too early", f"run directory: {tmp_path}",
    ):  # fmt: skip
        assert wanted in text, wanted


FLAGS = [word for k, v in SMALL.items() for word in (f"--{k.replace('_', '-')}", str(v))]
RUN = {
    "train ppo": [*FLAGS, "--rounds", "2", "--record", "--name", "run"],
    "train imitation": ["--records", "runs/run", "--epochs", "2", "--threads", "1"],
    "train offline": ["--records", "runs/run", "--epochs", "2", "--threads", "1"],
    "play": ["runs/cart", "--episodes", "2"],
    "grow --model": ["mine.py", "--policy", "never", "--epochs", "2", "--out", "out"],
    "grow --task": ["digits_shift", "--policy", "rule", "--out", "grown.pt2"],
    "report": ["runs/run", "-o", "report.html"],
    "query": ["runs", "SELECT count(*) FROM records"],
    "runs": ["runs"],
    "replay": ["refused.pt"],
    "tasks check": ["mine.py:model"],
}
"""A command line of each command, in an order in which each has the files of the one before."""
ELSEWHERE = {"evaluate"}
"""Its laboratory's tests follow it."""
AT_ONCE = {"policies", LIVE}
"""A list of few lines, and what shows everything itself."""


def test_every_command_says_what_it_does(tmp_path: Path, monkeypatch, capsys) -> None:
    learning = {f"train {a.name}" for a in algorithms().values() if a.from_records}
    assert learning <= RUN.keys()
    assert {line.split()[0] for line in RUN} == COMMANDS.keys() - ELSEWHERE - AT_ONCE
    begun: list[str] = []

    def new_phase(description: str, *arguments: Any) -> Phase:
        begun.append(description)
        return Phase(description, *arguments)

    monkeypatch.setattr(phases, "Phase", new_phase)
    monkeypatch.setattr(grown_files, "_write_programs", lambda *_: {})
    monkeypatch.setattr(watched, "report_ended", lambda *_: None)
    # A refused update needs a run that diverges.
    monkeypatch.setattr(replay, "replay_file", lambda _: ReplayResult(1, "loss", "loss"))
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)
    small = {"envs": 2, "rollout_steps": 8, "lstm_hidden": 8, "rounds": 1, "name": "cart"}
    train_ppo_vectorized(gym="CartPole-v1", telemetry_dir="runs", **small)
    for command, arguments in RUN.items():
        begun.clear()
        assert esper([*command.split(), *arguments]) == 0, command
        # The first one is the command, before it says what it does.
        assert begun[1:], command


def test_a_line_tells_the_time_that_the_rest_takes(monkeypatch) -> None:
    clock = [104.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with phase("drawing", 6, "sections") as drawing:
        drawing.begin = 100.0
        assert drawing.line() == "drawing: 4 s so far"
        drawing.advance(2)
        for clock[0], seconds in ((104.0, 8), (107.0, 5), (108.0, 4), (116.0, 8)):  # it is late
            assert drawing.line() == f"drawing: 2 of 6 sections, about {seconds} s remain"
        drawing.begin -= 3600  # as long again for each of four more
        assert drawing.line() == "drawing: 2 of 6 sections, about 1 h 59 min remain"
        drawing.advance(4)
        assert drawing.line() == "drawing: 6 of 6 sections, about 0 s remain"


def test_durations_have_two_units() -> None:
    assert [duration(s) for s in (0, 59.4, 61, 3600, 90_000)] == [
        "0 s", "59 s", "1 min 1 s", "1 h 0 min", "1 d 1 h",
    ]  # fmt: skip


def test_the_innermost_phase_is_the_current_one() -> None:
    assert current_phase() is None
    with phase("outer") as outer:
        seen = [current_phase().done for _ in track([1, 2, 3], "inner", "items")]
        assert current_phase() is outer
    assert (seen, current_phase()) == ([0, 1, 2], None)


@pytest.mark.parametrize(("live", "since"), [(True, 0.0), (False, math.inf)])
def test_no_line_where_another_display_tells_it(live: bool, since: float, monkeypatch) -> None:
    for name in ("PATIENCE", "INTERVAL", "POLL"):
        monkeypatch.setattr(progress_lines, name, 0.0005)
    lines: list[str] = []
    with progress_lines.progress_lines("esper train", lines.append):
        while not lines:
            time.sleep(0.001)
        with phase("training", live=live) as training:
            training.last_line = since
            time.sleep(0.01)
            lines.clear()
            time.sleep(0.05)
            assert lines == []
