"""``esper --completion SHELL``: the script by which a shell completes commands and flags."""

from contextlib import redirect_stdout
from functools import reduce
from importlib import import_module
from io import StringIO
from operator import or_
from typing import Annotated, Any, Literal, get_args

import tyro

from esper.leyline.errors import UsageError, suggestion
from esper.leyline.laboratory import find_part
from esper.scripts.flags import help_view
from esper.scripts.train import flags_of_commands

Shell = Literal["bash", "zsh", "fish"]
SHELLS: tuple[str, ...] = get_args(Shell)
LABORATORY = "laboratory"
ARGUMENTS: dict[str, Any] = {
    "train": flags_of_commands(),
    "evaluate": f"{LABORATORY}.evaluate_arguments",
    "grow": "grow.GrowArguments",
    "policies": "policies.PoliciesArguments",
    "sanctum": "sanctum.SanctumArguments",
    "report": "report.ReportArguments",
    "query": "query.QueryArguments",
    "runs": "runs.RunsArguments",
    "replay": "replay.ReplayArguments",
    "tasks": "tasks.TasksArguments",
}
"""The dataclass of each command, in its module; of ``runs`` and ``tasks`` without their words."""


def completion(arguments: list[str]) -> int:
    """Print the script that completes the command ``esper`` in a shell.

    Raises:
        UsageError: no shell, or an unknown one, is named.
    """
    choices = f"choose from {', '.join(SHELLS)}"
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        hint = suggestion(arguments[0], SHELLS, choices) if len(arguments) == 1 else choices
        raise UsageError(f"completion: esper --completion takes the name of a shell; {hint}")
    commands = dict(ARGUMENTS)
    if find_part("evaluate_arguments") is None:
        del commands["evaluate"]
    script = StringIO()
    try:
        with redirect_stdout(script):
            tyro.cli(
                _any_of(commands),
                args=["--tyro-write-completion", arguments[0], "-"],
                prog="esper",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            )
    except SystemExit as end:
        if end.code:
            raise
    print(script.getvalue(), end="")
    return 0


def _any_of(commands: dict[str, Any]) -> Any:
    """The type that tyro reads as a choice of commands, which may be choices again."""
    return reduce(
        or_,
        (
            Annotated[
                _any_of(home) if isinstance(home, dict) else _view(home),
                tyro.conf.subcommand(name=name),
            ]
            for name, home in commands.items()
        ),
    )


def _view(home: str | type) -> Any:
    """The type that tyro shows for a command."""
    if isinstance(home, type):
        return help_view(home)
    module, name = home.split(".")
    if module == LABORATORY:
        return help_view(find_part(name))
    return help_view(getattr(import_module(f"esper.scripts.{module}"), name))
