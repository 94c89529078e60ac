"""Dispatch of commands, and reporting of usage errors."""

import logging
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from typing import TextIO

from esper.leyline.errors import UsageError, suggestion

Command = Callable[[list[str]], int]
LONGEST_MESSAGE = 400
"""Maximum printed characters of a message; it may quote user input that is longer."""


def dispatch(program: str, commands: Mapping[str, Command], arguments: list[str]) -> int:
    """Run the command that the first argument names, with the remaining arguments.

    Raises:
        UsageError: no command is given, or there is no such command.
    """
    listing = ", ".join(commands)
    if not arguments:
        raise UsageError(f"{program}: needs a command; choose from {listing}, or --help")
    if arguments[0] in ("-h", "--help"):
        print(f"usage: {program} COMMAND [--help] ...\n\ncommands:")
        for name, command in commands.items():
            print(f"  {name:<12}{(command.__doc__ or '').strip().splitlines()[0]}")
        return 0
    name, *rest = arguments
    if name not in commands:
        hint = suggestion(name, commands, f"choose from {listing}")
        raise UsageError(f"{program}: there is no command {name!r}; {hint}")
    return commands[name](rest)


def guarded(command: Command, arguments: list[str]) -> int:
    """Run a command; a ``UsageError`` becomes one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A path may contain bytes that are not text; printing it must not end a run.
            stream.reconfigure(errors="backslashreplace")
    _show_log()
    try:
        return command(arguments)
    except UsageError as error:
        print(f"esper: {one_line(str(error))}", file=sys.stderr)
        return 2
    except SystemExit as end:
        if end.code:
            raise
        return 0  # help was printed
    except KeyboardInterrupt:
        return 130


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Write to the current ``sys.stderr``, not to the one at import time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _show_log() -> None:
    """Send Esper's log messages to stderr, one line per message."""
    logger = logging.getLogger("esper")
    if not logger.handlers:
        logger.addHandler(_CurrentStderr())
        logger.setLevel(logging.INFO)


def one_line(text: str) -> str:
    """Escape the control characters of a message; remove the middle of a long message."""
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[: LONGEST_MESSAGE // 2]} [...] {text[-LONGEST_MESSAGE // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
