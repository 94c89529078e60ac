"""``esper runs``: list runs, their status and the commands that resume them; remove runs."""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from esper.karn.grown_runs import inspect_either, is_run_or_grown
from esper.karn.runs import RunInfo, find_runs, is_run, remove
from esper.leyline.config import OutputConfig
from esper.leyline.config.setting import NOT_NEGATIVE, setting
from esper.leyline.errors import UsageError
from esper.leyline.notices import escape, notice
from esper.leyline.phases import track
from esper.scripts.flags import parse
from esper.scripts.output import outlive_output

LOOKS = {
    "running": ("▶", "cyan"),
    "finished": ("✓", "green"),
    "interrupted": ("‖", "yellow"),
    "failed": ("✗", "red"),
    "unknown": ("?", "dim"),
}
"""A glyph and a colour for each status; the status is always written beside the glyph."""

NOTHING = "-"
WIDTH = 1000
"""Columns of the table if the output is not a terminal, so that no line is cut."""
ROOMY = 110
"""Minimum columns of a terminal for all columns of the table."""
SECONDARY = "validation", "policy", "started", "disk"
"""Columns that a narrower terminal lacks."""

DEFAULT_PLACE, GROWN_PLACE = Path(OutputConfig().telemetry_dir), Path("grown")
"""Where runs are looked for, and networks that were grown from models of one's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsArguments:
    """List runs and grown networks with their status; `esper runs prune` removes runs."""

    directory: Path = setting(DEFAULT_PLACE, positional=True)
    """Where to look for run directories, at any depth; by default also in grown/."""
    json: bool = False
    """Whether to print a JSON list instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneArguments:
    """Remove runs that are not running. Give one of --keep, --older-than and --failed."""

    directory: Path = setting(DEFAULT_PLACE, positional=True)
    """Where to look for run directories, at any depth."""
    keep: int | None = setting(None, NOT_NEGATIVE)
    """Number of latest runs to keep; the others are removed."""
    older_than: float | None = setting(None, NOT_NEGATIVE)
    """Remove runs that were last active more than this number of days ago."""
    failed: bool = False
    """Remove runs that failed."""
    yes: bool = False
    """Whether to remove them without asking."""


def runs(arguments: list[str]) -> int:
    """List runs and their status; `runs prune` removes some."""
    if arguments and arguments[0] == "prune":
        return prune(arguments[1:])
    options = parse(RunsArguments, "esper runs", arguments)
    folders = [options.directory]
    if options.directory == DEFAULT_PLACE and GROWN_PLACE.is_dir():
        folders = [folder for folder in (DEFAULT_PLACE, GROWN_PLACE) if folder.exists()]
    infos = [info for folder in folders for info in _infos(folder, is_run_or_grown)]
    if options.json:
        print(json.dumps([_plain(info) for info in infos], indent=2))
    elif not infos:
        print(f"no runs in {escape(str(options.directory))}")
    else:
        _show(infos)
        _show_resume(infos)
    return 0


def prune(arguments: list[str]) -> int:
    """Remove runs, after showing them and asking."""
    program = "esper runs prune"
    options = parse(PruneArguments, program, arguments)
    outlive_output()
    infos = _selection(options)
    if not infos:
        print("nothing to remove")
        return 0
    _show(infos)
    number = "1 run" if len(infos) == 1 else f"{len(infos)} runs"
    total = f"{number} ({decimal(sum(info.bytes for info in infos))})"
    if not options.yes:
        if not sys.stdin.isatty():
            raise UsageError(f"{program}: would remove {total}; add --yes to skip the question")
        if input(f"Remove {total}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    return max([_remove(info) for info in infos])


def _selection(options: PruneArguments) -> list[RunInfo]:
    """The runs to remove, oldest first.

    Raises:
        UsageError: not exactly one rule is given.
    """
    rules = (options.keep, options.older_than, options.failed or None)
    if sum(rule is not None for rule in rules) != 1:
        raise UsageError("esper runs prune: give one of --keep N, --older-than DAYS, --failed")
    infos = _infos(options.directory)
    if options.keep is not None:
        infos = infos[: len(infos) - options.keep] if options.keep < len(infos) else []
    if options.older_than is not None:
        since = time.time() - 86400 * options.older_than
        infos = [info for info in infos if (info.last_activity or info.started or 0.0) < since]
    if options.failed:
        infos = [info for info in infos if info.status == "failed"]
    return [info for info in infos if info.status != "running"]


def _infos(directory: Path, predicate: Callable[[Path], bool] = is_run) -> list[RunInfo]:
    """The state of all directories of a kind; one that cannot be read is one line instead."""
    infos = []
    for run in track(find_runs(directory, predicate), "reading runs", "runs"):
        try:
            infos.append(inspect_either(run))
        except Exception as error:
            # Files of a run may hold anything, and may vanish while they are read.
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            notice(f"warning: {run} cannot be read ({reason})")
    return infos


def _remove(info: RunInfo) -> int:
    """Remove a run and report it; 1 if it could not be removed."""
    try:
        remove(info.path)
    except BlockingIOError:
        notice(f"kept {info.path}: a process has started writing to it")
        return 1
    except OSError as error:
        notice(f"kept {info.path}: {error.strerror} ({error.filename})")
        return 1
    print(f"removed {escape(str(info.path))}")
    return 0


def _show(infos: list[RunInfo]) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    lacking = SECONDARY if console.width < ROOMY else ()
    rows = [_cells(info) for info in infos]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        if name in ("run", "task"):
            table.add_column(name, overflow="fold")
        elif name not in lacking:
            right = name in ("rounds", "gain", "validation", "disk")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell for name, cell in row.items() if name not in lacking))
    console.print(table)
    if lacking:
        print(f"{', '.join(lacking)}: in a terminal of {ROOMY} columns, or with --json")


def _cells(info: RunInfo) -> dict[str, str | Text]:
    """What the table shows of a run, by column."""
    glyph, colour = LOOKS[info.status]
    return {
        "run": Text(escape(str(info.path))),
        "status": Text(f"{glyph} {info.status}", style=colour),
        "rounds": f"{info.rounds_done}/{info.rounds_total or '?'}",
        "gain": _points(info.gain),
        "validation": _points(info.validation_gain),
        "policy": Text(escape(info.policy or NOTHING)),
        "task": Text(escape(_tasks(info))),
        "started": NOTHING if info.started is None else _moment(info.started),
        "disk": decimal(info.bytes),
    }


def _show_resume(infos: list[RunInfo]) -> None:
    commands = [info.resume for info in infos if info.resume]
    if commands:
        print("\nto resume:")
    for command in commands:
        print(f"  {command}")


def _points(gain: float | None) -> str:
    return NOTHING if gain is None else f"{gain:+.1f}"


def _tasks(info: RunInfo) -> str:
    names = " ".join(info.tasks) or NOTHING
    return names if len(info.tasks) <= 2 else f"{len(info.tasks)} tasks"


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return NOTHING  # a forged or damaged time


def _plain(info: RunInfo) -> dict[str, Any]:
    """A run as JSON; a gain that is not finite is null."""
    gains = {"gain": info.gain, "validation_gain": info.validation_gain}
    finite = {
        name: None if gain is None or not math.isfinite(gain) else gain
        for name, gain in gains.items()
    }
    return asdict(info) | {"path": str(info.path)} | finite
