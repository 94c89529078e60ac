"""``esper train ppo|heuristic``, also ``python -m esper.scripts.train``."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console

from esper.karn.report import write_report
from esper.leyline.config import (
    LearnerConfig,
    MachineConfig,
    OutputConfig,
    TrainConfig,
    WorldConfig,
    flatten,
)
from esper.leyline.errors import UsageError
from esper.scripts.console import LiveProgress, print_summary
from esper.scripts.entry import dispatch, guarded
from esper.scripts.flags import canonical_flags, settings_file, value_of
from esper.simic.run_directory import stored_config
from esper.simic.training.vectorized import RunSummary, resume_ppo, run_training

_TYRO = (tyro.conf.OmitArgPrefixes,)


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
class PPOArguments:
    """Train a growth policy with PPO: it decides in every epoch of every host what grows where."""

    world: WorldConfig = field(default_factory=WorldConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    source: SourceConfig = field(default_factory=SourceConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeuristicArguments:
    """Run the plateau heuristic in the same environment; it learns nothing."""

    world: WorldConfig = field(default_factory=lambda: WorldConfig(rounds=1))
    machine: MachineConfig = field(default_factory=MachineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    source: FileConfig = field(default_factory=FileConfig)


def ppo(arguments: list[str]) -> int:
    """Train a growth policy with PPO."""
    arguments = canonical_flags(arguments)
    run = value_of("--resume", arguments)
    file = value_of("--config-json", arguments)
    if run is not None and file is not None:
        raise UsageError("config_json: a resumed run keeps its own settings; leave one of them out")
    base = TrainConfig()
    if run is not None:
        base, _ = stored_config(run)
    elif file is not None:
        base = settings_file(file)
    default = PPOArguments(
        world=base.world, learner=base.learner, machine=base.machine, output=base.output
    )
    given = tyro.cli(
        PPOArguments, args=arguments, default=default, prog="esper train ppo", config=_TYRO
    )
    config = TrainConfig(
        world=given.world, learner=given.learner, machine=given.machine, output=given.output
    )
    if run is not None:
        return _watched(lambda progress: resume_ppo(run, flatten(config), progress))
    return _watched(lambda progress: run_training(config, "ppo", observer=progress))


def heuristic(arguments: list[str]) -> int:
    """Run the plateau heuristic, as a control."""
    arguments = canonical_flags(arguments)
    file = value_of("--config-json", arguments)
    default = HeuristicArguments()
    if file is not None:
        base = settings_file(file, TrainConfig(world=default.world))
        default = HeuristicArguments(world=base.world, machine=base.machine, output=base.output)
    given = tyro.cli(
        HeuristicArguments,
        args=arguments,
        default=default,
        prog="esper train heuristic",
        config=_TYRO,
    )
    config = TrainConfig(world=given.world, machine=given.machine, output=given.output)
    return _watched(lambda progress: run_training(config, "heuristic", observer=progress))


def _watched(run: Callable[[LiveProgress], RunSummary]) -> int:
    """Progress of a run while it goes on, table and report when it ends; its exit status."""
    console = Console()
    with LiveProgress(console) as progress:
        summary = run(progress)
    print_summary(console, summary)
    if summary.rounds and (summary.path / "events.jsonl").exists():
        try:
            console.print(f"report: {write_report(summary.path)}", highlight=False, soft_wrap=True)
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
