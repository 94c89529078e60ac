"""Progress of a run on the terminal: one live line, and a table at the end."""

import math
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn
from rich.table import Table

from esper.karn.final_figures import FIGURES, last_tenth
from esper.karn.learning_diagnosis import Curve, Verdict, diagnose
from esper.karn.store import read_events
from esper.leyline.config import TrainConfig
from esper.leyline.events import GymEvaluation
from esper.leyline.metrics import Metric
from esper.leyline.phases import phase
from esper.simic.gym.collect import GymStep
from esper.simic.offline.offline_run import OfflineSummary
from esper.simic.offline.offline_session import EpochSummary
from esper.simic.offline.recorded_data import RecordedData
from esper.simic.run.checkpoint import best_checkpoint
from esper.simic.run.run_directory import RunDirectory
from esper.simic.training.gym_trainee import GymSummary
from esper.simic.training.session import AnySummary
from esper.simic.training.trainee import AnyStep
from esper.simic.training.vectorized import RunSummary

NOTHING_YET = "-"
RECENT = 100
"""Number of latest Gymnasium episodes, of all environments, in the mean return shown."""

_SPEED = ("environment steps per second", "steps_per_second", ".0f")
_GROWTH_ROWS = (*((figure.label, figure.name, figure.form) for figure in FIGURES.values()), _SPEED)
_GYM_ROWS = (
    ("return", "episode_return", ".2f"),
    ("length", "episode_length", ".1f"),
    ("episodes per round", "episodes", ".1f"),
    ("evaluation", "evaluation", ".2f"),
    _SPEED,
)
_EPOCH_ROWS = (
    ("policy loss", Metric.POLICY_LOSS),
    ("on held-out episodes", Metric.HELD_OUT_POLICY_LOSS),
    ("-log likelihood, nats", Metric.NEGATIVE_LOG_LIKELIHOOD),
    ("on held-out episodes", Metric.HELD_OUT_NEGATIVE_LOG_LIKELIHOOD),
    ("value loss", Metric.VALUE_LOSS),
    ("on held-out episodes", Metric.HELD_OUT_VALUE_LOSS),
    ("entropy, nats", Metric.ENTROPY),
)


