"""``esper sanctum``: watch a run on the terminal."""

import sys
from dataclasses import dataclass
from pathlib import Path

from esper.leyline.config.setting import setting
from esper.leyline.errors import UsageError
from esper.leyline.extras import require
from esper.scripts.entry import run_command
from esper.scripts.flags import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class SanctumArguments:
    """Watch a run on the terminal, live or finished, from this machine or copied from another."""

    run: Path = setting(Path("runs"), positional=True)
    """The run directory, or a directory of runs, of which the latest is shown."""
    light: bool = False
    """Whether to use dark text on a light background; the key t switches."""
    owner: int | None = None
    """Process id; Sanctum closes when that process ends. `esper train ppo --sanctum` sets it."""


def sanctum(arguments: list[str]) -> int:
    """Watch a run on the terminal, live or finished."""
    options = parse(SanctumArguments, "esper sanctum", arguments)
    require("tui", "sanctum")
    # Imported here: training, which may open Sanctum, needs no library that draws.
    from esper.karn.sanctum.app import Sanctum

    run = find_run(options.run)
    if not is_terminal():
        raise UsageError("sanctum: needs a terminal; esper report writes a page instead")
    Sanctum(run, options.light, options.owner).run()
    return 0


def find_run(path: Path) -> Path:
    """Return the run directory at ``path``, or the latest one in it.

    Raises:
        UsageError: there is none.
    """
    if (path / "events.jsonl").is_file() or (path / "config.json").is_file():
        return path
    try:
        runs = [child for child in path.iterdir() if (child / "config.json").is_file()]
    except OSError:
        runs = []
    if not runs:
        raise UsageError(f"run: {path} is not a run directory and contains none; name one")
    return max(runs, key=lambda run: (run.stat().st_mtime, run.name))


def is_terminal() -> bool:
    """Whether Sanctum can run here: it reads keys from stdin and draws on stderr."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


if __name__ == "__main__":
    run_command(sanctum)
