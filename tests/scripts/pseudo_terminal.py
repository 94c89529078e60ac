"""A command on its own pseudo-terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import ESPER, WATCHDOG, environment


class OnTerminal:
    """``esper ARGUMENTS``, or another command, on a pseudo terminal.

    Attributes:
        output: everything that was written to the terminal so far.
        pid: of the command.
    """

    def __init__(
        self, *arguments: str, size: tuple[int, int] = (80, 24), command: list[str] | None = None
    ):
        self.output = b""
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.slave_name = os.ttyname(slave)
        self.modes_before = self.modes()
        command = command or [*ESPER, *arguments]
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            # The tests themselves may run under nohup, which a new session does not undo.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for stream in (0, 1, 2):
                os.dup2(slave, stream)
            os.execve(command[0], command, environment(TERM="xterm-256color"))
        os.close(slave)

    def modes(self) -> list[Any]:
        """The terminal's modes, as ``stty`` shows them."""
        return termios.tcgetattr(self.master)

    def read(self, seconds: float = 0.05) -> bool:
        """Read the output; return whether the terminal is still open."""
        if select.select([self.master], [], [], seconds)[0]:
            try:
                self.output += os.read(self.master, 65536)
            except OSError:
                return False
        return True

    def until(self, holds: Callable[[bytes], object]) -> None:
        """Read until the output satisfies the condition."""
        end = time.monotonic() + WATCHDOG
        while not holds(self.output):
            if not self.read() or time.monotonic() > end:
                raise TimeoutError(self.text()[-2000:])

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.master, keys.encode())

    def signal(self, number: int) -> None:
        """Send the command a signal."""
        os.kill(self.pid, number)

    def exit_status(self) -> int:
        """Wait for the end; return the status, or minus the signal that ended the command."""
        end = time.monotonic() + WATCHDOG
        while True:
            self.read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                while select.select([self.master], [], [], 0.0)[0] and self.read():
                    pass
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                raise TimeoutError(self.text()[-2000:])

    def text(self) -> str:
        """The output without control sequences."""
        plain = re.sub(rb"\x1b(\[[0-9;?<>=$]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])", b"", self.output)
        return plain.decode(errors="replace")

    def children(self, of: int | None = None) -> list[int]:
        """Return the live processes that the command, or another process, started."""
        parent = self.pid if of is None else of
        path = Path(f"/proc/{parent}/task/{parent}/children")
        return [int(child) for child in path.read_text().split()]

    def close(self) -> None:
        """End the command if it is alive, and close the terminal."""
        try:
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self.master)
