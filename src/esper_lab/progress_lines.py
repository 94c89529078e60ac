"""Plain lines about a long command, where no terminal shows how far it is."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress

FIRST, INTERVAL = 1.0, 10.0
"""Seconds until the first line, and between two lines."""


@contextmanager
def progress_lines(what: str, progress: Progress, write: Callable[[str], None]) -> Iterator[None]:
    """Write a line now and then while a command works; a command that ends at once writes none.

    Args:
        what: what the command does before its first stage.
        progress: has a task for each stage begun so far, counted in episodes.
        write: receives each line.
    """
    begin, end = time.monotonic(), threading.Event()

    def line() -> str:
        if not progress.tasks:
            return f"{what}: {time.monotonic() - begin:.0f} s so far"
        stage = progress.tasks[-1]
        seconds, remaining = stage.elapsed or 0.0, max(0.0, stage.remaining or 0.0)
        if not stage.completed:
            return f"{stage.description}: {seconds:.0f} s so far"
        return (
            f"{stage.description}: {stage.completed:.0f} of {stage.total:.0f} episodes, "
            f"about {seconds * remaining / stage.completed:.0f} s remain of this stage"
        )

    def run() -> None:
        wait = FIRST
        while not end.wait(wait):
            write(line())
            wait = INTERVAL

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
