"""Esper without its laboratory: one clear line where it is asked for, and all else works."""

import shutil
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from esper.karn.report import write_report
from esper.leyline import laboratory
from esper.leyline.errors import UsageError
from esper.leyline.laboratory import find_part, part
from esper.runtime.tasks import find
from esper.scripts.main import esper

LACKS = "this installation lacks Esper's laboratory; pip install --force-reinstall"


RECORDED = Path(__file__).parents[1] / "recorded" / "healthy"


@pytest.fixture
def without_laboratory(monkeypatch):
    monkeypatch.setattr(laboratory, "entry_points", lambda **names: EntryPoints())
    find_part.cache_clear()
    yield
    find_part.cache_clear()


@pytest.mark.usefixtures("without_laboratory")
@pytest.mark.parametrize(
    "words",
    [["evaluate", "--policy", "never"], ["evaluate", "--help"], ["tasks", "--describe", "digits"]],
)
def test_commands_of_the_laboratory_say_that_it_is_missing(words: list[str]) -> None:
    with pytest.raises(UsageError, match=LACKS):
        esper(words)


@pytest.mark.usefixtures("without_laboratory")
def test_other_commands_need_no_laboratory(capsys) -> None:
    assert esper(["tasks", "digits"]) == 0
    assert "not measured" in capsys.readouterr().out
    assert esper(["--completion", "bash"]) == 0
    assert "--training-hosts" not in capsys.readouterr().out


@pytest.mark.usefixtures("without_laboratory")
def test_an_unknown_task_may_be_one_of_a_family() -> None:
    with pytest.raises(UsageError, match=f"there is no task 'unseen:3'.*{LACKS}"):
        find("unseen:3")


@pytest.mark.usefixtures("without_laboratory")
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_report_says_that_evaluations_are_not_shown(tmp_path: Path, evaluated: bool) -> None:
    run = shutil.copytree(RECORDED, tmp_path / "run")
    if evaluated:
        (run / "ladders").mkdir()
    page = write_report([run], tmp_path / "report.html").read_text()
    assert ("run: its evaluations are not shown, because this installation" in page) == evaluated


@pytest.mark.usefixtures("without_laboratory")
def test_a_missing_part_names_who_asked() -> None:
    with pytest.raises(UsageError, match=f"policy: schedule: {LACKS}"):
        part("library_actor", "policy: schedule")
