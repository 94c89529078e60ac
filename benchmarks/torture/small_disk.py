"""Commands on a filesystem that is too small, in steps of 4 kB from nothing to what they need."""

import contextlib
import filecmp
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torture.common import TINY, Part, differs, timed, trained
from torture.seals import MODEL

STEP, ROOM = 4096, 64 << 20
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["esper.scripts.main", "esper_lab.evaluate", "sklearn.datasets"])


@dataclass(frozen=True)
class Case:
    """A command on the small filesystem.

    Attributes:
        name: of the command.
        words: its arguments; ``DISK`` stands for the filesystem.
        again: its arguments when it is called again with room, given the filesystem.
        same: what differs between the filesystem and that of an undisturbed command.
        content: what lies on the filesystem before, as name and path.
    """

    name: str
    words: list[str]
    again: Callable[[Path], list[str]]
    same: Callable[[Path, Path], str]
    content: tuple[tuple[str, Path], ...] = ()

    def arguments(self, words: list[str], disk: Path) -> list[str]:
        """The arguments for a filesystem."""
        return [word.replace("DISK", str(disk)) for word in words]


@contextlib.contextmanager
def filesystem(place: Path) -> Iterator[Path]:
    """A mounted filesystem of 64 MiB; only root may mount one."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "esper", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def resize(place: Path, room: int) -> None:
    """Let the filesystem hold ``room`` bytes."""
    subprocess.run(["mount", "-o", f"remount,size={room}", place], check=True)


def used(place: Path) -> int:
    """Bytes that the filesystem holds."""
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def called(words: list[str], log: Path) -> tuple[int, str]:
    """Exit status and output of a command in a process that has imported everything."""
    process = _CONTEXT.Process(target=_call, args=(words, log))
    process.start()
    process.join()
    return process.exitcode or 0, log.read_text(errors="backslashreplace")


def _call(words: list[str], log: Path) -> None:
    from esper.scripts.entry import run_guarded
    from esper.scripts.main import esper

    if words[0] == "train":
        # The report has a sweep of its own, and drawing takes longer than all of a tiny training.
        patch("esper.scripts.report.write_report", lambda runs, target: target).start()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        status = run_guarded(esper, words)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def small_disk(work: Path) -> Part:
    """Sweep the filesystem of every writing command; the rerun ends as if nothing had happened."""
    part = Part(f"filesystems from 0 in steps of {STEP // 1024} kB")
    outcomes: Counter[str] = Counter()
    with timed(part):
        if os.geteuid():
            part.lost.append("only root may mount a filesystem")
            return part
        with filesystem(work / "disk") as disk:
            for case in _cases(work):
                _sweep(case, disk, work, part, outcomes)
        part.notes = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    return part


def _sweep(case: Case, disk: Path, work: Path, part: Part, outcomes: Counter[str]) -> None:
    log, whole = work / f"{case.name}.log", work / f"{case.name}-whole"
    _fill(disk, case)
    begin = used(disk)
    status, output = called(case.arguments(case.words, disk), log)
    if status:
        raise AssertionError(f"{case.name} fails with room: {output[-500:]}")
    shutil.copytree(disk, whole)
    most = _peak(case, disk, begin)
    for room in range(begin + STEP, most + STEP, STEP):
        _fill(disk, case)
        resize(disk, room)
        before = _contents(disk)
        status, output = called(case.arguments(case.words, disk), log)
        part.tried += 1
        problem = ""
        if "Traceback" in output or status not in (0, 1, 2):
            problem = f"status {status}: {output[-300:]}"
        elif status:
            changed = [path for path, content in before.items() if _content(path) != content]
            problem = f"{changed[0]} was replaced" if changed else ""
        resize(disk, ROOM)
        if not problem:
            status_again, output = called(case.arguments(case.again(disk), disk), log)
            failed = status_again and f"the rerun ends with {status_again}: {output[-300:]}"
            problem = failed or case.same(disk, whole)
        outcomes[f"{case.name} {'ended' if not status else 'refused'}"] += 1
        part.lost += [f"{case.name} in {room} bytes: {problem}"] if problem else []


def _peak(case: Case, disk: Path, begin: int) -> int:
    """A size with which the command ends, at most 4 MiB above what it leaves."""
    left = used(disk)
    return max(left, begin) + min(left - begin, 4 << 20) + 16 * STEP


def _fill(disk: Path, case: Case) -> None:
    resize(disk, ROOM)
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, source in case.content:
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, disk / name)


def _contents(disk: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _cases(work: Path) -> Iterator[Case]:
    tiny = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    train = ["train", "ppo", *tiny, "--rounds=2", "--name=small", "--telemetry-dir=DISK/runs"]
    base = trained(work / "base", 2)
    yield Case("train", train, lambda disk: _resumed(train, disk), _same_run)
    model = work / "mine.py"
    model.write_text(MODEL)
    grow = ["grow", "--model", str(model), "--policy", "never", "--epochs", "2", "--out=DISK/out"]
    names = ("state_dict.pt", "rebuild.py", "model.pt2")
    yield Case("grow", grow, lambda _: grow, lambda a, b: _same_files(a / "out", b / "out", names))
    report = ["report", str(base), "--output=DISK/report.html"]
    old = work / "old.html"
    old.write_text("an earlier report")
    yield Case(
        "report", report, lambda _: report,
        lambda a, b: _same_files(a, b, ("report.html",)), (("report.html", old),),
    )  # fmt: skip
    query = ["query", str(base), "select * from steps", "--format=csv", "--output=DISK/steps.csv"]
    table = work / "old.csv"
    table.write_text("an,earlier,table\n")
    yield Case(
        "query", query, lambda _: query,
        lambda a, b: _same_files(a, b, ("steps.csv",)), (("steps.csv", table),),
    )  # fmt: skip
    flags = ["--policy=never", "--suite=digits", "--hosts=2", "--training-hosts=2", "--fresh"]
    flags += ["--out=DISK/evaluation", "--work=DISK/stages", "--threads=1"]
    evaluate = ["evaluate", *flags]
    yield Case("evaluate", evaluate, lambda _: evaluate, _same_evaluation)


def _resumed(train: list[str], disk: Path) -> list[str]:
    """The words that go on with the run if it has a checkpoint, or begin it again."""
    runs = disk / "runs"
    for run in runs.iterdir() if runs.exists() else ():
        if any(run.glob("checkpoints/[0-9]*")):
            return ["train", "ppo", f"--resume={run}", "--rounds=2"]
    shutil.rmtree(runs, ignore_errors=True)
    return train


def _same_run(disk: Path, whole: Path) -> str:
    runs = [next((place / "runs").iterdir()) for place in (disk, whole)]
    return differs(*runs)


def _same_files(disk: Path, whole: Path, names: tuple[str, ...]) -> str:
    _, wrong, errors = filecmp.cmpfiles(disk, whole, names, shallow=False)
    return f"{(wrong + errors)[0]} differs" if wrong or errors else ""


def _same_evaluation(disk: Path, whole: Path) -> str:
    def figures(place: Path) -> Any:
        (path,) = (place / "evaluation").glob("*.json")
        content = json.loads(path.read_text())
        return {name: value for name, value in content.items() if "second" not in name}

    return "" if figures(disk) == figures(whole) else "other figures"
