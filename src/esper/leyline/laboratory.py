"""Where Esper finds its laboratory: the package that measures Esper's claims.

The laboratory imports Esper, never the other way round, so its parts are entry points of the
installed distribution. An installation may lack them; then nobody can evaluate, and all else works.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from esper.leyline.errors import UsageError

GROUP = "esper.laboratory"


@cache
def find_part(name: str) -> Any:
    """The part of the laboratory called ``name``; None if the laboratory is not installed."""
    parts = entry_points(group=GROUP, name=name)
    return parts[name].load() if parts else None


def part(name: str, purpose: str) -> Any:
    """The part of the laboratory called ``name``.

    Args:
        name: name of the entry point.
        purpose: what needs it, with which the message begins.

    Raises:
        UsageError: the laboratory is not installed.
    """
    entry = find_part(name)
    if entry is None:
        raise UsageError(f"{purpose}: {MISSING}")
    return entry


MISSING = (
    "this installation lacks Esper's laboratory; "
    "pip install --force-reinstall --no-deps esper-growth"
)
