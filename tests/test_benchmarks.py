"""Benchmarks and scripts: each can be imported and explains itself; pages come from the figures."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "scripts")
    for path in (ROOT / folder).glob("*.py")
    if "__main__" in path.read_text()
)


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a script of either folder is started."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("scripts", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


@pytest.mark.usefixtures("on_path", "scratch_register")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_imported_and_explains_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if path.name == "gym_speed.py":
        pytest.importorskip("sb3_contrib")
    module = importlib.import_module(path.stem)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 0
    first = module.__doc__.splitlines()[0]
    assert first in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("on_path")
def test_a_page_is_written_with_its_command_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import reporting
    from runs import Mean

    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/one.py", "--write"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    body = reporting.table(("a", "b"), [(1, Mean(0.5, 0.01))])
    reporting.publish("one", "One", [body], write=False)
    assert not list(tmp_path.iterdir())
    reporting.publish("one", "One", [body], write=True, figures=[Mean(0.5, 0.01)])
    assert (tmp_path / "one.md").read_text() == (
        "# One\n\n`OMP_NUM_THREADS=1 python benchmarks/one.py --write`\n\n"
        "| a | b |\n|---|---|\n| 1 | +50.0 ± 1.0 |\n"
    )
    assert json.loads((tmp_path / "one.json").read_text()) == [{"value": 0.5, "error": 0.01}]


@pytest.mark.usefixtures("on_path")
def test_what_was_made_once_is_kept(tmp_path: Path) -> None:
    from reporting import kept

    assert kept(tmp_path / "deep" / "a.json", lambda: {"x": 1}) == {"x": 1}
    assert kept(tmp_path / "deep" / "a.json", lambda: {"x": 2}) == {"x": 1}
