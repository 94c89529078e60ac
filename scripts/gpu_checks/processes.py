"""Each section is measured in a process of its own, which may crash, hang or be cut.

An error on a GPU often leaves its process without a usable device; the next section needs one.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpu_checks.files import write_json
from gpu_checks.paths import ROOT
from gpu_checks.place import Row, entered
from gpu_checks.section import Section

POLL_SECONDS = 0.2
MAX_TEXT = 8000
"""Last characters of what a process printed that are kept."""


@dataclass
class Outcome:
    """What became of a section.

    Attributes:
        status: ``done``, ``failed``, ``cut`` by the time, ``skipped``, or ``running``.
        seconds: how long it took.
        rows: what it measured.
        error: traceback of the section; those of single rows stand in the rows.
        printed: the end of what its process printed.
        missing: modules for want of which it was skipped.
    """

    status: str = "running"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    error: str | None = None
    printed: str = ""
    missing: list[str] = field(default_factory=list)


def measure(section: Section, virtual: bool, file: Path) -> int:
    """Measure a section in this process into ``file``, row by row; return its exit status."""
    rows: list[Row] = []
    try:
        with entered(virtual) as place:
            for row in section.measure(place):
                rows.append(row)
                write_json(file, {"rows": rows})
    except (Exception, SystemExit):
        write_json(file, {"rows": rows, "error": traceback.format_exc()})
        return 1
    return 1 if any("error" in row for row in rows) else 0


def measured(
    section: Section,
    virtual: bool,
    limit: float | None,
    folder: Path,
    progress: Callable[[Outcome], None],
) -> Outcome:
    """Measure a section in a process of its own.

    Args:
        section: the section.
        virtual: whether it is measured on the virtual device.
        limit: seconds after which the process is ended; None for no limit.
        folder: where it writes.
        progress: is called with what there is so far whenever there is more.
    """
    file, log = folder / f"{section.name}.json", folder / f"{section.name}.txt"
    script = str(ROOT / "scripts" / "gpu_check.py")
    command = [sys.executable, script, "--measure", section.name, "--into", str(file)]
    outcome, begin = Outcome(), time.monotonic()
    with log.open("w") as printed:
        process = subprocess.Popen(
            command + ["--virtual"] * virtual,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (status := process.poll()) is None:
                time.sleep(POLL_SECONDS)
                outcome.seconds = time.monotonic() - begin
                if _updated(outcome, file):
                    progress(outcome)
                if limit is not None and outcome.seconds > limit:
                    break
        finally:
            _end(process)
    _updated(outcome, file)
    outcome.printed = log.read_text(errors="replace")[-MAX_TEXT:]
    outcome.status = "cut" if status is None else "failed" if status else "done"
    if status and outcome.error is None and not any("error" in row for row in outcome.rows):
        outcome.error = f"the process ended with {status}:\n{outcome.printed}"
    return outcome


def _updated(outcome: Outcome, file: Path) -> bool:
    """Take over what the process has written; return whether there is more than before."""
    if not file.exists():
        return False
    content = json.loads(file.read_text())
    more = len(content["rows"]) > len(outcome.rows)
    outcome.rows, outcome.error = content["rows"], content.get("error")
    return more


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and those that it started, which belong to its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
