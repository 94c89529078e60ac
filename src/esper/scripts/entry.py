"""Choosing a command, and what a user's mistake looks like."""

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from esper.leyline.errors import UsageError

Command = Callable[[list[str]], int]


def dispatch(program: str, commands: Mapping[str, Command], arguments: list[str]) -> int:
    """Run the command that the first argument names with the others.

    Raises:
        UsageError: there is no such command.
    """
    listing = ", ".join(commands)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {program} COMMAND [--help] ...\n\ncommands:")
        for name, command in commands.items():
            print(f"  {name:<12}{(command.__doc__ or '').strip().splitlines()[0]}")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in commands:
        near = get_close_matches(name, commands, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {listing}"
        raise UsageError(f"{program}: there is no command {name!r}; {hint}")
    return commands[name](rest)


def guarded(command: Command, arguments: list[str]) -> int:
    """Run a command; a mistake of the user's is one line on stderr and exit status 2."""
    try:
        return command(arguments)
    except UsageError as error:
        print(f"esper: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
