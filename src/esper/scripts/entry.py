"""Dispatch of commands, and reporting of usage errors."""

import errno
import logging
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from typing import NoReturn, TextIO

from esper.leyline.errors import UsageError, suggestion
from esper.leyline.notices import notice
from esper.scripts.output import CLOSED_PIPE, OutputLost, protect_streams

Command = Callable[[list[str]], int]


def dispatch(
    program: str,
    summaries: Mapping[str, str],
    run: Callable[[str, list[str]], int],
    arguments: list[str],
) -> int:
    """Run the command that the first argument names, with the remaining arguments.

    Args:
        program: the words before the name of a command.
        summaries: what each command does, by name.
        run: runs the command of a name with its arguments.
        arguments: the command line.

    Raises:
        UsageError: no command is given, or there is no such command.
    """
    listing = ", ".join(summaries)
    if not arguments:
        raise UsageError(f"command: {program} needs one; choose from {listing}, or --help")
    name, *command_arguments = arguments
    if name in ("-h", "--help"):
        print(f"usage: {program} COMMAND [--help] ...\n\ncommands:")
        for command, summary in summaries.items():
            print(f"  {command:<12}{summary}")
        return 0
    if name not in summaries:
        hint = suggestion(name, summaries, f"choose from {listing}")
        raise UsageError(f"command: {program} has no {name!r}; {hint}")
    return run(name, command_arguments)


def run_command(command: Command) -> NoReturn:
    """Run a command with the arguments and the streams of this process, and exit."""
    protect_streams()
    sys.exit(run_guarded(command, sys.argv[1:]))


def run_guarded(command: Command, arguments: list[str]) -> int:
    """Run a command; a ``UsageError`` becomes one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A path may contain bytes that are not text; printing it must not end a run.
            stream.reconfigure(errors="backslashreplace")
    _show_log()
    try:
        status = _status(command, arguments)
        sys.stdout.flush()
        return status
    except OutputLost as lost:
        if lost.broken_pipe:
            return CLOSED_PIPE  # the reader has seen enough
        notice(f"esper: {lost}; make room or write elsewhere")
        return 2
    except UsageError as error:
        notice(f"esper: {error}")
        return 2
    except OSError as error:
        # Wherever a command first asks about a path of its command line.
        if error.errno != errno.ENAMETOOLONG:
            raise
        notice(f"esper: {str(error.filename)[:60]}...: the name is too long; give a shorter one")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        notice(
            "esper: memory: the system gave no more; take fewer --envs, a smaller --lstm-hidden or "
            "a smaller task"
        )
        return 2
    except KeyboardInterrupt:
        return 130


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is, or was caused by, an allocation that failed on a CPU."""
    while error is not None:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__
    return False


def _status(command: Command, arguments: list[str]) -> int:
    """The exit status of a command, which is 0 if it printed its help."""
    try:
        return command(arguments)
    except SystemExit as end:
        if end.code:
            raise
        return 0


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
