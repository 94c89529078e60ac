"""What a command does when training has ended: the report of the run."""

from collections.abc import Sequence
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

from rich.console import Console

from esper.karn.report import write_report
from esper.karn.runs import shell_word
from esper.leyline.notices import notice


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
        report = write_report(runs_with_events, target)
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        notice(
            f"warning: report.html could not be written ({reason}); the training in "
            f"{target.parent} is not affected, and esper report tries again"
        )
        return
    console.out(f"report: {report}", highlight=False)
