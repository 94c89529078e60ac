"""What is collected for a GPU without a package index."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def wheels(scripts_on_path: None) -> Any:
    return importlib.import_module("gpu_wheels")


def test_everything_but_torch_is_collected(wheels: Any) -> None:
    names = [line.partition(">")[0] for line in wheels.requirements("2.11.0")]
    assert {"tyro", "textual", "textual-plotext", "pytest", "hypothesis", "numpy"} <= set(names)
    assert "torch" not in names


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--torch", "2.1.0"], "--torch: Esper needs torch>=2.8"), (["--python", "312"], "--python:")],
)
def test_other_versions_are_refused_in_one_line(
    wheels: Any, monkeypatch, capsys, arguments: list[str], says: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        wheels.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_the_wheels_are_those_of_the_other_machine(
    wheels: Any, tmp_path, monkeypatch, capsys
) -> None:
    asked = []

    def pip(command: list[str], check: bool) -> Any:
        asked.extend(command)
        for name in ("tyro-1.0.17-py3-none-any.whl", "scipy-1.18.1-cp313-cp313-linux_x86_64.whl"):
            (tmp_path / name).write_bytes(b"x")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(wheels.subprocess, "run", pip)
    options = ["--python", "3.13", "--output", str(tmp_path), "--without", "SciPy"]
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", *options])
    assert wheels.main() == 0
    assert {"--python-version=3.13", "--platform=manylinux_2_28_x86_64"} <= set(asked)
    assert [path.name for path in tmp_path.iterdir()] == ["tyro-1.0.17-py3-none-any.whl"]
    assert "1 wheels" in capsys.readouterr().out
