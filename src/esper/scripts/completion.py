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
from esper.scripts.main import COMMANDS, OF_LABORATORY
from esper.scripts.train import flags_of_commands

Shell = Literal["bash", "zsh", "fish"]
SHELLS: tuple[str, ...] = get_args(Shell)


def completion(arguments: list[str]) -> int:
    """Print the script that completes the command ``esper`` in a shell.

    Raises:
        UsageError: no shell, or an unknown one, is named.
    """
    choices = f"choose from {', '.join(SHELLS)}"
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        hint = suggestion(arguments[0], SHELLS, choices) if len(arguments) == 1 else choices
        raise UsageError(f"completion: esper --completion takes the name of a shell; {hint}")
    script = StringIO()
    try:
        with redirect_stdout(script):
            tyro.cli(
                _any_of({name: arguments_of(name) for name in COMMANDS}),
                args=["--tyro-write-completion", arguments[0], "-"],
                prog="esper",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            )
    except SystemExit as end:
        if end.code:
            raise
    print(script.getvalue(), end="")
    return 0


def arguments_of(command: str) -> Any:
    """The dataclass of a command, or those of its commands by name; None if it is not installed.

    Those of ``runs`` and ``tasks`` are without their words.
    """
    if command == "train":
        return flags_of_commands()
    if command in OF_LABORATORY:
        return find_part(f"{command}_arguments")
    return getattr(import_module(f"esper.scripts.{command}"), f"{command.title()}Arguments")


def _any_of(commands: dict[str, Any]) -> Any:
    """The type that tyro reads as a choice of commands, which may be choices again."""
    return reduce(
        or_,
        (
            Annotated[
                _any_of(kind) if isinstance(kind, dict) else help_view(kind),
                tyro.conf.subcommand(name=name),
            ]
            for name, kind in commands.items()
            if kind is not None
        ),
    )
