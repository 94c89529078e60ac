"""A disk that is full, cannot be written or loses what was written."""

import errno
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from esper.leyline import disk
from esper.leyline.errors import UsageError
from esper.simic.run import checkpoint
from torture.cases import Case, begun, called, cases, clear, printed, problem_with
from torture.common import TINY, Part, differs, fresh, resumed, timed, trained
from torture.small_disk import contents, filesystem, remount

OFFSETS, REMOVALS = 40, 10
STOPS = (0.5, 0.8, 0.95)
"""Where a command is killed before the folder becomes read-only, as shares of its time."""


@contextmanager
def _room_for(size: int) -> Iterator[None]:
    """Within the context, files of checkpoints and settings have ``size`` bytes in all."""
    left = [size]

    def write(path: Path, content: bytes) -> None:
        kept, left[0] = content[: left[0]], left[0] - len(content)
        path.write_bytes(kept)
        if left[0] < 0:
            left[0] = 0
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with patch.object(disk, "write_synced", write), patch.object(checkpoint, "write_synced", write):
        yield


def full_disk(work: Path) -> Part:
    """Fill the disk at many places of a save; earlier checkpoints stay, and a later save works."""
    part = Part(f"disk full at {OFFSETS} places of a save")
    with timed(part):
        base = trained(work / "base", 2)
        size = sum(path.stat().st_size for path in (base / "checkpoints" / "000002").iterdir())
        reference = fresh(base, work / "reference")
        resumed(reference, 3)
        for number in range(OFFSETS):
            run = fresh(base, work / "full")
            before = {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
            room = (run / "config.json").stat().st_size + 2_000 + size * number // OFFSETS
            with _room_for(room):
                try:
                    resumed(run, 3)
                except UsageError as error:
                    part.lost.append(f"refused with {room} bytes: {error}")
            after = {path: path.read_bytes() for path in before if path.exists()}
            if after != before:
                part.lost.append(f"an earlier checkpoint changed with {room} bytes")
            if any(p.name.startswith(".draft") for p in (run / "checkpoints").iterdir()):
                part.lost.append(f"a draft is left with {room} bytes")
            resumed(run, 3)
            found = differs(run, reference)
            if found:
                part.lost.append(f"{found}, with {room} bytes")
            part.tried += 1
    return part


def not_writable(work: Path) -> Part:
    """Folders that cannot be written: one line, exit status 2, nothing changed."""
    part = Part("folders that cannot be written, new and with what a killed command has left")
    with timed(part):
        if os.geteuid():
            part.lost.append("only root may mount a filesystem")
            return part
        file = work / "file"
        file.touch()
        places = file, file / "below", Path("/proc/esper"), Path("/dev/null")
        with filesystem(work / "disk") as disk:
            for case in cases(work):
                log = work / f"{case.name}.log"
                for place in places:
                    problem = _refusal(case.first(place), log)
                    part.lost += [f"{case.name} in {place}: {problem}"] if problem else []
                if file.read_bytes():
                    part.lost.append(f"{case.name} wrote into {file}")
                case.fill(disk)
                begin = time.monotonic()
                called(case.first(disk), log)
                seconds = time.monotonic() - begin
                whole = fresh(disk, work / "whole")
                for fraction in (None, *STOPS):
                    case.fill(disk)
                    moment = None if fraction is None else fraction * seconds
                    problem = _read_only(case, disk, whole, log, moment)
                    part.lost += [f"{case.name} after {fraction}: {problem}"] if problem else []
                part.tried += len(places) + 1 + len(STOPS)
    return part


def _read_only(case: Case, disk: Path, whole: Path, log: Path, moment: float | None) -> str:
    """What is wrong with a command on a disk that cannot be written, and with its rerun.

    Args:
        case: the command.
        disk: where it writes.
        whole: what it leaves there undisturbed.
        log: file of its output.
        moment: seconds after which it is killed before; None for a disk on which it is new.
    """
    words = case.first(disk)
    if moment is not None:
        process = begun(words, log)
        process.join(moment)
        process.kill()
        process.join()
        words = case.rerun(disk)
    before = contents(disk)
    remount(disk, "ro")
    try:
        # What was finished before is only printed.
        problem = _refusal(words, log) if case.same(disk, whole) else ""
    finally:
        remount(disk, "rw")
    if contents(disk) != before:
        problem = problem or "files changed"
    if problem:
        return problem
    return problem_with(case, disk, whole, *called(case.rerun(disk), log))


def _refusal(words: list[str], log: Path) -> str:
    """What a command printed that ought to have been refused in one line; empty if it was."""
    status, output = called(words, log)
    # Before, progress may be told, and which of several seeds are finished.
    errors = [line for line in output.splitlines() if line.startswith("esper: ")]
    fits = status == 2 and len(errors) == 1 and "Traceback" not in output
    return "" if fits else f"status {status}: {output[-300:]}"


def removed(work: Path) -> Part:
    """Remove the run directory at ten points; the process ends by itself, without a traceback."""
    from killed_training import Training, flags

    part = Part(f"run directory removed at {REMOVALS} points")
    points = ("stepping", "updating", "save begins", "mkdir", "fsync", "rename")
    with timed(part):
        for number in range(REMOVALS):
            point, times = points[number % len(points)], 1 + number // len(points)
            folder = work / f"run-{number}"
            log = work / f"{number}.log"
            settings = {"telemetry_dir": folder, "rounds": 4}
            training = Training(flags(**TINY, **settings), log, (point,))
            for _ in range(times):
                training.wait_for(point)
                if _ + 1 < times:
                    training.proceed()
            for run in folder.iterdir():
                shutil.rmtree(run, ignore_errors=True)
            while training.process.is_alive():
                try:
                    training.proceed()
                except OSError:
                    break
                training.process.join(0.02)
            code, told = training.end(), training.printed()
            if code not in (0, 1) or "Traceback" in told:
                part.lost.append(f"{point}: {code} {told[-300:]}")
            part.tried += 1
    return part


def vanished(work: Path) -> Part:
    """Remove what each writing command has written so far; it ends without a traceback."""
    part = Part(f"what a command writes removed, {REMOVALS} times each (`evaluate` once)")
    draws, outcomes = random.Random(3), Counter[str]()
    folder = work / "disk"
    folder.mkdir()
    with timed(part):
        for case in cases(work):
            log, begin = work / f"{case.name}.log", time.monotonic()
            case.fill(folder)
            called(case.first(folder), log)
            seconds = time.monotonic() - begin
            for _ in range(1 if case.continues else REMOVALS):
                case.fill(folder)
                process = begun(case.first(folder), log)
                process.join(draws.uniform(0.1, 1.0) * seconds)
                clear(folder, beside_a_writer=True)
                process.join()
                output = printed(log)
                part.tried += 1
                outcomes[f"{case.name} {process.exitcode}"] += 1
                if process.exitcode not in (0, 1, 2) or "Traceback" in output:
                    part.lost.append(f"{case.name}: {process.exitcode} {output[-300:]}")
        part.notes = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    return part
