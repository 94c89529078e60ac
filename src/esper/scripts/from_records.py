"""``esper train imitation`` and ``esper train offline``: learning from records of other runs."""

from dataclasses import dataclass
from pathlib import Path

from esper.leyline.config.algorithm import Algorithm
from esper.leyline.config.setting import check_ranges
from esper.runtime.gate import Permission
from esper.scripts.flags import read_flags


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """A run to go on with."""

    resume: Path | None = None
    """Run directory to continue from its best epoch; --epochs is the new total."""
    plugin: tuple[str, ...] = ()
    """Python files that define the tasks and blueprints of the records."""
    trust: bool = False
    """Whether plugins may be executed that only the records name."""


def learn_from_records(algorithm: Algorithm, command: type, arguments: list[str]) -> int:
    """Start a run that learns from records, or continue one.

    Args:
        algorithm: one that learns from records.
        command: the dataclass of its flags.
        arguments: the command line.
    """
    flags = read_flags(command, f"esper train {algorithm.name}", arguments)
    check_ranges(command, flags)
    resume, files = flags.pop("resume", None), flags.pop("plugin", ())
    permission = Permission(files, trust=flags.pop("trust", False))

    from rich.console import Console

    from esper.runtime import plugins
    from esper.scripts.output import outlive_output
    from esper.scripts.progress import EpochProgress, print_epochs
    from esper.scripts.report import report_ended
    from esper.simic.offline.offline_run import learn_offline, resumed_config

    kind = algorithm.settings
    for path in files:
        plugins.load(path, permission)
    config = kind(**flags) if resume is None else resumed_config(kind, resume, flags)
    outlive_output()
    console = Console()
    with EpochProgress(console) as progress:
        summary = learn_offline(config, resume=resume, observer=progress, permission=permission)
    print_epochs(console, summary)
    report_ended(console, summary.path, summary.exit_code)
    return summary.exit_code
