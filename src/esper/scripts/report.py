"""``esper report``: write an HTML report about one or more runs."""

from dataclasses import dataclass
from pathlib import Path

from esper.karn.report import write_report
from esper.karn.runs import find_runs, is_run
from esper.leyline.config.setting import setting
from esper.leyline.errors import UsageError
from esper.scripts.flags import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportArguments:
    """Write a self-contained HTML report about one or more runs, side by side."""

    runs: tuple[Path, ...] = setting((), positional=True)
    """Directories of running or ended runs, or directories that contain some."""
    output: Path = setting(Path("report.html"), aliases=("o",))
    """The file to write."""


def report(arguments: list[str]) -> int:
    """Write an HTML report about one or more runs."""
    program = "esper report"
    given = parse(ReportArguments, program, arguments)
    if not given.runs:
        raise UsageError(f"{program}: name one or more run directories; esper runs lists them")
    try:
        print(write_report(_runs(given.runs), given.output))
    except OSError as error:
        raise UsageError(
            f"output: cannot write to {given.output} ({error.strerror}); name another file with -o"
        ) from error
    return 0


def _runs(named: tuple[Path, ...]) -> list[Path]:
    """The runs that are named, and those in directories that are named."""
    found: list[Path] = []
    for place in named:
        inside = [] if is_run(place) or not place.is_dir() else find_runs(place)
        found += inside or [place]
    return found
