"""``esper sanctum``: watch a run on the terminal; and Sanctum beside training.

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from esper.leyline.config import TrainConfig
from esper.leyline.config.setting import setting
from esper.leyline.errors import UsageError
from esper.leyline.extras import require
from esper.leyline.notices import notice
from esper.scripts.entry import run_command
from esper.scripts.flags import parse

if TYPE_CHECKING:
    # Sanctum's own process does without what trains.
    from esper.scripts.progress import LiveProgress
    from esper.simic.training.session import AnySummary
    from esper.simic.training.trainee import AnyStep

GRACE_SECONDS = 3.0
"""Seconds that Sanctum has to restore the screen before it is killed."""

_PLAIN_SCREEN = (
    "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1004l"
    "\x1b[?2004l\x1b[?2048l\x1b[<u\x1b[?7h\x1b[0m"
)
"""Leaves the alternate screen, shows the cursor and ends every mode that Sanctum enables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SanctumArguments:
    """Watch a run on the terminal, live or finished, from this machine or copied from another."""

    run: Path = setting(Path("runs"), positional=True)
    """The run directory, or a directory of runs, of which the latest is shown."""
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

    run = find_run(options.run)
    if not is_terminal():
        raise UsageError("sanctum: needs a terminal; esper report writes a page instead")
    Sanctum(run, options.light, options.owner).run()
    return 0


def find_run(path: Path) -> Path:
    """Return the run directory at ``path``, or the latest one in it.

    Raises:
        UsageError: there is none.
    """
    if (path / "events.jsonl").is_file() or (path / "config.json").is_file():
        return path
    try:
        runs = [child for child in path.iterdir() if (child / "config.json").is_file()]
    except OSError:
        runs = []
    if not runs:
        raise UsageError(f"run: {path} is not a run directory and contains none; name one")
    return max(runs, key=lambda run: (run.stat().st_mtime, run.name))


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


class SanctumObserver:
    """Observes a run (``simic.training.observer.Observer``), with or without Sanctum.

    Args:
        progress: the display that is used without Sanctum.
        enabled: whether the user asked for Sanctum.
    """

    def __init__(self, progress: "LiveProgress", enabled: bool):
        self.progress, self.enabled = progress, enabled
        self.terminal: Terminal | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.terminal is not None and self.terminal.in_use:
            self.terminal.restore()

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """See ``Observer``."""
        self.progress.started(path, config, done, steps_per_round)
        if not self.enabled:
            return
        reason = _obstacle(config)
        if reason is not None:
            notice(f"sanctum: {reason}; training without it")
            return
        self.progress.progress.stop()
        try:
            self.terminal = Terminal(path)
        except (OSError, termios.error) as error:
            notice(f"sanctum: cannot be shown ({error}); training without it")
            self.progress.progress.start()

    def stepped(self, step: "AnyStep") -> None:
        """See ``Observer``."""
        self._restore_progress()
        self.progress.stepped(step)

    def round_done(self, summary: "AnySummary") -> None:
        """See ``Observer``."""
        self._restore_progress()
        self.progress.round_done(summary)

    def training_ended(self, exit_code: int) -> None:
        """Called when training has ended; after success, waits until the user closes Sanctum."""
        if self.terminal is None or not self.terminal.in_use:
            return
        if exit_code == 0:
            with suppress(KeyboardInterrupt):
                self.terminal.wait()
        if self.terminal.in_use:
            self.terminal.restore()

    def _restore_progress(self) -> None:
        """Show progress again once Sanctum is closed."""
        if self.terminal is None or self.terminal.in_use:
            return
        run, self.terminal = self.terminal.run, None
        notice(
            f"training continues; Ctrl+C ends it with a checkpoint, "
            f"esper sanctum {run} opens Sanctum again"
        )
        self.progress.progress.start()


def _obstacle(config: TrainConfig) -> str | None:
    """Why Sanctum cannot be shown; None if it can."""
    if not is_terminal():
        return "needs a terminal"
    if config.output.telemetry_level == "off":
        return "telemetry_level off writes nothing to show"
    return None


if __name__ == "__main__":
    run_command(sanctum)
