"""Standard streams that may be closed, full or gone without ending a command that computes."""

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

NAMES = {1: "stdout", 2: "stderr"}
CLOSED_PIPE = 141
"""Exit status of a command whose reader went away: 128 plus SIGPIPE, as in a shell."""


class OutputLost(Exception):
    """A command that exists to print cannot print; the message says why in one line.

    Attributes:
        broken_pipe: whether the reader closed the pipe, as ``head`` does when it has seen enough.
    """

    def __init__(self, stream: str, error: OSError):
        super().__init__(f"{stream}: cannot be written ({error.strerror})")
        self.broken_pipe = error.errno == errno.EPIPE


class Output(io.FileIO):
    """The descriptor of stdout or stderr; text that it cannot take is lost.

    The first loss is reported in one line on the other stream. A disk with room again takes later
    text again.

    Args:
        descriptor: 1 or 2.

    Attributes:
        lasts: whether the command goes on without its output; if not, the first loss raises
            ``OutputLost``.
    """

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "wb", closefd=False)
        self.lasts = descriptor == 2
        self._loss = False

    def write(self, content: object) -> int:
        """Write bytes and return how many were taken, lost ones included.

        Raises:
            OutputLost: see ``lasts``.
        """
        with memoryview(content) as view:  # type: ignore[arg-type]
            try:
                while (count := super().write(view)) is None:
                    # The descriptor may have been made non-blocking by whoever else has it.
                    select.select([], [self.fileno()], [])
            except OSError as error:
                self._note(error)
                return view.nbytes
            return count

    def _note(self, error: OSError) -> None:
        if self._loss:
            return
        self._loss = True
        name, fallbacks = NAMES[self.fileno()], [fd for fd in NAMES if fd != self.fileno()]
        if not self.lasts:
            raise OutputLost(name, error)
        line = f"esper: cannot write to {name} ({error.strerror}); going on without this output\n"
        with suppress(OSError):
            # Not through the stream: its lock may be held by a thread that waits for this one.
            os.write(fallbacks[0], line.encode())


def protect_streams() -> None:
    """Make stdout and stderr of this process instances of ``Output``, and open closed streams.

    A closed descriptor would otherwise be given to the next file that is opened, which would then
    receive what libraries and child processes print.
    """
    for descriptor, name in ((0, "stdin"), *NAMES.items()):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is the one that was just found closed.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for descriptor, name in NAMES.items():
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _protected_stream(descriptor, stream))


def _protected_stream(descriptor: int, stream: io.TextIOWrapper) -> TextIO:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Output(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        # A stream that Python was told not to buffer loses the rest of a line cut by the system.
        line_buffering=stream.line_buffering or stream.write_through,
    )


def outlive_output() -> None:
    """Let the command go on if stdout cannot be written, for commands whose result is a file."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, Output):
        raw.lasts = True
