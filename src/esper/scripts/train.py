"""``esper train COMMAND``, also ``python -m esper.scripts.train``.

The training code is imported only after the command line is checked: importing torch takes seconds.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

from esper.leyline.config import (
    GymConfig,
    LearnerConfig,
    MachineConfig,
    OutputConfig,
    TrainConfig,
    WorldConfig,
    canonical,
    check,
    defaults_of,
    unflatten,
)
from esper.leyline.config.algorithm import Algorithm, algorithms
from esper.leyline.config.setting import check_ranges, setting, up_to
from esper.leyline.errors import UsageError
from esper.leyline.memory_need import check_memory
from esper.runtime.gate import Permission
from esper.scripts.entry import Command, dispatch, run_command
from esper.scripts.flags import read_flags
from esper.scripts.from_records import ResumeConfig, learn_from_records
from esper.scripts.settings_file import settings_file


@dataclass(frozen=True, kw_only=True, slots=True)
class FileConfig:
    """Sources of settings: flags take precedence over the file, the file over defaults."""

    config_json: Path | None = setting(None, main=True)
    """A flat JSON file of settings; its keys are the names of the flags, with underscores."""
    trust: bool = False
    """Whether code may be executed that only the file of --config-json or the run of --resume
    names: plugins, and the module of a Gymnasium id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig(FileConfig):
    """Sources of settings: flags take precedence over the file, the file over defaults."""

    resume: Path | None = setting(None, main=True)
    """Run directory to resume from its latest checkpoint; --rounds is the new total."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedsConfig:
    """Repetition with other seeds."""

    seeds: int = setting(1, up_to(10_000), main=True)
    """Number of seeds to train with, from --seed on: a run for each, one after the other, in one
    directory, and a joint table and report. The same command with --name goes on where it was
    stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewConfig:
    """What is shown during training."""

    sanctum: bool = setting(False, main=True)
    """Whether to show the run in Sanctum, full screen, instead of a progress line; closing Sanctum
    does not end the training."""


