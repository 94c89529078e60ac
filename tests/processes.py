"""Commands: in processes of their own with the Esper of this repository, or called in this one."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from esper.scripts.entry import run_guarded
from esper.scripts.main import esper

ROOT = Path(__file__).parents[1]
ESPER = [sys.executable, "-m", "esper.scripts.main"]
WATCHDOG = 1200.0
"""Seconds after which a test gives up on what hangs. No test depends on how fast anything is."""


def environment(**more: str) -> dict[str, str]:
    """The variables of such a process."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}


def ran(
    command: list[str], where: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, in whatever way, with its output."""
    return subprocess.run(
        command, cwd=where, env=environment(**variables), capture_output=True, text=True,
        timeout=WATCHDOG, check=False,
    )  # fmt: skip


def ran_python(
    code: str, *arguments: str, where: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The same of a program in Python."""
    return ran([sys.executable, "-c", code, *arguments], where, **variables)


def refusal(
    capsys: Any, command: Callable[[list[str]], int], *arguments: str, prints: bool = False
) -> str:
    """The one line on stderr with which a command refuses what it is given.

    It prints nothing else, unless ``prints`` says that it had begun to work.
    """
    assert run_guarded(command, list(arguments)) == 2, arguments
    out, err = capsys.readouterr()
    assert prints or out == "", out
    assert err.startswith("esper: "), err
    assert err.count("\n") == 1, err
    return err


def called(
    arguments: list[str], where: Path, command: Callable[[list[str]], int] = esper
) -> subprocess.CompletedProcess[str]:
    """The same without a process, which saves the seconds in which one imports torch."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    )
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with contextlib.chdir(where), streams[0], streams[1]:
        try:
            code = run_guarded(command, arguments)
        except SystemExit as exit:
            code = int(exit.code or 0)
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(arguments, code, *texts)
