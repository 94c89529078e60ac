"""Progress of learning from records on the terminal: one live line, and a table at the end."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from esper.leyline.metrics import Metric
from esper.scripts.console import NOTHING_YET
from esper.simic.offline.offline_run import OfflineSummary
from esper.simic.offline.offline_session import EpochSummary
from esper.simic.offline.recorded_data import RecordedData
from esper.simic.run.run_directory import RunDirectory

_ROWS = (
    ("policy loss", Metric.POLICY_LOSS),
    ("on held-out episodes", Metric.HELD_OUT_POLICY_LOSS),
    ("-log likelihood, nats", Metric.NEGATIVE_LOG_LIKELIHOOD),
    ("on held-out episodes", Metric.HELD_OUT_NEGATIVE_LOG_LIKELIHOOD),
    ("value loss", Metric.VALUE_LOSS),
    ("on held-out episodes", Metric.HELD_OUT_VALUE_LOSS),
    ("entropy, nats", Metric.ENTROPY),
)


class EpochProgress:
    """Observes a run (``simic.offline.offline_session.OfflineObserver``) and shows its progress.

    On a terminal, one line is redrawn; elsewhere, each epoch prints one line of text.
    """

    def __init__(self, console: Console):
        self.console = console
        bar = [BarColumn()] if console.width >= 100 else []
        self.progress = Progress(
            TextColumn("{task.fields[line]}"),
            *bar,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def started(self, directory: RunDirectory, data: RecordedData, done: int, total: int) -> None:
        """See ``OfflineObserver``."""
        self.total = total
        self.console.out(
            f"run directory: {directory.path}\n"
            f"{data.episodes.count} recorded episodes, {len(data.held_out)} of them held out",
            highlight=False,
        )
        line = f"epoch {done + 1}/{total}"
        self.bar = self.progress.add_task("", total=total - done, line=line)

    def epoch_done(self, summary: EpochSummary) -> None:
        """See ``OfflineObserver``."""
        line = (
            f"epoch {summary.epoch}/{self.total}  "
            f"policy loss {_text(summary, Metric.POLICY_LOSS)}  "
            f"held out {_text(summary, Metric.HELD_OUT_POLICY_LOSS)}  "
            f"value loss {_text(summary, Metric.VALUE_LOSS)}  "
            f"entropy {_text(summary, Metric.ENTROPY)}  {summary.steps_per_second:.0f} steps/s"
        )
        self.progress.update(self.bar, advance=1, line=line)
        if not self.console.is_terminal:
            self.console.print(line, highlight=False, soft_wrap=True)


def _text(summary: EpochSummary, name: str) -> str:
    value = summary.metrics.get(name)
    return NOTHING_YET if value is None else f"{value:.3f}"


def print_epochs(console: Console, summary: OfflineSummary) -> None:
    """Print the table at the end of a run: its first epoch, its last and the one that is kept."""
    if summary.epochs:
        best_epochs = [epoch for epoch in summary.epochs if epoch.epoch == summary.best]
        table = Table(title=f"{summary.status} after {summary.wall_seconds:.0f} s")
        table.add_column("mean of a step")
        columns = [("first", summary.epochs[0]), ("last", summary.epochs[-1])]
        columns += [("kept", epoch) for epoch in best_epochs]
        for name, epoch in columns:
            table.add_column(f"{name}: epoch {epoch.epoch}", justify="right")
        for label, metric in _ROWS:
            table.add_row(label, *(_text(epoch, metric) for _, epoch in columns))
        console.print(table)
    console.out(f"run directory: {summary.path}", highlight=False)
