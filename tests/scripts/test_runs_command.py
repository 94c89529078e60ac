"""``esper runs`` and ``esper report`` as a user types them."""

import json
import re
import time
from pathlib import Path

import pytest

from esper.karn.runs import find_runs, run_lock
from esper.scripts import runs as module
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from processes import refusal
from run_directories import finished, recorded_run, started, whole_round, write_run

DAY = 86400.0


def run_command(capsys, *arguments: object) -> tuple[int, str, str]:
    """Run a command; return exit status, stdout and stderr."""
    code = run_guarded(esper, [str(argument) for argument in arguments])
    return code, *capsys.readouterr()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three finished runs from 3, 2 and 1 days ago, and one that failed yesterday."""
    for days in (3, 2, 1):
        when = time.time() - days * DAY
        events = [started(1, time=when), *whole_round(1)]
        for event in events[1:]:
            event.time = when
        end = finished(1)
        end.time = when
        write_run(tmp_path / f"run-{days}", [*events, end], rounds=1)
    write_run(tmp_path / "broken", [started(time=time.time() - DAY)])
    return tmp_path


def names(place: Path) -> set[str]:
    return {run.name for run in find_runs(place)}


def test_the_list_shows_each_run_with_its_status(place: Path, capsys) -> None:
    cut = write_run(place / "cut", [started(9), *whole_round(1)], rounds=9)
    (cut / "checkpoints" / "000001").mkdir(parents=True)
    (cut / "checkpoints" / "000001" / "manifest.json").touch()
    code, out, _ = run_command(capsys, "runs", place)
    assert code == 0
    assert re.search(
        r"^ *run +status +rounds +gain +validation +policy +task +started +disk *$", out, re.M
    )
    assert len(re.findall(r"run-\d +✓ finished +1/1 +\+1\.0 +\+0\.0 +ppo +a<b", out)) == 3
    assert re.search(r"broken +✗ failed +0/3 +-", out)
    assert re.search(r"cut +‖ interrupted +1/9", out)
    assert f"esper train ppo --resume {cut} --rounds 9" in out


def test_a_narrow_terminal_shows_the_names_of_runs_and_tasks(
    place: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(place)
    write_run(place / "cut-in-the-middle", [started(9), *whole_round(1)], rounds=9)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, coloured, _ = run_command(capsys, "runs", ".")
        assert code == 0
        out = re.sub(r"\x1b\[[\d;]*m", "", coloured)
        assert max(map(len, out.partition("validation, ")[0].splitlines())) <= columns
        assert re.search(r"cut-in-the-middle +‖ interrupted +1/9 +\+1.0 +a<b", out)
        assert "validation, policy, started, disk: in a terminal of 110" in out
    monkeypatch.setenv("COLUMNS", "120")
    assert "disk: in a terminal" not in run_command(capsys, "runs", ".")[1]


def test_json_lists_the_runs(place: Path, capsys) -> None:
    code, out, _ = run_command(capsys, "runs", "--json", place)
    assert code == 0
    listed = {Path(run["path"]).name: run for run in json.loads(out)}
    assert listed.keys() == names(place)
    assert listed["run-1"]["status"] == "finished"
    assert listed["run-1"]["gain"] == pytest.approx(1.0)
    assert listed["run-1"]["validation_gain"] == pytest.approx(0.0)
    assert listed["broken"]["gain"] is None


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (("--keep", "2"), {"run-1", "broken"}),
        (("--older-than", "1.5"), {"run-1", "broken"}),
        (("--failed",), {"run-1", "run-2", "run-3"}),
        (("--keep", "0"), set()),
        (("--keep", "9"), {"run-1", "run-2", "run-3", "broken"}),
    ],
)
def test_prune_removes_the_runs_that_the_rule_selects(
    place: Path, capsys, rule: tuple[str, ...], left: set[str]
) -> None:
    code, out, _ = run_command(capsys, "runs", "prune", place, *rule, "--yes")
    assert code == 0
    assert names(place) == left
    assert out.count("removed ") == 4 - len(left)


def test_prune_shows_the_runs_and_asks(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(module.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    for answer, code, left in (("", 1, 4), ("n", 1, 4), ("y", 0, 1)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        done, out, _ = run_command(capsys, "runs", "prune", place, "--keep", 1)
        assert done == code
        assert "run-3" in out
        assert len(names(place)) == left


def test_without_a_terminal_prune_needs_yes(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(module.sys, "stdin", type("Pipe", (), {"isatty": lambda self: False})())
    code, _, err = run_command(capsys, "runs", "prune", place, "--keep", 1)
    assert code == 2
    assert "--yes" in err
    assert len(names(place)) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("runs nowhere", "DIR"), ("runs a b", "one directory"), ("runs --jsn", "--json"),
        ("runs prune", "--keep"), ("runs prune --keep 1 --failed", "--keep"),
        ("runs prune --keep -1", "keep"), ("runs prune --keep two", "keep"),
        ("runs prune --older-than nan", "older_than"), ("report", "run directories"),
        ("report nowhere", "run:"), ("report run -o", "output"),
        ("report run -o nowhere/report.html", "output"), ("report run -o .", "output"),
        ("report run run", "twice"), ("report run --outptu x", "--output"), ("report run -x", "-x"),
    ],
)  # fmt: skip
def test_a_usage_error_is_one_line_and_exit_status_2(
    tmp_path: Path, capsys, monkeypatch, arguments: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = recorded_run(tmp_path / "run", 1)
    before = sorted(tmp_path.rglob("*"))
    assert says in refusal(capsys, esper, *arguments.split())
    assert sorted(tmp_path.rglob("*")) == before
    assert find_runs(tmp_path) == [run]


def test_report_writes_the_file_it_names(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorded_run(tmp_path / "run", 1)
    assert run_command(capsys, "report", "run", "-o", "x.html")[:2] == (0, "x.html\n")
    assert run_command(capsys, "report", "--output=y.html", "--", "run")[:2] == (0, "y.html\n")
    assert Path("x.html").read_bytes() == Path("y.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.html", "y.html"]


def test_prune_leaves_a_running_run_alone(place: Path, capsys) -> None:
    with run_lock(place / "run-3"):
        code, out, _ = run_command(capsys, "runs", "prune", place, "--keep", 0, "--yes")
        assert re.search(r"run-2 +✓ finished", out)
        assert "run-3" not in out
    assert code == 0
    assert names(place) == {"run-3"}


def test_a_time_that_no_calendar_has_is_a_dash(tmp_path: Path, capsys) -> None:
    write_run(tmp_path / "odd", [started(1, time=1e300), *whole_round(1)])
    assert run_guarded(esper, ["runs", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "odd" in line]
    assert re.search(r"ppo +a<b +- +\d", line), line
