"""Phases of a long command: the code that works says how far it is, the command line shows it."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Phase:
    """A part of a command's work.

    Attributes:
        description: what is done, such as ``drawing the report``.
        total: the amount of work; None if it is not known.
        unit: what the amount counts, such as ``sections``.
        live: whether a display shows it already.
        done, step: the amount of work done, and the last that was added.
        begin, last_step: ``time.monotonic()`` at its begin, and when work was done last.
        last_line: ``time.monotonic()`` of the last line about it.
    """

    description: str
    total: float | None = None
    unit: str = ""
    live: bool = False
    done: float = 0.0
    step: float = 0.0
    begin: float = field(default_factory=time.monotonic)
    last_step: float = 0.0
    last_line: float = 0.0

    def advance(self, amount: float = 1.0) -> None:
        """Note that a further amount of work is done."""
        self.done, self.step, self.last_step = self.done + amount, amount, time.monotonic()

    def line(self) -> str:
        """How far the phase is, and how long the rest takes at the pace of the steps so far."""
        seconds, wait = (time.monotonic() - start for start in (self.begin, self.last_step))
        if self.total is None or not 0.0 < self.done <= self.total:
            return f"{self.description}: {duration(seconds)} so far"
        pace, later = (seconds - wait) / self.done, self.done + self.step
        rest = pace * (self.total - self.done) - wait
        rest = max(rest, seconds * (self.total - later) / later, 0.0)
        amount = f"{self.done:.0f} of {self.total:.0f} {self.unit}"
        return f"{self.description}: {amount}, about {duration(rest)} remain"


def duration(seconds: float) -> str:
    """Format a length of time in its two largest units."""
    total = max(0, round(seconds))
    units = (86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")
    for size, unit, part, unit_of_part in units:
        if total >= size:
            return f"{total // size} {unit} {total % size // part} {unit_of_part}"
    return f"{total} s"


_phases: list[Phase] = []


@contextmanager
def phase(
    description: str, total: float | None = None, unit: str = "", live: bool = False
) -> Iterator[Phase]:
    """A phase that is the current one until the end of the block or the begin of one within it."""
    new = Phase(description, total, unit, live)
    _phases.append(new)
    try:
        yield new
    finally:
        _phases.remove(new)


def track(items: Collection[T], description: str, unit: str) -> Iterator[T]:
    """Yield ``items`` as a phase that counts them."""
    with phase(description, len(items), unit) as current:
        for item in items:
            yield item
            current.advance()


def current_phase() -> Phase | None:
    """The phase begun last that has not ended; None if there is none."""
    return _phases[-1] if _phases else None
