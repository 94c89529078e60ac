"""What a person sees of a run: one live line of progress, and a table at the end."""

import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from esper.leyline.config import TrainConfig
from esper.simic.step import Step
from esper.simic.training.recorder import RoundSummary
from esper.simic.training.vectorized import RunSummary

NOTHING_YET = "-"


class LiveProgress:
    """Watches a run; see ``simic.training.vectorized.Observer``.

    On a terminal one line is redrawn; elsewhere every round is one line of text.
    """

    def __init__(self, console: Console):
        self.console = console
        self.fields: dict[str, Any] = dict.fromkeys(
            ("grown", "twin", "speed", "entropy", "rate"), NOTHING_YET
        )
        # A narrow terminal has room for the numbers or for the bar.
        bar = [BarColumn(), TaskProgressColumn()] if console.width >= 100 else []
        self.progress = Progress(
            TextColumn("round {task.fields[round]}"),
            *bar,
            TextColumn("{task.fields[speed]} steps/s"),
            TextColumn("accuracy [bold]{task.fields[grown]}[/bold] twin {task.fields[twin]}"),
            TextColumn("entropy {task.fields[entropy]}"),
            TextColumn("lr {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """See ``Observer``."""
        self.rounds, self.done = config.world.rounds, done
        self.fields["rate"] = f"{config.learner.learning_rate:g}"
        self.begin, self.steps = time.perf_counter(), 0
        self.console.out(f"run directory: {path}", highlight=False)
        self.bar = self.progress.add_task(
            "", total=(self.rounds - done) * steps_per_round, round=self._round(), **self.fields
        )

    def stepped(self, step: Step) -> None:
        """See ``Observer``."""
        report = step.report
        self.steps += len(step.reward)
        self.fields["speed"] = f"{self.steps / (time.perf_counter() - self.begin):.0f}"
        self.fields["grown"] = f"{report.scores.accuracy.mean().item():.3f}"
        self.fields["twin"] = f"{report.twin_scores.accuracy.mean().item():.3f}"
        self.progress.update(self.bar, advance=1, **self.fields)

    def round_done(self, summary: RoundSummary) -> None:
        """See ``Observer``."""
        self.done = summary.round
        if summary.metrics:
            self.fields["entropy"] = f"{summary.metrics['entropy']:.3f}"
            self.fields["rate"] = f"{summary.metrics['learning_rate']:g}"
        self.progress.update(self.bar, round=self._round(), **self.fields)
        if not self.console.is_terminal:
            self.console.print(
                f"round {summary.round}/{self.rounds}  accuracy {summary.accuracy:.3f}  "
                f"twin {summary.twin_accuracy:.3f}  fossilised {summary.fossilised:.2f}  "
                f"entropy {self.fields['entropy']}  lr {self.fields['rate']}  "
                f"{summary.steps_per_second:.0f} steps/s",
                highlight=False,
                soft_wrap=True,
            )

    def _round(self) -> str:
        return f"{min(self.done + 1, self.rounds)}/{self.rounds}"


def print_summary(console: Console, summary: RunSummary) -> None:
    """The table at the end of a run: its first and last rounds, a tenth of them each."""
    rounds = summary.rounds
    if rounds:
        part = math.ceil(len(rounds) / 10)
        columns = [rounds[:part], rounds[-part:]] if len(rounds) > 1 else [rounds]
        table = Table(title=f"{summary.status} after {summary.wall_seconds:.0f} s")
        table.add_column("mean of an episode")
        for column in columns:
            table.add_column(_named(column), justify="right")
        for label, attribute, form in (
            ("accuracy grown (committed)", "accuracy", ".3f"),
            ("accuracy of the twin", "twin_accuracy", ".3f"),
            ("gain over the twin", "gain", "+.3f"),
            ("utility above the twin's", "utility_gain", "+.3f"),
            ("return", "episode_return", "+.3f"),
            ("parameters added", "added_parameters", ".0f"),
            ("seeds germinated", "germinated", ".2f"),
            ("seeds fossilised", "fossilised", ".2f"),
            ("seeds pruned", "pruned", ".2f"),
            ("rollbacks", "rolled_back", ".2f"),
            ("environment steps per second", "steps_per_second", ".0f"),
        ):
            table.add_row(label, *(format(_mean(part, attribute), form) for part in columns))
        console.print(table)
    console.out(f"run directory: {summary.path}", highlight=False)


def _named(rounds: list[RoundSummary]) -> str:
    if len(rounds) == 1:
        return f"round {rounds[0].round}"
    return f"rounds {rounds[0].round} to {rounds[-1].round}"


def _mean(rounds: list[RoundSummary], attribute: str) -> float:
    return sum(float(getattr(r, attribute)) for r in rounds) / len(rounds)
