"""Without an extra of the distribution, one line names it, and training goes on."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from esper.leyline.errors import UsageError
from esper.leyline.extras import LIBRARIES
from esper.scripts import evaluate, grown_files
from esper.simic.own_models.history import draw
from small_runs import SMALL

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded" / "healthy"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HIDDEN = [*(name for names in LIBRARIES.values() for name in names), "tensorboard", "wandb"] + [
    "onnx",
    "onnxruntime",
    "onnxscript",
    "mnist1d",
]


def esper(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process in which the libraries of all extras are missing."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({HIDDEN}))\n"
        "from esper_growth import main\n"
        "main()\n"
    )
    path = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def flags() -> list[str]:
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in SMALL.items()]
    return [word for pair in pairs for word in pair]


def test_the_extras_declare_the_libraries() -> None:
    for extra, libraries in LIBRARIES.items():
        declared = {text.split(">=")[0].replace("-", "_") for text in EXTRAS[extra]}
        assert declared == set(libraries)
    assert set(EXTRAS["all"][0].split("[")[1].rstrip("]").split(",")) >= set(LIBRARIES)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["report", str(RECORDED)],
            "esper: report: needs the library jinja2; pip install 'esper-growth[report]'",
        ),
        (
            ["sanctum", str(RECORDED)],
            "esper: sanctum: needs the library textual; pip install 'esper-growth[tui]'",
        ),
        (
            ["train", "ppo", "--sanctum"],
            "esper: sanctum: needs the library textual; pip install 'esper-growth[tui]'",
        ),
        (
            ["train", "ppo", "--tensorboard"],
            "esper: tensorboard: the library is not installed; "
            "pip install 'esper-growth[trackers]'",
        ),
        (
            ["grow", "--task", "digits_shift", "--policy", "never", "--out", "m.pt2"]
            + ["--onnx", "m.onnx"],
            "esper: onnx: needs the library onnx; pip install 'esper-growth[onnx]'",
        ),
    ],
    ids=["report", "sanctum", "watched", "tracker", "onnx"],
)
def test_one_line_names_the_extra(arguments: list[str], line: str, tmp_path: Path) -> None:
    found = esper(*arguments, cwd=tmp_path)
    assert (found.returncode, found.stderr) == (2, line + "\n")
    assert list(tmp_path.rglob("*")) == []


def test_a_run_ends_well_without_its_report(tmp_path: Path) -> None:
    found = esper("train", "heuristic", "--rounds", "1", *_control_flags(), cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    (line,) = found.stderr.splitlines()
    assert line.startswith(
        "warning: report.html could not be written "
        "(report: needs the library jinja2; pip install 'esper-growth[report]'); the training in"
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "events.jsonl").exists()


def _control_flags() -> list[str]:
    """The flags of a small run that does not learn."""
    words = flags()
    pairs = zip(words[::2], words[1::2], strict=True)
    return [w for pair in pairs for w in pair if pair[0] not in ("--lstm-hidden", "--minibatches")]


def test_pictures_are_left_out_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # What would be drawn is not looked at.
    assert evaluate._picture(None, Console()) == {}
    grown_files._draw(None, tmp_path)
    text = "needs the library matplotlib; pip install 'esper-growth[report]'"
    assert capsys.readouterr().out == f"no ladder.svg: {text}\nno growth.svg: {text}\n"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="plot: needs the library matplotlib"):
        draw([])
