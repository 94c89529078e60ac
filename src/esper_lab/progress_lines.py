"""Plain lines about a long command, where no terminal shows how far it is."""

import threading
import time
from collections.abc import Callable
from typing import Self

FIRST, INTERVAL = 1.0, 10.0
"""Seconds until the first line, and between two lines."""


class ProgressLines:
    """A thread that writes a line while a command works; a command that ends at once writes none.

    Args:
        what: what the command does before its first stage.
        write: receives each line.
    """

    def __init__(self, what: str, write: Callable[[str], None]):
        self._write = write
        self._end, self._lock = threading.Event(), threading.Lock()
        self._stage, self._begin = what, time.monotonic()
        self._done, self._total = 0, 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Note that ``done`` more of the ``total`` episodes of a stage have ended."""
        with self._lock:
            if stage != self._stage:
                self._stage, self._begin, self._done = stage, time.monotonic(), 0
            self._done, self._total = self._done + done, total

    def line(self) -> str:
        """What is done now, and how long the stage will take if it goes on as it began."""
        with self._lock:
            seconds = time.monotonic() - self._begin
            if not self._done:
                return f"{self._stage}: {seconds:.0f} s so far"
            remaining = seconds * max(0, self._total - self._done) / self._done
            return (
                f"{self._stage}: {self._done} of {self._total} episodes, "
                f"about {remaining:.0f} s remain of this stage"
            )

    def _run(self) -> None:
        wait = FIRST
        while not self._end.wait(wait):
            self._write(self.line())
            wait = INTERVAL