def arguments_of(algorithm: Algorithm) -> type:
    """The dataclass of the flags of an algorithm's command."""
    name = f"{algorithm.title}Arguments"
    options: dict[str, Any] = {
        "namespace": {"__doc__": algorithm.description},
        "frozen": True,
        "kw_only": True,
    }
    if algorithm.from_records:
        return make_dataclass(name, [], bases=(ResumeConfig, algorithm.settings), **options)
    groups: dict[str, Any] = {
        "world": WorldConfig,
        "gymnasium": GymConfig,
        algorithm.name: algorithm.settings,
        "learner": LearnerConfig,
        "machine": MachineConfig,
        "output": OutputConfig,
        "source": SourceConfig,
        "repetition": SeedsConfig,
        "view": ViewConfig,
    }
    defaults = {LearnerConfig: lambda: defaults_of(algorithm.name).learner}
    group_fields = [
        (group, kind, field(default_factory=defaults.get(kind, kind)))
        for group, kind in groups.items()
        if fields(kind)
    ]
    return make_dataclass(name, group_fields, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlArguments:
    """Run a policy that does not learn in the same environments."""

    world: WorldConfig = field(default_factory=lambda: defaults_of("heuristic").world)
    machine: MachineConfig = field(default_factory=MachineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    source: FileConfig = field(default_factory=FileConfig)
    repetition: SeedsConfig = field(default_factory=SeedsConfig)
    view: ViewConfig = field(default_factory=ViewConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeuristicArguments(ControlArguments):
    """Run the plateau heuristic in the same environments, as a control; it does not learn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleArguments(ControlArguments):
    """Try a small seed in every slot and keep those that pay, as a control and for records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomArguments(ControlArguments):
    """Draw every action uniformly from the legal ones, as a control and for records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleArguments(ControlArguments):
    """Follow fixed schedules of growth, for records: another one in each environment and round."""


def _learn(algorithm: str, arguments: list[str]) -> int:
    """Start or resume a run that learns."""
    command = arguments_of(algorithms()[algorithm])
    flags = read_flags(command, f"esper train {algorithm}", arguments)
    run, file = flags.pop("resume", None), flags.pop("config_json", None)
    permission = _permission(flags)
    seeds, sanctum = _seeds(flags), flags.pop("sanctum", False)
    flags["algorithm"] = algorithm
    if run is None:
        config = _new_config(flags, file, permission)
        return _train(algorithm, config, sanctum, seeds, flags, arguments, permission)
    if seeds > 1:
        raise UsageError("seeds: a resumed run keeps its seed; leave this flag out")
    if file is not None:
        raise UsageError("config_json: a resumed run keeps its own settings; leave this flag out")
    canonical(flags)
    from esper.scripts.watched import resume

    return resume(run, flags, sanctum, permission)


def heuristic(arguments: list[str]) -> int:
    """Run the plateau heuristic, as a control."""
    return _control("heuristic", HeuristicArguments, arguments)


def rule(arguments: list[str]) -> int:
    """Try a small seed in every slot and keep those that pay, as a control."""
    return _control("rule", RuleArguments, arguments)


def random(arguments: list[str]) -> int:
    """Draw every action uniformly from the legal ones."""
    return _control("random", RandomArguments, arguments)


def schedule(arguments: list[str]) -> int:
    """Follow fixed schedules of growth, a library of them in turn."""
    return _control("schedule", ScheduleArguments, arguments)


def _control(policy: str, command: type, arguments: list[str]) -> int:
    """Run a policy that does not learn."""
    flags = read_flags(command, f"esper train {policy}", arguments)
    permission, seeds = _permission(flags), _seeds(flags)
    file, sanctum = flags.pop("config_json", None), flags.pop("sanctum", False)
    config = _new_config(flags, file, permission, defaults_of("heuristic"))
    return _train(policy, config, sanctum, seeds, flags, arguments, permission)


def _permission(flags: dict[str, Any]) -> Permission:
    """Permission for the code that flags name; removes --trust from them."""
    return Permission(flags.get("plugin", ()), flags.get("gym"), flags.pop("trust", False))


def _seeds(flags: dict[str, Any]) -> int:
    """Remove the number of seeds from the flags.

    Raises:
        UsageError: it is out of range, or Sanctum is asked for, which shows one run.
    """
    check_ranges(SeedsConfig, flags)
    seeds: int = flags.pop("seeds", 1)
    if seeds > 1 and flags.get("sanctum"):
        raise UsageError("sanctum: shows one run; leave it out, and watch each with esper sanctum")
    return seeds


def _new_config(
    flags: dict[str, Any],
    file: Path | None,
    permission: Permission,
    base: TrainConfig | None = None,
) -> TrainConfig:
    """Settings of a new run: flags take precedence over the file, the file over defaults.

    Raises:
        UsageError: a setting is wrong, or the file names code that is not permitted.
    """
    if file is None and permission.trust:
        raise UsageError("trust: belongs to --config-json and --resume; leave it out")
    from_file = {} if file is None else settings_file(file)
    algorithm = flags.get("algorithm", "ppo")
    in_file = from_file.get("algorithm", algorithm)
    if in_file != algorithm:
        raise UsageError(f"algorithm: {file} says {in_file}; use esper train {in_file}")
    config = unflatten({**from_file, **canonical(flags)}, base)
    check(config)
    permission.check(config.world.plugin, config.gymnasium.gym, str(file))
    check_memory(config)
    return config


def _train(
    policy: str,
    config: TrainConfig,
    sanctum: bool,
    seeds: int,
    flags: dict[str, Any],
    words: list[str],
    permission: Permission,
) -> int:
    """Start a new run, or several that differ in their seed."""
    if seeds > 1:
        from esper.scripts.several_seeds import train_seeds

        return train_seeds(policy, config, seeds, canonical(flags), words, permission)
    from esper.scripts.watched import train

    return train(policy, config, sanctum, permission)


CONTROLS: dict[str, tuple[Command, type]] = {
    "heuristic": (heuristic, HeuristicArguments),
    "rule": (rule, RuleArguments),
    "random": (random, RandomArguments),
    "schedule": (schedule, ScheduleArguments),
}
"""The commands of policies that do not learn, and their flags."""


def commands() -> dict[str, Command]:
    """The commands of ``esper train`` by name: every algorithm, then the controls."""
    learning = {name: _command(one) for name, one in algorithms().items()}
    return learning | {name: command for name, (command, _) in CONTROLS.items()}


def flags_of_commands() -> dict[str, type]:
    """The dataclass of the flags of each command of ``esper train``, by name."""
    learning = {name: arguments_of(one) for name, one in algorithms().items()}
    return learning | {name: flags for name, (_, flags) in CONTROLS.items()}


def _command(algorithm: Algorithm) -> Command:
    """The command that learns by an algorithm."""

    def learn(arguments: list[str]) -> int:
        if algorithm.from_records:
            return learn_from_records(algorithm, arguments_of(algorithm), arguments)
        return _learn(algorithm.name, arguments)

    learn.__doc__ = algorithm.summary
    return learn


def train(arguments: list[str]) -> int:
    """Train a growth policy by acting or from records, or run one that does not learn."""
    return dispatch("esper train", commands(), arguments)


def main() -> None:
    """Entry point of ``python -m esper.scripts.train``."""
    run_command(train)


if __name__ == "__main__":
    main()
