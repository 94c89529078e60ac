"""``esper train imitation`` and ``esper train offline``: learning from records of other runs."""

from dataclasses import dataclass
from pathlib import Path

from esper.leyline.config.offline import ImitationConfig, OfflineConfig
from esper.leyline.config.setting import check_ranges
from esper.scripts.flags import read_flags


@dataclass(frozen=True, kw_only=True, slots=True)
class ImitationArguments(ImitationConfig):
    """Clone policies from the records of their runs: learn to act as they did, without acting."""

    resume: Path | None = None
    """Run directory to continue from its best epoch; --epochs is the new total."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineArguments(OfflineConfig):
    """Learn a better policy from the records of other runs, without acting."""

    resume: Path | None = None
    """Run directory to continue from its best epoch; --epochs is the new total."""


def imitation(arguments: list[str]) -> int:
    """Clone policies from the records of their runs."""
    return _learn(ImitationArguments, ImitationConfig, "esper train imitation", arguments)


def offline(arguments: list[str]) -> int:
    """Learn a better policy from the records of other runs."""
    return _learn(OfflineArguments, OfflineConfig, "esper train offline", arguments)


def _learn(
    command: type[ImitationArguments] | type[OfflineArguments],
    kind: type[ImitationConfig],
    program: str,
    arguments: list[str],
) -> int:
    flags = read_flags(command, program, arguments)
    check_ranges(command, flags)
    resume = flags.pop("resume", None)

    from rich.console import Console

    from esper.scripts.after_training import report_ended
    from esper.scripts.epoch_progress import EpochProgress, print_epochs
    from esper.scripts.output import outlive_output
    from esper.simic.offline.offline_run import learn_offline, resumed_config

    config = kind(**flags) if resume is None else resumed_config(kind, resume, flags)
    outlive_output()
    console = Console()
    with EpochProgress(console) as progress:
        summary = learn_offline(config, resume=resume, observer=progress)
    print_epochs(console, summary)
    report_ended(console, summary.path, summary.exit_code)
    return summary.exit_code
