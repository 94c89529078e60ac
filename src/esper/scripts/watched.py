"""Training with its output: progress or Sanctum, then the summary table and the report."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from esper.karn.report import write_report
from esper.leyline.config import TrainConfig
from esper.leyline.errors import UsageError
from esper.leyline.extras import require
from esper.scripts.beside import Beside
from esper.scripts.console import LiveProgress, print_summary
from esper.simic.training.recorder import RoundSummary
from esper.simic.training.vectorized import RunSummary, resume_ppo, run_training


def train(policy: str, config: TrainConfig, sanctum: bool) -> int:
    """Start a new run, shown in Sanctum if ``sanctum`` is true; return its exit status."""
    return _watched(lambda observer: run_training(config, policy, observer=observer), sanctum)


def resume(run: Path, given: dict[str, Any], sanctum: bool) -> int:
    """Resume a run with the settings ``given`` for the resume; return its exit status."""
    return _watched(lambda observer: resume_ppo(run, given, observer), sanctum)


def _watched(run: Callable[[Beside], RunSummary], sanctum: bool) -> int:
    """Show progress during the run, then print the table and write the report."""
    if sanctum:
        require("tui", "sanctum")
    console = Console()
    with LiveProgress(console) as progress, Beside(progress, sanctum) as observer:
        summary = run(observer)
        observer.training_ended(summary.exit_code)
    print_summary(console, summary)
    grown = any(isinstance(done, RoundSummary) for done in summary.rounds)
    if grown and (summary.path / "events.jsonl").exists():
        try:
            report = write_report([summary.path], summary.path / "report.html")
            console.out(f"report: {report}", highlight=False)
        except (OSError, UsageError) as error:
            print(f"warning: report.html could not be written ({error})", file=sys.stderr)
    return summary.exit_code
