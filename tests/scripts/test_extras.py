"""Without an extra of the distribution, one line names it, and training continues."""

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from esper.leyline.errors import UsageError
from esper.leyline.extras import LIBRARIES
from esper.own_models.growth_picture import draw
from esper.scripts import grown_files
from esper_lab import evaluate
from processes import ran
from small_runs import SMALL

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded" / "healthy"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HIDDEN = [*(name for names in LIBRARIES.values() for name in names), "tensorboard", "wandb"] + [
    "onnxruntime",
    "mnist1d",
]


COMMANDS = """
import json, sys
from pathlib import Path
sys.modules.update(dict.fromkeys(HIDDEN))
from processes import called

for name, arguments in json.loads(sys.argv[1]).items():
    Path(name).mkdir()
    done = called(arguments, Path(name))
    print(json.dumps([name, done.returncode, done.stderr]))
"""
NEEDS = "needs the library {}; pip install 'esper-growth[{}]'"
REFUSED: dict[str, tuple[list[str], str]] = {
    "report": (["report", str(RECORDED)], "report: " + NEEDS.format("jinja2", "report")),
    "sanctum": (["sanctum", str(RECORDED)], "sanctum: " + NEEDS.format("textual", "tui")),
    "watched": (["train", "ppo", "--sanctum"], "sanctum: " + NEEDS.format("textual", "tui")),
    "tracker": (
        ["train", "ppo", "--tensorboard"],
        "tensorboard: the library is not installed; pip install 'esper-growth[trackers]'",
    ),
    "onnx": (
        ["grow", "--task", "digits_shift", "--policy", "never", "--out", "m.pt2"]
        + ["--onnx", "m.onnx"],
        "onnx: " + NEEDS.format("onnx", "onnx"),
    ),
}


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory) -> tuple[Path, dict[str, list[Any]]]:
    """Run the commands in one process in which the libraries of all extras are missing.

    Returns:
        the directory with one for each command, and its exit status and standard error.
    """
    place = tmp_path_factory.mktemp("without")
    of_control = {k: v for k, v in SMALL.items() if k not in ("lstm_hidden", "minibatches")}
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in of_control.items()]
    run = ["train", "heuristic", "--rounds", "1", *(word for pair in pairs for word in pair)]
    commands = {name: arguments for name, (arguments, _) in REFUSED.items()} | {"run": run}
    tests = ROOT / "tests"
    done = ran(
        [sys.executable, "-c", f"HIDDEN = {HIDDEN}\n{COMMANDS}", json.dumps(commands)],
        place,
        PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{tests}",
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return place, {name: rest for name, *rest in answers}


def test_the_extras_declare_the_libraries() -> None:
    for extra, libraries in LIBRARIES.items():
        declared = {text.split(">=")[0].replace("-", "_") for text in EXTRAS[extra]}
        assert declared - {"onnxruntime"} == set(libraries)
    assert set(EXTRAS["all"][0].split("[")[1].rstrip("]").split(",")) >= set(LIBRARIES)


@pytest.mark.parametrize("command", REFUSED)
def test_one_line_names_the_extra(command: str, without_extras) -> None:
    place, answers = without_extras
    assert answers[command] == [2, f"esper: {REFUSED[command][1]}\n"]
    assert list((place / command).rglob("*")) == []


def test_a_run_ends_well_without_its_report(without_extras) -> None:
    place, answers = without_extras
    status, errors = answers["run"]
    assert status == 0, errors
    (line,) = errors.splitlines()
    assert line.startswith(
        "warning: report.html could not be written "
        "(report: needs the library jinja2; pip install 'esper-growth[report]'); the training in"
    )
    (run,) = (place / "run" / "runs").iterdir()
    assert (run / "events.jsonl").exists()


def test_pictures_are_left_out_with_a_line(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # What would be drawn is not looked at.
    assert evaluate._picture(None, Console(width=40)) == {}
    grown_files._draw(None, tmp_path)
    text = "needs the library matplotlib; pip install 'esper-growth[report]'"
    assert capsys.readouterr().out == f"no ladder.svg: {text}\nno growth.svg: {text}\n"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="plot: needs the library matplotlib"):
        draw([])
