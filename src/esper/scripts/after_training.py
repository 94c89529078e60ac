"""What a command does when training has ended: the report of the run."""

from pathlib import Path

from rich.console import Console

from esper.karn.report import write_report
from esper.leyline.notices import notice


def report_run(console: Console, run: Path) -> None:
    """Write the report of a run into its directory, if the run has events.

    A report that fails is one warning: the training itself is over and what it learned is on the
    disk.
    """
    if not (run / "events.jsonl").exists():
        return
    try:
        report = write_report([run], run / "report.html")
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        notice(
            f"warning: report.html could not be written ({reason}); the training in {run} is not "
            "affected, and esper report tries again"
        )
        return
    console.out(f"report: {report}", highlight=False)
