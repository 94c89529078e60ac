"""Training with its output: progress or Sanctum, then the summary table and the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from esper.leyline.config import TrainConfig
from esper.leyline.extras import require
from esper.runtime.gate import Permission
from esper.scripts.output import outlive_output
from esper.scripts.progress import LiveProgress, print_summary
from esper.scripts.report import report_ended
from esper.scripts.sanctum import SanctumObserver
from esper.simic.training.recorder import RoundSummary
from esper.simic.training.vectorized import RunSummary, resume_ppo, run_training


def train(policy: str, config: TrainConfig, sanctum: bool, permission: Permission) -> int:
    """Start a new run, shown in Sanctum if ``sanctum`` is true; return its exit status."""
    return _watch(
        lambda observer: run_training(config, policy, observer=observer, permission=permission),
        sanctum,
    )


def resume(run: Path, changes: dict[str, Any], sanctum: bool, permission: Permission) -> int:
    """Resume a run with the settings ``changes`` for the resume; return its exit status.

    Raises:
        UsageError: see ``resume_ppo``.
    """
    return _watch(lambda observer: resume_ppo(run, changes, observer, permission), sanctum)


def _watch(run: Callable[[SanctumObserver], RunSummary], sanctum: bool) -> int:
    """Show progress during the run, then print the table and write the report."""
    outlive_output()
    if sanctum:
        require("tui", "sanctum")
    console = Console()
    with LiveProgress(console) as progress, SanctumObserver(progress, sanctum) as observer:
        summary = run(observer)
        observer.training_ended(summary.exit_code)
    print_summary(console, summary)
    grown = any(isinstance(done, RoundSummary) for done in summary.rounds)
    if grown:
        report_ended(console, summary.path, summary.exit_code)
    return summary.exit_code
