"""``esper train COMMAND``, also ``python -m esper.scripts.train``.

The training code is imported only after the command line is checked: importing torch takes seconds.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

from esper.leyline.config import TrainConfig, canonical, check, defaults_of, unflatten
from esper.leyline.config.algorithm import Algorithm, algorithms
from esper.leyline.config.reading import settings_file
from esper.leyline.config.setting import check_ranges, setting, up_to
from esper.leyline.errors import UsageError
from esper.leyline.memory_need import check_memory
from esper.runtime.gate import Permission
from esper.scripts.entry import dispatch, run_command
from esper.scripts.flags import read_flags


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


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """A run to go on with."""

    resume: Path | None = None
    """Run directory to continue from its best epoch; --epochs is the new total."""
    plugin: tuple[str, ...] = ()
    """Python files that define the tasks and blueprints of the records."""
    trust: bool = False
    """Whether plugins may be executed that only the records name."""


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


CONTROLS = {
    "heuristic": "Run the plateau heuristic in the same environments, as a control; it does not "
    "learn.",
    "rule": "Try a small seed in every slot and keep those that pay, as a control and for records.",
    "random": "Draw every action uniformly from the legal ones, as a control and for records.",
    "schedule": "Follow fixed schedules of growth, for records: another one in each environment "
    "and round.",
}
"""The policies that do not learn, and what their commands do."""


def flags_of_commands() -> dict[str, type]:
    """The dataclass of the flags of each command, by name: every algorithm, then the controls."""
    return {name: _flags_of(name) for name in (*algorithms(), *CONTROLS)}


def _flags_of(policy: str) -> type:
    algorithm = algorithms().get(policy)
    title, text = (
        (policy, CONTROLS[policy])
        if algorithm is None
        else (algorithm.title, algorithm.description)
    )
    bases: tuple[type, ...] = ()
    groups: dict[str, Any] = {}
    if algorithm is not None and algorithm.from_records:
        bases = (ResumeConfig, algorithm.settings)
    else:
        config = defaults_of("heuristic" if algorithm is None else policy)
        groups["world"] = config.world
        if algorithm is not None:
            groups["gymnasium"] = config.gymnasium
            groups |= {policy: config.algorithm} if fields(config.algorithm) else {}
            groups["learner"] = config.learner
        groups |= {"machine": config.machine, "output": config.output}
        groups["source"] = FileConfig() if algorithm is None else SourceConfig()
        groups |= {"repetition": SeedsConfig(), "view": ViewConfig()}
    return make_dataclass(
        f"{title}Arguments",
        # Help shows the defaults of a group.
        [(name, type(group), _default(group)) for name, group in groups.items()],
        bases=bases,
        namespace={"__doc__": text},
        frozen=True,
        kw_only=True,
    )


def _default(group: Any) -> Any:
    return field(default_factory=lambda: group)


def _learn_from_records(algorithm: Algorithm, arguments: list[str]) -> int:
    """Start a run that learns from records, or continue one."""
    command = _flags_of(algorithm.name)
    flags = read_flags(command, f"esper train {algorithm.name}", arguments)
    check_ranges(command, flags)
    run, plugins = flags.pop("resume", None), flags.pop("plugin", ())
    permission = Permission(plugins, trust=flags.pop("trust", False))
    from esper.scripts.watched import learn

    return learn(algorithm.settings, flags, run, permission)


def _act(policy: str, arguments: list[str]) -> int:
    """Start or resume a run of a policy that acts: one that learns, or a control."""
    flags = read_flags(_flags_of(policy), f"esper train {policy}", arguments)
    run, file = flags.pop("resume", None), flags.pop("config_json", None)
    permission = Permission(flags.get("plugin", ()), flags.get("gym"), flags.pop("trust", False))
    check_ranges(SeedsConfig, flags)
    seeds, sanctum = flags.pop("seeds", 1), flags.pop("sanctum", False)
    if seeds > 1 and sanctum:
        raise UsageError("sanctum: shows one run; leave it out, and watch each with esper sanctum")
    base = defaults_of("heuristic") if policy in CONTROLS else None
    if base is None:
        flags["algorithm"] = policy
    if run is None:
        config = _new_config(flags, file, permission, base)
        if seeds > 1:
            from esper.scripts.several_seeds import train_seeds

            return train_seeds(policy, config, seeds, canonical(flags), arguments, permission)
        from esper.scripts.watched import train

        return train(policy, config, sanctum, permission)
    if seeds > 1:
        raise UsageError("seeds: a resumed run keeps its seed; leave this flag out")
    if file is not None:
        raise UsageError("config_json: a resumed run keeps its own settings; leave this flag out")
    canonical(flags)
    from esper.scripts.watched import resume

    return resume(run, flags, sanctum, permission)


def _new_config(
    flags: dict[str, Any], file: Path | None, permission: Permission, base: TrainConfig | None
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


def train(arguments: list[str]) -> int:
    """Train a growth policy by acting or from records, or run one that does not learn."""
    learning = algorithms()
    summaries = {name: one.summary for name, one in learning.items()} | CONTROLS

    def run(policy: str, words: list[str]) -> int:
        if policy in learning and learning[policy].from_records:
            return _learn_from_records(learning[policy], words)
        return _act(policy, words)

    return dispatch("esper train", summaries, run, arguments)


def main() -> None:
    """Entry point of ``python -m esper.scripts.train``."""
    run_command(train)


if __name__ == "__main__":
    main()
