"""Find run directories and determine their state from their files alone."""

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from esper.leyline.config.algorithm import algorithms
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    EpisodeOutcome,
    PPOUpdateCompleted,
    TrainingFinished,
    TrainingStarted,
)
from esper.leyline.events.reader import EventReader
from esper.leyline.run_files import is_round

STATUSES: Final = ("running", "finished", "interrupted", "failed", "unknown")
"""``running``: a live process holds the run's lock. ``finished``: the run completed all its rounds.
``interrupted``: it ended earlier, by a signal or without a final event, and its completed rounds
are kept. ``failed``: its final event reports a failure, or it has no final event and completed no
round. ``unknown``: too little was recorded (``--telemetry-level off``)."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The state of a run.

    Attributes:
        path: its directory.
        status: one of ``STATUSES``.
        policy: ``ppo``, ``imitation``, ``heuristic`` and so on; None where it is unknown.
        tasks: names of the tasks it trains on.
        rounds_done: completed rounds.
        rounds_total: number of rounds in the settings; None where unknown.
        gain: test utility minus the twin's in the last completed round, in points; mean over
            environments. None where it is unknown, as in runs before schema 4.
        validation_gain: the same on the validation split.
        started: seconds since 1970; None where it is unknown.
        last_activity: time of the last event, else of the last checkpoint; seconds since 1970.
        bytes: total size of its files.
        resume: the command that resumes the run; None where it cannot be resumed.
    """

    path: Path
    status: str
    policy: str | None
    tasks: list[str]
    rounds_done: int
    rounds_total: int | None
    gain: float | None
    validation_gain: float | None
    started: float | None
    last_activity: float | None
    bytes: int
    resume: str | None


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory."""
    contents = ("events.jsonl", "checkpoints", "lock")
    try:
        return (path / "config.json").is_file() and any((path / n).exists() for n in contents)
    except OSError:
        return False  # not to be read by this user


def find_runs(path: Path, predicate: Callable[[Path], bool] = is_run) -> list[Path]:
    """List the directories of a kind at or below ``path``, oldest first. Links are not followed.

    Raises:
        UsageError: there is no such directory.
    """
    if not path.is_dir():
        raise UsageError(f"DIR: {path} is not a directory; name the directory of your runs")
    runs = []
    for folder, subfolders, _ in os.walk(path):
        if predicate(Path(folder)):
            runs.append(Path(folder))
            subfolders.clear()
    return sorted(runs, key=lambda run: (_start_time(run) or 0.0, run.name))


def inspect(run: Path) -> RunInfo:
    """Return the state of the run in directory ``run``. Its event file is read from the end."""
    settings = config_of(run).get("settings")
    settings = settings if isinstance(settings, dict) else {}
    first, tail = _first_start(run), _tail(run)
    checkpoint, checkpoint_time = _last_checkpoint(run)
    done = max(tail.done, checkpoint)
    total = round_count(settings.get("rounds"))
    status = _status(run, tail, done, total)
    # Runs of versions that had only PPO do not name their algorithm.
    algorithm = settings.get("algorithm", "ppo")
    resumable = status in ("interrupted", "failed") and checkpoint > 0
    resumable = resumable and algorithm in algorithms() and total is not None
    word = shell_word(str(run))
    files = settings.get("plugin")
    words = [shell_word(p) for p in files if isinstance(p, str)] if isinstance(files, list) else []
    # Said again on resuming, because it is executed.
    code = f" --plugin {' '.join(words)}" if words else ""
    gym = settings.get("gym")
    if isinstance(gym, str) and ":" in gym:
        code += f" --gym {shell_word(gym)}"
    return RunInfo(
        path=run,
        status=status,
        policy=first.policy if first else (str(algorithm) if checkpoint else None),
        tasks=first.tasks if first else _task_names(settings.get("task")),
        rounds_done=done,
        rounds_total=total,
        gain=tail.gain,
        validation_gain=tail.validation_gain,
        started=_start_time(run),
        last_activity=tail.time if tail.time is not None else checkpoint_time,
        bytes=disk_usage(run),
        resume=f"esper train {algorithm} --resume {word} --rounds {total}{code}"
        if resumable
        else None,
    )


def shell_word(text: str) -> str:
    """One word of a POSIX shell that stands for ``text``, itself printable.

    Control characters are written as in ``$'...'`` (POSIX 2024), so that a name can neither end
    the command nor change the terminal.
    """
    if text.isprintable():
        return shlex.quote(text)
    characters = (
        f"\\{c}"
        if c in "\\'"
        else c
        if c.isprintable()
        else "".join(f"\\{byte:03o}" for byte in os.fsencode(c))
        for c in text
    )
    return f"$'{''.join(characters)}'"


def config_of(run: Path) -> dict[str, Any]:
    """Return the content of ``config.json``; empty where it cannot be read."""
    try:
        content = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_running(run: Path, name: str = "lock") -> bool:
    """Whether a live process holds the lock of a run, its file ``name``.

    The system releases it when the process dies.

    A shared lock shows it; a process that begins to write waits for the moment in which readers
    hold theirs.
    """
    try:
        with (run / name).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the run's lock, so that no other process starts writing to the run.

    Raises:
        BlockingIOError: a process is writing to the run.
        OSError: the lock cannot be opened.
    """
    with (run / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def remove(run: Path) -> None:
    """Remove a run directory that no process is writing to.

    Raises:
        BlockingIOError: a process is writing to it.
        OSError: a file cannot be removed.
    """
    if not (run / "lock").exists():
        (run / "lock").touch()
    with run_lock(run):
        # config.json is deleted last: without it, `is_run` is false for the rest of the directory.
        for child in sorted(run.iterdir(), key=lambda child: child.name == "config.json"):
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
        run.rmdir()


@dataclass(slots=True)
class _Tail:
    """The end of an event file.

    Attributes:
        end: status that the last process wrote at its end; None where it wrote none.
        done: the last completed round.
        gain, validation_gain: mean gains of that round.
        time: time of the last event; None without any.
    """

    end: str | None = None
    done: int = 0
    gain: float | None = None
    validation_gain: float | None = None
    time: float | None = None


def _tail(run: Path) -> _Tail:
    """Read events from the end until the last completed round is found."""
    tail = _Tail()
    has_end, last_update = False, 0
    for event in EventReader(run).backwards():
        tail.time = event.time if tail.time is None else tail.time
        if isinstance(event, TrainingStarted | TrainingFinished) and not has_end:
            has_end = True
            tail.end = event.status if isinstance(event, TrainingFinished) else None
        if isinstance(event, PPOUpdateCompleted) and not last_update:
            last_update = event.round
        if isinstance(event, EpisodeOutcome):
            tail.done = event.round
            tail.gain, tail.validation_gain = _mean(event.gain), _mean(event.validation_gain)
            return tail
    # A run without outcomes learns from records, or a Gymnasium task: its updates are its rounds.
    tail.done = last_update
    return tail


def _status(run: Path, tail: _Tail, done: int, total: int | None) -> str:
    if is_running(run):
        return "running"
    if tail.end in STATUSES:
        return tail.end
    if done == 0:
        return "unknown" if tail.time is None else "failed"
    return "finished" if tail.time is None and done == total else "interrupted"


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _first_start(run: Path) -> TrainingStarted | None:
    """The run's first event; None if there is none, or if it is not ``TrainingStarted``."""
    try:
        _, event = next(iter(EventReader(run)))
    except (UsageError, StopIteration):
        return None
    return event if isinstance(event, TrainingStarted) else None


def _start_time(run: Path) -> float | None:
    """Time of the first event, else of ``config.json``, which is written first."""
    first = _first_start(run)
    if first is not None:
        return first.time
    try:
        return (run / "config.json").stat().st_mtime
    except OSError:
        return None


def _last_checkpoint(run: Path) -> tuple[int, float | None]:
    """The round of the last checkpoint and when it was written; 0 and None without one."""
    manifests = [
        path for path in run.glob("checkpoints/*/manifest.json") if is_round(path.parent.name)
    ]
    for manifest in sorted(manifests, key=lambda path: int(path.parent.name), reverse=True):
        # Training removes checkpoints that are too old meanwhile.
        with suppress(OSError):
            return int(manifest.parent.name), manifest.stat().st_mtime
    return 0, None


def disk_usage(run: Path) -> int:
    """Total size of the files of a run in bytes, without those that vanish meanwhile."""
    total = 0
    for folder, _, names in os.walk(run):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def round_count(value: Any) -> int | None:
    """A number of rounds in the settings, None if it is none."""
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if fits else None


def _task_names(task: Any) -> list[str]:
    return [str(name) for name in task] if isinstance(task, list) else [str(task)] if task else []
