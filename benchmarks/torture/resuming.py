"""Signals at random moments to every command that writes files; a rerun ends in the same bits."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

from torture.cases import NO_MORE, Case, begun, called, cases, printed, problem_with
from torture.common import Part, timed

SIGNALS = (*3 * (signal.SIGKILL,), signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def resuming(work: Path, count: int = 15) -> Part:
    """Stop each command ``count`` times, a third of them again in its rerun.

    An evaluation plays its controls for a minute, so it is stopped a third as often.
    """
    part = Part(f"SIGKILL, SIGTERM, SIGINT and SIGHUP of each writing command, {count} times")
    outcomes: Counter[str] = Counter()
    with timed(part):
        for case in cases(work):
            number = count // 3 if case.name == "evaluate" else count
            _stop(case, work, number, part, outcomes)
        part.notes = ", ".join(f"{number} {what}" for what, number in sorted(outcomes.items()))
    return part


def _stop(case: Case, work: Path, count: int, part: Part, outcomes: Counter[str]) -> None:
    disk, whole, log = (work / f"{case.name}{suffix}" for suffix in ("", "-whole", ".log"))
    whole.mkdir()
    case.fill(whole)
    begin = time.monotonic()
    status, output = called(case.first(whole), log)
    seconds = time.monotonic() - begin
    if status:
        raise AssertionError(f"{case.name} fails: {output[-500:]}")
    draws = random.Random(case.name)
    for number in range(count):
        disk.mkdir(exist_ok=True)
        case.fill(disk)
        words = case.first(disk)
        for _ in range(1 + (number % 3 == 0)):
            what, status = _interrupted(
                words, draws.choice(SIGNALS), draws.uniform(0, seconds), log
            )
            part.tried += 1
            outcomes[f"{case.name} {'stopped' if status else 'ended'}"] += 1
            part.lost += [f"{case.name} {number}: {what}"] if what else []
            words = case.rerun(disk)
        status, output = called(words, log)
        problem = problem_with(case, disk, whole, status, output)
        part.lost += [f"{case.name} {number}: {problem}"] if problem else []
    shutil.rmtree(disk)


def _interrupted(
    words: list[str], number: signal.Signals, seconds: float, log: Path
) -> tuple[str, int]:
    """What went wrong with a command that gets a signal after some seconds; its exit status."""
    process = begun(words, log)
    process.join(seconds)
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)
    process.join()
    status, output = process.exitcode or 0, printed(log)
    if "Traceback" in output:
        return output[-300:], status
    fitting = status in (0, -number, 128 + number) or NO_MORE in output
    return "" if fitting else f"status {status}: {output[-300:]}", status
