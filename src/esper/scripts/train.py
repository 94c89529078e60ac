"""``esper train ppo|heuristic``, also ``python -m esper.scripts.train``.

What trains is imported once the command line is known to be right: torch alone takes seconds.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper.leyline.config import (
    MachineConfig,
    OutputConfig,
    TrainConfig,
    WorldConfig,
    canonical,
    check,
    defaults_of,
    unflatten,
)
from esper.leyline.errors import UsageError
from esper.scripts.entry import dispatch, guarded
from esper.scripts.flags import read_flags
from esper.scripts.settings_file import settings_file


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
class PPOArguments(TrainConfig):
    """Train a growth policy with PPO: it decides in every epoch of every host what grows where.

    Or, where a Gymnasium environment is named, a policy for that.
    """

    source: SourceConfig = field(default_factory=SourceConfig)
    view: ViewConfig = field(default_factory=ViewConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeuristicArguments:
    """Run the plateau heuristic in the same environment; it learns nothing."""

    world: WorldConfig = field(default_factory=lambda: defaults_of("heuristic").world)
    machine: MachineConfig = field(default_factory=MachineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    source: FileConfig = field(default_factory=FileConfig)
    view: ViewConfig = field(default_factory=ViewConfig)


def ppo(arguments: list[str]) -> int:
    """Train a growth policy with PPO."""
    given = read_flags(PPOArguments, "esper train ppo", arguments)
    run, file = given.pop("resume", None), given.pop("config_json", None)
    sanctum = given.pop("sanctum", False)
    if run is None:
        return _train("ppo", _configured(given, file), sanctum)
    if file is not None:
        raise UsageError("config_json: a resumed run keeps its own settings; leave one of them out")
    canonical(given)
    from esper.scripts.watched import resume

    return resume(run, given, sanctum)


def heuristic(arguments: list[str]) -> int:
    """Run the plateau heuristic, as a control."""
    given = read_flags(HeuristicArguments, "esper train heuristic", arguments)
    file, sanctum = given.pop("config_json", None), given.pop("sanctum", False)
    return _train("heuristic", _configured(given, file, defaults_of("heuristic")), sanctum)


def _configured(
    given: dict[str, Any], file: Path | None, base: TrainConfig | None = None
) -> TrainConfig:
    """Settings of a new run: flags before file before defaults."""
    of_file = {} if file is None else settings_file(file)
    config = unflatten({**of_file, **canonical(given)}, base)
    check(config)
    return config


def _train(policy: str, config: TrainConfig, sanctum: bool) -> int:
    from esper.scripts.watched import train

    return train(policy, config, sanctum)


COMMANDS = {"ppo": ppo, "heuristic": heuristic}


def train(arguments: list[str]) -> int:
    """Train a policy: ppo or heuristic."""
    return dispatch("esper train", COMMANDS, arguments)


def main() -> None:
    """``python -m esper.scripts.train``."""
    sys.exit(guarded(train, sys.argv[1:]))


if __name__ == "__main__":
    main()
