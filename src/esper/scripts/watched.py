"""Training with its output: progress or Sanctum, then the summary table and the report."""

import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from esper.leyline.config import TrainConfig
from esper.leyline.config.offline import ImitationConfig
from esper.leyline.extras import require
from esper.leyline.notices import notice
from esper.runtime.gate import Permission
from esper.runtime.plugins import load
from esper.scripts.output import outlive_output
from esper.scripts.progress import EpochProgress, LiveProgress, print_epochs, print_summary
from esper.scripts.report import report_ended
from esper.scripts.sanctum import Terminal, is_terminal
from esper.simic.offline.offline_run import learn_offline, resumed_config
from esper.simic.training.recorder import RoundSummary
from esper.simic.training.session import AnySummary
from esper.simic.training.trainee import AnyStep
from esper.simic.training.vectorized import RunSummary, resume_ppo, run_training


def train(policy: str, config: TrainConfig, sanctum: bool, permission: Permission) -> int:
    """Start a new run, shown in Sanctum if ``sanctum`` is true; return its exit status."""
    return _watch(
        lambda progress: run_training(config, policy, observer=progress, permission=permission),
        sanctum,
    )


def resume(run: Path, changes: dict[str, Any], sanctum: bool, permission: Permission) -> int:
    """Resume a run with the settings ``changes`` for the resume; return its exit status.

    Raises:
        UsageError: see ``resume_ppo``.
    """
    return _watch(lambda progress: resume_ppo(run, changes, progress, permission), sanctum)


def learn(
    kind: type[ImitationConfig], flags: dict[str, Any], run: Path | None, permission: Permission
) -> int:
    """Start a run that learns from records, or continue ``run``; return its exit status."""
    for path in permission.files:
        load(path, permission)
    config = kind(**flags) if run is None else resumed_config(kind, run, flags)
    outlive_output()
    console = Console()
    with EpochProgress(console) as progress:
        summary = learn_offline(config, resume=run, observer=progress, permission=permission)
    print_epochs(console, summary)
    report_ended(console, summary.path, summary.exit_code)
    return summary.exit_code


def _watch(run: Callable[[LiveProgress], RunSummary], sanctum: bool) -> int:
    """Show progress during the run, then print the table and write the report."""
    outlive_output()
    if sanctum:
        require("tui", "sanctum")
    console = Console()
    with SanctumProgress(console, sanctum) as progress:
        summary = run(progress)
        progress.training_ended(summary.exit_code)
    print_summary(console, summary)
    if any(isinstance(done, RoundSummary) for done in summary.rounds):
        report_ended(console, summary.path, summary.exit_code)
    return summary.exit_code


class SanctumProgress(LiveProgress):
    """Progress of a run, and Sanctum in its place as long as that is open.

    Args:
        console: where progress is shown.
        enabled: whether the user asked for Sanctum.
    """

    def __init__(self, console: Console, enabled: bool):
        super().__init__(console)
        self.enabled = enabled
        self.terminal: Terminal | None = None

    def __exit__(self, *exception: object) -> None:
        if self.terminal is not None and self.terminal.in_use:
            self.terminal.restore()
        super().__exit__(*exception)

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """See ``Observer``."""
        super().started(path, config, done, steps_per_round)
        if not self.enabled:
            return
        reason = _obstacle(config)
        if reason is not None:
            notice(f"sanctum: {reason}; training without it")
            return
        self.progress.stop()
        try:
            self.terminal = Terminal(path)
        except (OSError, termios.error) as error:
            notice(f"sanctum: cannot be shown ({error}); training without it")
            self.progress.start()

    def stepped(self, step: AnyStep) -> None:
        """See ``Observer``."""
        self._restore()
        super().stepped(step)

    def round_done(self, summary: AnySummary) -> None:
        """See ``Observer``."""
        self._restore()
        super().round_done(summary)

    def training_ended(self, exit_code: int) -> None:
        """Called when training has ended; after success, waits until the user closes Sanctum."""
        if self.terminal is None or not self.terminal.in_use:
            return
        if exit_code == 0:
            with suppress(KeyboardInterrupt):
                self.terminal.wait()
        if self.terminal.in_use:
            self.terminal.restore()

    def _restore(self) -> None:
        """Show progress again once Sanctum is closed."""
        if self.terminal is None or self.terminal.in_use:
            return
        run, self.terminal = self.terminal.run, None
        notice(
            f"training continues; Ctrl+C ends it with a checkpoint, "
            f"esper sanctum {run} opens Sanctum again"
        )
        self.progress.start()


def _obstacle(config: TrainConfig) -> str | None:
    """Why Sanctum cannot be shown; None if it can."""
    if not is_terminal():
        return "needs a terminal"
    if config.output.telemetry_level == "off":
        return "telemetry_level off writes nothing to show"
    return None
