"""Plain lines about a command that takes long, on a terminal and in a pipe or file alike."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from esper.leyline.phases import current_phase, phase

PATIENCE, INTERVAL, POLL = 2.0, 10.0, 0.25
"""Seconds of a phase before its first line, between two lines, and between two looks."""


@contextmanager
def progress_lines(program: str, write: Callable[[str], None]) -> Iterator[None]:
    """Write a line now and then while a command works; a command that ends at once writes none.

    Args:
        program: the command, for the time before it says what it does.
        write: receives each line.
    """
    end, last = threading.Event(), time.monotonic() - INTERVAL

    def run() -> None:
        nonlocal last
        while not end.wait(POLL):
            current, now = current_phase(), time.monotonic()
            # Once the command has said what it does, its name alone tells nothing.
            command.live = command.live or current is not command
            if current is None or current.live:
                continue
            patience = INTERVAL if current is command else PATIENCE
            quiet_since = max(last, current.last_line)
            if now - current.begin >= patience and now - quiet_since >= INTERVAL:
                last = now
                write(current.line())

    thread = threading.Thread(target=run, daemon=True)
    with phase(program) as command:
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
