"""Reports about runs: ``esper report``, and that of a run when training has ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

from rich.console import Console

from esper.karn.grown_runs import is_run_or_grown
from esper.karn.report import write_report
from esper.karn.runs import find_runs, shell_word
from esper.leyline.config.setting import setting
from esper.leyline.errors import UsageError
from esper.leyline.notices import notice
from esper.leyline.phases import phase
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
        is_one = is_run_or_grown(path) or not path.is_dir()
        inside = [] if is_one else find_runs(path, is_run_or_grown)
        runs += inside or [path]
    return runs


def report_ended(console: Console, run: Path, exit_code: int) -> None:
    """Write the report of a run, unless a signal ended it; one line then says so.

    Whoever sent the signal waits for the end of the process, and drawing takes many seconds.
    """
    if exit_code in (128 + number for number in (SIGHUP, SIGINT, SIGTERM)):
        notice(f"a signal ended the run; esper report {shell_word(str(run))} draws what it did")
        return
    report_runs(console, [run], run / "report.html")


def report_runs(console: Console, runs: Sequence[Path], target: Path) -> None:
    """Write the report of those of the runs that have events, if there are any.

    A report that fails is one warning: the training itself is over and what it learned is on the
    disk.
    """
    runs_with_events = [run for run in runs if (run / "events.jsonl").exists()]
    if not runs_with_events:
        return
    try:
        with phase("writing the report"):
            report = write_report(runs_with_events, target)
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        notice(
            f"warning: report.html could not be written ({reason}); the training in "
            f"{target.parent} is not affected, and esper report tries again"
        )
        return
    console.out(f"report: {report}", highlight=False)