class _Live:
    """A line that is redrawn on a terminal; elsewhere, lines of text.

    Args:
        console: where it is shown.
        first, last: templates of the columns, around a bar if there is room for it.
    """

    def __init__(self, console: Console, first: str, *last: str):
        self.console = console
        bar = [BarColumn(), TaskProgressColumn()] if console.width >= 100 else []
        self.progress = Progress(
            first,
            *bar,
            *last,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        self._phases = ExitStack()
        return self

    def __exit__(self, *exception: object) -> None:
        self._phases.close()
        self.progress.stop()

    def begin(self, total: float, unit: str, **fields: Any) -> None:
        """Begin to show ``total`` pieces of work; ``fields`` are those of the columns."""
        self.bar = self.progress.add_task("", total=total, **fields)
        live = self.console.is_terminal
        self.phase = self._phases.enter_context(phase("training", total, unit, live))

    def print(self, line: str) -> None:
        """Print a line of text if there is no terminal."""
        if not self.console.is_terminal:
            self.console.print(line, highlight=False, soft_wrap=True)
            self.phase.last_line = time.monotonic()


class LiveProgress(_Live):
    """Observes a run (``simic.training.observer.Observer``) and shows its progress by round."""

    def __init__(self, console: Console):
        super().__init__(
            console,
            "round {task.fields[round]}",
            "{task.fields[speed]} steps/s",
            "{task.fields[result]}",
            "entropy {task.fields[entropy]}",
            "lr {task.fields[rate]}",
        )
        self.fields: dict[str, Any] = dict.fromkeys(
            ("result", "speed", "entropy", "rate"), NOTHING_YET
        )
        self.recent: deque[float] = deque(maxlen=RECENT)

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """See ``Observer``."""
        self.rounds, self.done = config.world.rounds, done
        self.fields["rate"] = f"{config.learner.learning_rate:g}"
        self.start, self.steps = time.perf_counter(), 0
        self.console.out(f"run directory: {path}", highlight=False)
        steps = (self.rounds - done) * steps_per_round
        self.begin(steps, "steps", round=self._round(), **self.fields)

    def stepped(self, step: AnyStep) -> None:
        """See ``Observer``."""
        self.steps += step.count
        self.fields["speed"] = f"{self.steps / (time.perf_counter() - self.start):.0f}"
        if isinstance(step, GymStep):
            self.recent.extend(episode.episode_return for episode in step.ended)
            if self.recent:
                self.fields["result"] = f"return [bold]{fmean(self.recent):.2f}[/bold]"
        else:
            scores, twins = step.report.scores, step.report.twin_scores
            self.fields["result"] = (
                f"val. acc [bold]{scores.accuracy.mean().item():.3f}[/bold] "
                f"twin {twins.accuracy.mean().item():.3f}"
            )
        self.phase.advance()
        self.progress.update(self.bar, advance=1, **self.fields)

    def round_done(self, summary: AnySummary) -> None:
        """See ``Observer``."""
        self.done = summary.round
        if summary.metrics:
            self.fields["entropy"] = f"{summary.metrics[Metric.ENTROPY]:.3f}"
            self.fields["rate"] = f"{summary.metrics[Metric.LEARNING_RATE]:g}"
        self.progress.update(self.bar, round=self._round(), **self.fields)
        self.print(
            f"round {summary.round}/{self.rounds}  {_outcome(summary)}  "
            f"entropy {self.fields['entropy']}  lr {self.fields['rate']}  "
            f"{summary.steps_per_second:.0f} steps/s"
        )

    def _round(self) -> str:
        return f"{min(self.done + 1, self.rounds)}/{self.rounds}"


def print_summary(console: Console, summary: RunSummary) -> None:
    """Print the table at the end of a run: means over its first and its last tenth of rounds."""
    rounds = summary.rounds
    if rounds:
        gym = isinstance(rounds[0], GymSummary)
        part = last_tenth(len(rounds))
        columns = [rounds[:part], rounds[-part:]] if len(rounds) > 1 else [rounds]
        table = Table(title=f"{summary.status} after {summary.wall_seconds:.0f} s")
        table.add_column("mean of a round" if gym else "mean of an episode")
        for column in columns:
            table.add_column(_round_range(column), justify="right")
        for label, attribute, form in _GYM_ROWS if gym else _GROWTH_ROWS:
            means = [_mean(part, attribute) for part in columns]
            cells = [NOTHING_YET if math.isnan(mean) else f"{mean:{form}}" for mean in means]
            table.add_row(label, *cells)
        console.print(table)
        verdict = _verdict(rounds)
        if verdict is not None:
            console.out(verdict.text, highlight=False)
        if gym:
            _print_best(console, summary.path)
    console.out(f"run directory: {summary.path}", highlight=False)


def _print_best(console: Console, run: Path) -> None:
    """Say which policy of a Gymnasium task is kept, if it was evaluated."""
    best = best_checkpoint(run)
    evaluations = [each for each in read_events(run, GymEvaluation) if each.best]
    if best is not None and evaluations:
        mean, number = evaluations[-1].episode_return, evaluations[-1].round
        text = f"best policy: evaluation {mean:.2f} in round {number}, kept in {best.name}"
        console.out(text, highlight=False)


def _verdict(rounds: list[AnySummary]) -> Verdict | None:
    """Whether the policy is learning, judged by the rounds of this process."""
    updates = [each.metrics for each in rounds if each.metrics]
    if isinstance(rounds[0], GymSummary):
        return diagnose(Curve("return", "", [each.episode_return for each in rounds]), updates)
    fossilised = [float(each.fossilised) for each in rounds if not isinstance(each, GymSummary)]
    gains = [float(each.gain) for each in rounds if not isinstance(each, GymSummary)]
    return diagnose(Curve("gain", " points", gains), updates, fossilised)


def _outcome(summary: AnySummary) -> str:
    """The outcome of a round in a few words."""
    if isinstance(summary, GymSummary):
        text = f"return {summary.episode_return:.2f}  length {summary.episode_length:.1f}"
        if math.isnan(summary.evaluation):
            return text
        return f"{text}  evaluation {summary.evaluation:.2f}"
    return (
        f"gain {summary.gain:+.1f} points  validation difference {summary.validation_gain:+.1f}  "
        f"fossilised {summary.fossilised:.2f}"
    )


def _round_range(rounds: list[AnySummary]) -> str:
    if len(rounds) == 1:
        return f"round {rounds[0].round}"
    return f"rounds {rounds[0].round} to {rounds[-1].round}"


def _mean(rounds: list[AnySummary], attribute: str) -> float:
    """Mean over the rounds in which the attribute is not NaN; NaN if there is none."""
    values = [float(getattr(r, attribute)) for r in rounds]
    finite = [value for value in values if not math.isnan(value)]
    return fmean(finite) if finite else math.nan


class EpochProgress(_Live):
    """Observes learning (``simic.offline.offline_session.OfflineObserver``), epoch by epoch."""

    def __init__(self, console: Console):
        super().__init__(console, "{task.fields[line]}")

    def started(self, directory: RunDirectory, data: RecordedData, done: int, total: int) -> None:
        """See ``OfflineObserver``."""
        self.total = total
        self.console.out(
            f"run directory: {directory.path}\n"
            f"{data.episodes.count} recorded episodes, {len(data.held_out)} of them held out",
            highlight=False,
        )
        line = f"epoch {done + 1}/{total}"
        self.begin(total - done, "epochs", line=line)

    def epoch_done(self, summary: EpochSummary) -> None:
        """See ``OfflineObserver``."""
        line = (
            f"epoch {summary.epoch}/{self.total}  "
            f"policy loss {_text(summary, Metric.POLICY_LOSS)}  "
            f"held out {_text(summary, Metric.HELD_OUT_POLICY_LOSS)}  "
            f"value loss {_text(summary, Metric.VALUE_LOSS)}  "
            f"entropy {_text(summary, Metric.ENTROPY)}  {summary.steps_per_second:.0f} steps/s"
        )
        self.phase.advance()
        self.progress.update(self.bar, advance=1, line=line)
        self.print(line)


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
        for label, metric in _EPOCH_ROWS:
            table.add_row(label, *(_text(epoch, metric) for _, epoch in columns))
        console.print(table)
    console.out(f"run directory: {summary.path}", highlight=False)
