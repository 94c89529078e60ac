"""The directory of a run: its settings, the lock of its single writer, and its files."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import uuid
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch

import esper
from esper.leyline.config import TrainConfig, flatten, unflatten
from esper.leyline.disk import lock_file, replace_synced, sync
from esper.leyline.errors import UsageError
from esper.leyline.events.parts import Part, parts_of, read_text, superseded_parts
from esper.runtime import plugins
from esper.runtime.tasks import SUITES
from esper.simic.run.identity import switches_on
from esper.simic.run.unusable_run import UnusableRun


def events_length(run: Path) -> int:
    """Bytes of all event lines so far, those of the parts included; 0 without events."""
    try:
        with (run / "events.jsonl").open("rb") as file:
            parts = parts_of(run, file)
            return (parts[-1].end if parts else 0) + file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        return 0


def cut_events(run: Path, length: int, done: int) -> None:
    """Remove the events after the first ``length`` bytes.

    Args:
        run: the run directory.
        length: ``events_length`` at the end of round ``done``.
        done: later lines about rounds up to this one are kept.

    Raises:
        OSError: a file cannot be read or written.
    """
    events = run / "events.jsonl"
    if not events.exists():
        return
    with events.open("rb") as file:
        for part in superseded_parts(run, file):
            part.path.unlink()
        parts = parts_of(run, file)
    # From the part that holds the last byte to keep on.
    tail = [part for part in parts if part.end >= length]
    start = tail[0].start if tail else parts[-1].end if parts else 0
    if tail:
        _reopen(run, tail)
    _cut(events, length - start, done)


def _reopen(run: Path, parts: list[Part]) -> None:
    """Move the lines of the last parts back to the event file.

    The file then begins with the first line of the first of them, by which readers know that they
    are to be left out until they are removed.
    """
    events, draft = run / "events.jsonl", run / "events.draft"
    with draft.open("wb") as file:
        for part in parts:
            file.write(read_text(part))
        with events.open("rb") as latest:
            shutil.copyfileobj(latest, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(events)
    sync(run)
    for part in reversed(parts):
        part.path.unlink(missing_ok=True)


def _cut(events: Path, length: int, done: int) -> None:
    with events.open("r+b") as file:
        start = min(length, events.stat().st_size)
        file.seek(max(start - 1, 0))
        cut_off = start > 0 and file.read(1) != b"\n"
        lines = [line for line in file if line.endswith(b"\n") and _round_of(line) <= done]
        file.seek(start)
        # Write before truncating: a process that dies in between leaves duplicate lines rather
        # than losing some, and the next resume removes the duplicates here.
        file.write(b"\n" * cut_off + b"".join(dict.fromkeys(lines)))
        file.truncate()


def _round_of(line: bytes) -> float:
    """The round of an event line, infinity if it cannot be read."""
    try:
        return float(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


_FINGERPRINT = (
    "esper",
    "git",
    "torch",
    "device_name",
    "backend",
    "threads",
    "plugins",
    "text_file",
    "gymnasium",
)
"""Fields of the fingerprint that can change the last bits of a result."""


class RunDirectory:
    """An open run directory; this process is its only writer until ``close``.

    Raises:
        UsageError: the directory cannot be written, or another process is writing to it.
    """

    def __init__(self, path: Path):
        self.path = path
        lock = path / "lock"
        self._made_lock = not lock.exists()
        try:
            self._lock = lock_file(lock)
        except BlockingIOError as error:
            raise UsageError(
                f"run directory: another process is writing to {path}; wait until it has ended"
            ) from error
        except OSError as error:
            raise UsageError(f"run directory: cannot write to {path} ({error.strerror})") from error

    @classmethod
    def create(
        cls, config: TrainConfig, fingerprint: dict[str, Any], more: dict[str, Any] | None = None
    ) -> Self:
        """Create ``<telemetry_dir>/<name>``, see ``create_directory``, and write the settings.

        Args:
            config: the settings.
            fingerprint: see ``machine_fingerprint``.
            more: what else ``config.json`` holds.

        Raises:
            UsageError: the directory cannot be created.
        """
        try:
            parent = directory_of_runs(config.output.telemetry_dir)
            path = create_directory(parent, config.output.name, config)
            content = {"id": uuid.uuid4().hex, "settings": flatten(config)}
            content |= {"fingerprint": fingerprint} | (more or {})
            directory = cls._begun(path, content)
            sync(parent)
        except UsageError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"telemetry_dir: cannot write to {config.output.telemetry_dir!r} ({reason}); "
                "choose another"
            ) from error
        return directory

    @classmethod
    def _begun(cls, path: Path, settings: dict[str, Any]) -> Self:
        """Lock the empty directory ``path`` and write its settings; on failure, remove it."""
        try:
            directory = cls(path)
            directory._write_settings(settings)
        except (OSError, UsageError):
            shutil.rmtree(path, ignore_errors=True)
            raise
        return directory

    @property
    def events(self) -> Path:
        """The event file."""
        return self.path / "events.jsonl"

    def events_length(self) -> int:
        """Bytes of all event lines so far, see ``event_lines``."""
        return events_length(self.path)

    def cut_events(self, length: int, done: int) -> None:
        """Remove the events of rounds after the checkpoint, because these rounds are run again.

        Args:
            length: ``events_length`` at the end of the checkpoint's round.
            done: number of rounds in the checkpoint; later lines about these rounds are kept.

        Raises:
            UsageError: the event file cannot be read or written.
        """
        try:
            cut_events(self.path, length, done)
        except OSError as error:
            raise UsageError(f"resume: cannot write {self.events} ({error.strerror})") from error

    def note_resume(
        self, config: TrainConfig, fingerprint: dict[str, Any], more: dict[str, Any] | None = None
    ) -> None:
        """Write the settings and the fingerprint of a process that resumes the run.

        Args:
            config, fingerprint, more: see ``create``.

        Raises:
            UsageError: they cannot be written; the stored ones stay.
        """
        path = self.path / "config.json"
        try:
            content = json.loads(path.read_text())
            content |= {"settings": flatten(config)} | (more or {})
            content.setdefault("resumed", []).append(fingerprint)
            self._write_settings(content)
        except OSError as error:
            raise UsageError(f"resume: cannot write {path} ({error.strerror})") from error

    def _write_settings(self, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2) + "\n"
        replace_synced(self.path / "config.json", text.encode())

    def close(self) -> None:
        """Release the lock, so that another process may write."""
        self._lock.close()

    def abandon(self) -> None:
        """Close the directory without having used it; a lock file created for it is removed."""
        if self._made_lock:
            (self.path / "lock").unlink(missing_ok=True)
        self.close()


def stored_config(run: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Settings and fingerprint of a run.

    Raises:
        UnusableRun: ``run`` is not a run directory, or its settings cannot be read.
    """
    path = run / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return unflatten(dict(content["settings"])), dict(content["fingerprint"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnusableRun(f"{run} is not a run directory (it has no config.json)") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnusableRun(f"{path} cannot be read ({error})", "give another run") from error


def stored_id(run: Path) -> str:
    """The random id of a run, by which its parts are recognised wherever it is copied.

    Raises:
        UsageError: ``config.json`` has none.
    """
    path = run / "config.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"id: {path} has none; put back the file as Esper wrote it") from error


def recorded_episodes(run: Path) -> int | None:
    """Number of recorded episodes from which the policy of a run learned; None if it acted.

    Raises:
        UsageError: ``config.json`` cannot be read, or does not give their number.
    """
    path = run / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return int(content["offline"]["episodes"]) if "offline" in content else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"offline: {path} does not give the number of episodes; put back the file as Esper "
            "wrote it"
        ) from error


def _label(config: TrainConfig) -> str:
    """A short name of what is trained: the suite, the tasks or the Gymnasium environment."""
    tasks = config.world.task
    if config.gymnasium.gym is not None:
        return re.sub(r"[^\w.-]", "-", config.gymnasium.gym)[:60]
    suites = (name for name, members in SUITES.items() if members == tasks)
    return next(suites, "-".join(tasks)[:60].replace(":", "-"))


def machine_fingerprint(device: torch.device, config: TrainConfig, backend: str) -> dict[str, Any]:
    """Everything on which a result depends, apart from the settings.

    Args:
        device: device of the hosts.
        config: resolved settings.
        backend: backend of the hosts, see ``GrowthEnv.backend_name``.
    """
    on_gpu = device.type == "cuda"
    return {
        "esper": esper.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else processor_name(),
        "cuda": torch.version.cuda,
        "backend": backend,
        "threads": config.machine.threads,
        "plugins": [plugins.digest(path) for path in config.world.plugin],
        "text_file": config.world.text_file and plugins.digest(config.world.text_file),
        "gymnasium": version("gymnasium") if config.gymnasium.gym is not None else None,
        "switches": switches_on(),
        "git": git_revision(),
        "command": sys.argv,
    }


def fingerprint_differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences between two fingerprints that can change the last bits of a result."""
    return [
        f"{name}: {then.get(name)} then, {now[name]} now"
        for name in _FINGERPRINT
        if then.get(name) != now[name]
    ]


def directory_of_runs(folder: str) -> Path:
    """The directory ``telemetry_dir``, created if it is missing.

    Raises:
        OSError, ValueError, RuntimeError: it cannot be created.
    """
    if not folder:
        raise ValueError("the name is empty")
    parent = Path(folder).expanduser()
    parent.mkdir(parents=True, exist_ok=True)
    return parent


def create_directory(parent: Path, name: str | None, config: TrainConfig) -> Path:
    """Create the directory ``name`` in ``parent``, by default one with an unused name.

    Raises:
        UsageError: ``name`` exists.
        OSError: it cannot be created.
    """
    if name is None:
        return _create_unused(parent, f"{time.strftime('%Y-%m-%d_%H%M%S')}-{_label(config)}")
    try:
        (parent / name).mkdir()
    except FileExistsError as error:
        raise UsageError(
            f"name: {parent / name} exists; choose another name, or continue a run with --resume"
        ) from error
    return parent / name


def _create_unused(parent: Path, name: str) -> Path:
    """Create a directory called ``name``, with a number appended if that exists."""
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = parent / (name + suffix)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise UsageError(f"telemetry_dir: {parent} has too many runs started in this second; try again")


def processor_name() -> str:
    """The processor's name if the system reports it, otherwise its architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache
def git_revision() -> str | None:
    """The commit of Esper's own source when it was first asked for; None outside a clone."""
    try:
        process = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
