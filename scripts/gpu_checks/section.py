"""A section: what it measures, for how long, and how it is written."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from reporting import table

from gpu_checks.place import Place, Row

Found = dict[str, list[Row]]
"""The rows of all sections so far, by name."""


@dataclass(frozen=True)
class Section:
    """A part of the check, which runs in a process of its own.

    Attributes:
        name: name on the command line and in the JSON file.
        title: heading of the page.
        seconds: its part of nine minutes.
        measure: measures on a device and yields rows; what it has yielded is saved.
        page: writes the rows in Markdown, given those of earlier sections too.
        needs: modules without which it cannot be measured.
        timed: whether it measures times, which nothing else may disturb.
    """

    name: str
    title: str
    seconds: float
    measure: Callable[[Place], Iterator[Row]]
    page: Callable[[list[Row], Found], str]
    needs: tuple[str, ...] = ()
    timed: bool = True

    @property
    def missing(self) -> list[str]:
        """The modules that it needs and that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


@dataclass(frozen=True)
class Stage:
    """Sections that run at the same time; ``seconds`` are those of the longest."""

    sections: tuple[Section, ...]

    @property
    def seconds(self) -> float:
        """Its part of nine minutes."""
        return max(section.seconds for section in self.sections)


def in_stages(sections: Sequence[Section], together: bool) -> list[Stage]:
    """Return the stages of the check; with ``together``, what times nothing is the first."""
    first = tuple(section for section in sections if together and not section.timed)
    rest = [Stage((section,)) for section in sections if section not in first]
    return [Stage(first), *rest] if first else rest


def number(value: Any) -> str:
    """Return a value of a row as text: three significant digits, thousands whole."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def rows_table(columns: Sequence[str], rows: list[Row]) -> str:
    """Return some columns of rows as a table; a row without figures says why."""
    lines = []
    for row in rows:
        cells = [number(row.get(name)) for name in columns]
        why = row.get("note") or ("failed, see the JSON file" if "error" in row else "")
        lines.append([*cells, why])
    if not any(line[-1] for line in lines):
        return table(columns, [line[:-1] for line in lines])
    return table((*columns, "note"), lines)
