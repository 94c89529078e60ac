"""The tutorial works: its files, commands and Python blocks in order, on smaller runs."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from esper.runtime import plugins
from esper.runtime.tasks import SUITES, TASKS
from esper.scripts.main import esper
from support import own_blueprints

TUTORIAL = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = {"envs": 4, "rounds": 1, "group_size": 2, "episode_length": 4, "max_batches": 1} | {
    "lstm_hidden": 8,
    "minibatches": 2,
    "threads": 1,
}
"""Sizes of the runs here, in the place of those on the page."""


def blocks() -> list[tuple[str, str, str]]:
    """Language, file name and text of each block that is not output."""
    return [found for found in BLOCK.findall(TUTORIAL) if found[0] != "text"]


def smaller(words: list[str]) -> list[str]:
    """A training command with sizes that take a second."""
    for name, value in SMALL.items():
        flag = "--" + name.replace("_", "-")
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
        words += [flag, str(value)]
    return words


@contextmanager
def fresh_process(monkeypatch) -> Iterator[None]:
    """What a command registers is gone after it, as when each has a process of its own."""
    before = [(register, dict(register)) for register in (TASKS, SUITES)]
    with own_blueprints(), monkeypatch.context() as patch:
        patch.setattr(plugins, "_modules", {})
        yield
    for register, content in before:
        register.clear()
        register.update(content)


def test_the_page_has_blocks_of_every_kind() -> None:
    kinds = [(language, bool(file)) for language, file, _ in blocks()]
    assert kinds.count(("bash", False)) == 9
    assert kinds.count(("python", True)) == 2
    assert kinds.count(("python", False)) == 2
    assert TUTORIAL.count("\n```") == 2 * len(BLOCK.findall(TUTORIAL))


@pytest.mark.slow
def test_every_block_of_the_page_works(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run = ""
    for language, file, text in blocks():
        if file:
            Path(file).write_text(text)
            continue
        with fresh_process(monkeypatch):
            if language == "python":
                exec(re.sub(r"rounds=\d+, envs=\d+", "**SMALL", text), {"SMALL": SMALL})
                continue
            program, *words = shlex.split(text.replace("runs/RUN", run))
            assert program == "esper", text
            assert esper(smaller(words) if words[0] == "train" else words) == 0, text
        run = run or (f"runs/{next(Path('runs').iterdir()).name}" if Path("runs").exists() else "")
    told = capsys.readouterr().out
    for part in ("slots    r0c0 r0c1", "report.html", "faint_digits fits", "wrote faint.pt2"):
        assert part in told
    assert "tensor(" in told
    assert "finished runs" in told
    assert {path.name for path in tmp_path.iterdir()} == {
        *("runs", "report.html", "model.pt2", "two_layers.py", "faint_digits.py", "faint.pt2")
    }
