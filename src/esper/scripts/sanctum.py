"""``esper sanctum``: watch a run on the terminal; and the terminal while Sanctum has it.

Beside training, Sanctum is a separate process that uses the terminal and reads the run directory,
so that a failure of either does not affect the other. Training stays in its process; while Sanctum
is open, the output of that process goes to ``console.log`` in the run directory. When Sanctum ends,
even by a crash, the terminal is restored and training continues with its usual progress display.
"""

import os
import signal
import subprocess
import sys
import termios
import threading
from dataclasses import dataclass
from pathlib import Path

from esper.karn.grown_runs import is_grown
from esper.leyline.config.setting import setting
from esper.leyline.errors import UsageError
from esper.leyline.extras import require
from esper.leyline.notices import notice
from esper.scripts.entry import run_command
from esper.scripts.flags import parse

GRACE_SECONDS = 3.0
"""Seconds that Sanctum has to restore the screen before it is killed."""

_PLAIN_SCREEN = (
    "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1004l"
    "\x1b[?2004l\x1b[?2048l\x1b[<u\x1b[?7h\x1b[0m"
)
"""Leaves the alternate screen, shows the cursor and ends every mode that Sanctum enables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SanctumArguments:
    """Watch runs and grown networks on the terminal, live or finished, also copied ones."""

    runs: tuple[Path, ...] = setting((), positional=True)
    """A run directory, a directory of runs, of which the latest is shown (runs by default), or a
    folder of `esper grow`; several (as runs/*) are shown side by side."""
    light: bool = False
    """Whether to use dark text on a light background; the key t switches."""
    owner: int | None = None
    """Process id; Sanctum closes when that process ends. `esper train ppo --sanctum` sets it."""


def sanctum(arguments: list[str]) -> int:
    """Watch a run on the terminal, live or finished."""
    options = parse(SanctumArguments, "esper sanctum", arguments)
    require("tui", "sanctum")
    # Imported here: training, which may open Sanctum, needs no library that draws.
    from esper.karn.sanctum.app import Sanctum
    from esper.karn.sanctum.side_by_side import SideBySide

    runs = [find_run(path) for path in options.runs or (Path("runs"),)]
    if not is_terminal():
        raise UsageError("sanctum: needs a terminal; esper report writes a page instead")
    if len(runs) == 1 and not is_grown(runs[0]):
        Sanctum(runs[0], options.light, options.owner).run()
        return 0
    while run := SideBySide(runs, options.light).run():
        Sanctum(run, options.light, options.owner).run()
    return 0


def find_run(path: Path) -> Path:
    """Return the run directory at ``path``, or the latest one in it.

    Raises:
        UsageError: there is none.
    """
    if (path / "events.jsonl").is_file() or _is_begun(path):
        return path
    try:
        runs = [child for child in path.iterdir() if _is_begun(child)]
    except OSError:
        runs = []
    if not runs:
        raise UsageError(f"run: {path} is not a run directory and contains none; name one")
    return max(runs, key=lambda run: (run.stat().st_mtime, run.name))


def _is_begun(path: Path) -> bool:
    return (path / "config.json").is_file() or is_grown(path)


def is_terminal() -> bool:
    """Whether Sanctum can run here: it reads keys from stdin and draws on stderr."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


class Terminal:
    """The terminal while Sanctum uses it.

    Args:
        run: the run directory, which receives this process's output as ``console.log``.
    """

    def __init__(self, run: Path):
        self.run, self.log = run, run / "console.log"
        self._modes = termios.tcgetattr(0)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._outputs = [os.dup(1), os.dup(2)]
        with self.log.open("ab") as log:
            self._begin = log.tell()
            # -P: the current folder may be anybody's, and is not imported from.
            command = [sys.executable, "-P", "-m", "esper.scripts.sanctum", str(run)]
            self.process = subprocess.Popen([*command, "--owner", str(os.getpid())])
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        self._waiter = threading.Thread(target=self._wait, name="sanctum", daemon=True)
        self._waiter.start()

    @property
    def in_use(self) -> bool:
        """Whether Sanctum still uses the terminal."""
        return self._waiter.is_alive()

    def wait(self) -> None:
        """Wait until the user closes Sanctum."""
        self._waiter.join()

    def restore(self) -> None:
        """End Sanctum and restore the terminal."""
        self.process.terminate()
        self._waiter.join(GRACE_SECONDS)
        if self.in_use:
            self.process.kill()
            self._waiter.join()

    def _wait(self) -> None:
        # SIGTTOU would stop this process if it set the modes of the terminal from the background.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        status = self.process.wait()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for stream, output in zip((1, 2), self._outputs, strict=True):
            os.dup2(output, stream)
            os.close(output)
        try:
            termios.tcsetattr(0, termios.TCSANOW, self._modes)
            if status:
                os.write(2, _PLAIN_SCREEN.encode())
                notice(f"sanctum: ended with status {status}")
            has_output = self.log.stat().st_size > self._begin
        except (OSError, termios.error):
            return  # the terminal, or the run directory, no longer exists
        if has_output:
            notice(f"output while Sanctum was open: {self.log}")


if __name__ == "__main__":
    run_command(sanctum)
