"""``esper train ppo|heuristic``, also ``python -m esper.scripts.train``."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from esper.karn.report import write_report
from esper.leyline.config import (
    GymConfig,
    LearnerConfig,
    MachineConfig,
    OutputConfig,
    TrainConfig,
    WorldConfig,
    canonical,
    unflatten,
)
from esper.leyline.errors import UsageError
from esper.scripts.beside import Beside
from esper.scripts.console import LiveProgress, print_summary
from esper.scripts.entry import dispatch, guarded, print_help, wants_help
from esper.scripts.flags import read_flags, settings_file
from esper.simic.training.recorder import RoundSummary
from esper.simic.training.vectorized import RunSummary, resume_ppo, run_training


@dataclass(frozen=True, kw_only=True, slots=True)
class FileConfig:
    """Where settings come from: flags before file before defaults."""

    config_json: Path | None = None
    """A flat JSON object of settings, by the names of the flags with underscores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig(FileConfig):
    """Where settings come from: flags before file before defaults."""

    resume: Path | None = None
    """Run directory to go on with from its latest checkpoint; give --rounds as the new total."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewConfig:
    """What is shown while it trains."""

    sanctum: bool = False
    """Whether to watch the run in Sanctum, full screen, instead of a line of progress; closing it
    does not end the training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOArguments:
    """Train a growth policy with PPO: it decides in every epoch of every host what grows where.

    Or, where a Gymnasium environment is named, a policy for that.
    """

    world: WorldConfig = field(default_factory=WorldConfig)
    gymnasium: GymConfig = field(default_factory=GymConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    source: SourceConfig = field(default_factory=SourceConfig)
    view: ViewConfig = field(default_factory=ViewConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeuristicArguments:
    """Run the plateau heuristic in the same environment; it learns nothing."""

    world: WorldConfig = field(default_factory=lambda: WorldConfig(rounds=1))
    machine: MachineConfig = field(default_factory=MachineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    source: FileConfig = field(default_factory=FileConfig)
    view: ViewConfig = field(default_factory=ViewConfig)


def ppo(arguments: list[str]) -> int:
    """Train a growth policy with PPO."""
    program = "esper train ppo"
    if wants_help(arguments):
        return print_help(PPOArguments, program)
    given = read_flags(program, arguments, _kinds(PPOArguments))
    run, file = given.pop("resume", None), given.pop("config_json", None)
    sanctum = given.pop("sanctum", False)
    if run is not None and file is not None:
        raise UsageError("config_json: a resumed run keeps its own settings; leave one of them out")
    if run is not None:
        return _watched(lambda observer: resume_ppo(run, given, observer), sanctum)
    config = unflatten({**_of_file(file), **canonical(given)})
    return _watched(lambda observer: run_training(config, "ppo", observer=observer), sanctum)


def heuristic(arguments: list[str]) -> int:
    """Run the plateau heuristic, as a control."""
    program = "esper train heuristic"
    if wants_help(arguments):
        return print_help(HeuristicArguments, program)
    given = read_flags(program, arguments, _kinds(HeuristicArguments))
    file, sanctum = given.pop("config_json", None), given.pop("sanctum", False)
    base = TrainConfig(world=HeuristicArguments().world)
    config = unflatten({**_of_file(file), **canonical(given)}, base)
    return _watched(lambda observer: run_training(config, "heuristic", observer=observer), sanctum)


def _of_file(path: Path | None) -> dict[str, Any]:
    return {} if path is None else settings_file(path)


def _kinds(kind: type) -> dict[str, Any]:
    """The types of all settings in the groups of ``kind``, by name."""
    groups = [group.type for group in fields(kind)]
    return {f.name: f.type for group in groups if is_dataclass(group) for f in fields(group)}


def _watched(run: Callable[[Beside], RunSummary], sanctum: bool) -> int:
    """Progress of a run while it goes on, table and report when it ends; its exit status."""
    console = Console()
    with LiveProgress(console) as progress, Beside(progress, sanctum) as observer:
        summary = run(observer)
        observer.over(summary.exit_code)
    print_summary(console, summary)
    grown = any(isinstance(done, RoundSummary) for done in summary.rounds)
    if grown and (summary.path / "events.jsonl").exists():
        try:
            report = write_report([summary.path], summary.path / "report.html")
            console.out(f"report: {report}", highlight=False)
        except (OSError, UsageError) as error:
            print(f"warning: report.html could not be written ({error})", file=sys.stderr)
    return summary.exit_code


COMMANDS = {"ppo": ppo, "heuristic": heuristic}


def train(arguments: list[str]) -> int:
    """Train a policy: ppo or heuristic."""
    return dispatch("esper train", COMMANDS, arguments)


def main() -> None:
    """``python -m esper.scripts.train``."""
    sys.exit(guarded(train, sys.argv[1:]))


if __name__ == "__main__":
    main()
