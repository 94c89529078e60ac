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
    options = parse(ReportArguments, program, arguments)
    if not options.runs:
        raise UsageError(f"{program}: name one or more run directories; esper runs lists them")
    try:
        print(write_report(_runs(options.runs), options.output))
    except OSError as error:
        raise UsageError(
            f"output: cannot write to {options.output} ({error.strerror}); "
            "name another file with -o"
        ) from error
    return 0


def _runs(paths: tuple[Path, ...]) -> list[Path]:
    """The runs that are named, and those in directories that are named."""
    runs: list[Path] = []
    for path in paths:
        inside = [] if is_run(path) or not path.is_dir() else find_runs(path)
        runs += inside or [path]
    return runs
