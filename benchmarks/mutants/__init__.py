"""Mutants: faults to put into the source one at a time, each with the tests that must notice it.

A table has one entry per module: the file, the tests, and its mutants as (name, text, instead). The
text occurs exactly once in the file. ``named`` holds the faults that a review found unnoticed, or
asked about.
"""

from dataclasses import dataclass
from typing import Final

Fault = tuple[str, str, str]
"""Name, the text in the file, and what stands there instead."""


@dataclass(frozen=True, slots=True)
class Table:
    """The mutants of one file.

    Attributes:
        module: the name under which they are counted.
        path: the file, relative to the root of the repository.
        tests: tests that concern it, as given to pytest.
        faults: its mutants.
    """

    module: str
    path: str
    tests: tuple[str, ...]
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault of a table."""

    module: str
    path: str
    tests: tuple[str, ...]
    name: str
    text: str
    instead: str


def all_mutants() -> list[Mutant]:
    """Return the mutants of all tables, in order."""
    from mutants.growth import GROWTH
    from mutants.learning import LEARNING
    from mutants.named import NAMED
    from mutants.native import NATIVE
    from mutants.running import RUNNING

    return [
        Mutant(table.module, table.path, table.tests, *fault)
        for table in (*LEARNING, *GROWTH, *RUNNING, *NAMED, *NATIVE)
        for fault in table.faults
    ]


AT_LEAST: Final = 0.95
"""The share of mutants of each module that the tests must notice."""
