"""Commands on a filesystem that is too small, in steps of 4 kB from nothing to what they need.

A command begins anew in each size, and its rerun with room must end as if nothing had happened. An
evaluation, which takes minutes, goes on in each larger size with what the smaller one left.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torture.cases import Case, called, cases
from torture.common import Part, timed

STEP, ROOM = 4096, 64 << 20
ENDED = 5
"""How many sizes in a row must suffice before a larger one is not tried."""


@contextlib.contextmanager
def filesystem(place: Path) -> Iterator[Path]:
    """A mounted filesystem of 64 MiB; only root may mount one."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "esper", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(place: Path, option: str) -> None:
    """Change an option of the filesystem: ``ro``, ``rw``, or ``size=`` and the bytes it holds."""
    subprocess.run(["mount", "-o", f"remount,{option}", place], check=True)


def used(place: Path) -> int:
    """Bytes that the filesystem holds."""
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def small_disk(work: Path) -> Part:
    """Sweep the filesystem of every writing command; the rerun ends as if nothing had happened."""
    part = Part(f"filesystems from 0 in steps of {STEP // 1024} kB")
    outcomes: Counter[str] = Counter()
    with timed(part):
        if os.geteuid():
            part.lost.append("only root may mount a filesystem")
            return part
        with filesystem(work / "disk") as disk:
            for case in cases(work):
                _sweep(case, disk, work, part, outcomes)
        part.notes = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    return part


def _sweep(case: Case, disk: Path, work: Path, part: Part, outcomes: Counter[str]) -> None:
    log, whole = work / f"{case.name}.log", work / f"{case.name}-whole"
    _fill(disk, case)
    status, output = called(case.first(disk), log)
    if status:
        raise AssertionError(f"{case.name} fails with room: {output[-500:]}")
    shutil.copytree(disk, whole)
    _fill(disk, case)
    ended = 0
    for room in itertools.count(used(disk) + STEP, STEP):
        if not case.continues:
            _fill(disk, case)
        remount(disk, f"size={room}")
        before = contents(disk)
        status, output = called(case.first(disk), log)
        part.tried += 1
        problem = ""
        if "Traceback" in output or status not in (0, 1, 2):
            problem = f"status {status}: {output[-300:]}"
        elif status:
            changed = [path for path, content in before.items() if _content(path) != content]
            problem = f"{changed[0]} was replaced" if changed else ""
        remount(disk, f"size={ROOM}")
        whole_now = not status and not case.same(disk, whole)
        if not problem and not whole_now and not case.continues:
            status_again, output = called(case.rerun(disk), log)
            failed = status_again and f"the rerun ends with {status_again}: {output[-300:]}"
            problem = failed or case.same(disk, whole)
        outcomes[f"{case.name} {'ended' if not status else 'refused'}"] += 1
        part.lost += [f"{case.name} in {room} bytes: {problem}"] if problem else []
        ended = ended + 1 if whole_now else 0
        if ended == ENDED:
            return
        if room == ROOM:
            raise AssertionError(f"{case.name} never ends: {output[-500:]}")


def _fill(disk: Path, case: Case) -> None:
    remount(disk, f"size={ROOM}")
    case.fill(disk)


def contents(disk: Path) -> dict[Path, bytes]:
    """The files below a folder and what they hold."""
    return {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
