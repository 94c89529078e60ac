"""Readers in tight loops beside what writes: none fails, none is in the way."""

import os
import random
import signal
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from esper.karn.grown_runs import inspect_either, is_grown, is_run_or_grown, read_growth
from esper.karn.queries import RECORD_VIEWS, Store
from esper.karn.report.gather import RunData
from esper.karn.sanctum.log import EventLog
from esper.karn.views import VIEWS
from esper.leyline.errors import UsageError
from torture.cases import NO_MORE, Case, begun, called, cases, printed
from torture.common import Part, quiet, timed

ROUNDS, TIMES = 6, 8


def _folders(place: Path) -> list[Path]:
    """Runs and grown networks, at any depth at which a command leaves them."""
    depths = (place.glob(pattern) for pattern in ("*", "*/*", "*/*/*", "*/*/*/*"))
    return [path for paths in depths for path in paths if is_run_or_grown(path)]


def _runs(place: Path) -> None:
    for folder in _folders(place):
        inspect_either(folder)


def _report(place: Path) -> None:
    for folder in _folders(place):
        if is_grown(folder):
            read_growth(folder)
        else:
            RunData(folder)


def _query(place: Path) -> None:
    """One query of each view, those of records included, which a live run removes again."""
    with Store(_folders(place)) as store:
        for view in (*VIEWS, *RECORD_VIEWS):
            store.query(f"SELECT count(*) FROM {view}").to_pylist()


def _sanctum(place: Path) -> None:
    for folder in _folders(place):
        log = EventLog(folder)
        for _ in range(20):
            if not log.poll() and not log.behind:
                break


READERS = (_runs, _report, _query, _sanctum)


def _loop(place: Path, pipe: Any, seed: int) -> None:
    """Read until told to stop; then tell the number of calls and what went wrong."""
    draws, calls, failures = random.Random(seed), Counter[str](), list[str]()
    with quiet():
        while not pipe.poll():
            reader = draws.choices(READERS, (6, 2, 1, 6))[0]
            calls[reader.__name__] += 1
            try:
                reader(place)
            except UsageError as error:
                if "\n" in str(error):
                    failures.append(str(error)[:300])
            except Exception as error:
                failures.append(f"{reader.__name__}: {type(error).__name__}: {str(error)[:300]}")
    pipe.send((dict(calls), failures))


def _saves(place: Path) -> set[Path]:
    """The checkpoints of all runs."""
    return set(place.glob("*/checkpoints/[0-9]*"))


def _wait_for_save(place: Path, seconds: float = 30.0) -> None:
    """Wait for another checkpoint: a run without one can only be begun anew."""
    before, end = _saves(place), time.monotonic() + seconds
    while _saves(place) <= before and time.monotonic() < end:
        time.sleep(0.05)


def beside(work: Path, count: int = 5_000) -> Part:
    """Train, kill and resume a run while a process reads it all the time."""
    from killed_training import Training, flags, pause

    from torture.common import TINY

    part = Part("calls of readers beside a live, saving, resuming run")
    with timed(part):
        place, draws = work / "runs", random.Random(2)
        place.mkdir(parents=True)
        context = get_context("spawn")
        resumes = refused = number = 0
        while part.tried < count:
            pipe, end = context.Pipe()
            reader = context.Process(target=_loop, args=(place, end, number))
            reader.start()
            for _ in range(25):
                number += 1
                runs = [p for p in place.iterdir() if list(p.glob("checkpoints/[0-9]*"))]
                log = work / f"{number}.log"
                if not runs or number % ROUNDS == 1:
                    settings = {"telemetry_dir": place, "rounds": 999, "events_megabytes": 1}
                    settings |= {"record": True, "record_last": 1}
                    training = Training(flags(**TINY, **settings), log)
                else:
                    training = Training(flags(resume=runs[-1], rounds=999), log)
                    resumes += 1
                if training.wait_for("started"):
                    _wait_for_save(place)
                    pause(draws.uniform(0.0, 1.5))
                    os.kill(
                        training.process.pid or 0, draws.choice((signal.SIGKILL, signal.SIGTERM))
                    )
                code = training.end()
                if code == 2:
                    refused += 1
                    part.lost.append(f"refused: {training.printed()[:300]}")
                elif code not in (-9, -15, 143):
                    part.lost.append(f"exit status {code}: {training.printed()[-300:]}")
            pipe.send(None)
            calls, failures = pipe.recv()
            reader.join()
            part.tried += sum(calls.values())
            part.lost += failures[:20]
        part.notes = f"{number} processes trained, {resumes} of them resumed, {refused} refused"
    return part


def beside_others(work: Path) -> Part:
    """Run, kill and rerun each other command that writes a run, while a process reads."""
    part = Part("calls of readers beside imitation, offline, `--seeds` and `grow`")
    outcomes: Counter[str] = Counter()
    with timed(part):
        others = ("imitation", "offline", "seeds", "grow")
        for case in [case for case in cases(work) if case.name in others]:
            place = work / case.name
            place.mkdir()
            context = get_context("spawn")
            pipe, end = context.Pipe()
            reader = context.Process(target=_loop, args=(place, end, 0))
            reader.start()
            for number in range(TIMES):
                folder = place / str(number)
                folder.mkdir()
                problem = _killed_and_rerun(case, folder, number / TIMES, work / "log")
                part.lost += [f"{case.name} {number}: {problem}"] if problem else []
            pipe.send(None)
            calls, failures = pipe.recv()
            reader.join()
            part.tried += sum(calls.values())
            part.lost += failures[:20]
            outcomes[case.name] += sum(calls.values())
        part.notes = ", ".join(f"{count:,} beside {what}" for what, count in outcomes.items())
    return part


def _killed_and_rerun(case: Case, folder: Path, share: float, log: Path) -> str:
    """What is wrong with a command that is killed after about a share of its time, and rerun."""
    process = begun(case.first(folder), log)
    process.join(share * 6.0)
    process.kill()
    process.join()
    status, output = called(case.rerun(folder), log)
    ended = not status or NO_MORE in output
    return "" if ended and "Traceback" not in printed(log) else f"status {status}: {output[-300:]}"
