"""Libraries that not every user needs, by the extra of the distribution that installs them."""

from importlib.util import find_spec
from typing import Literal

from esper.leyline.errors import UsageError

Extra = Literal["report", "tui"]
LIBRARIES: dict[Extra, tuple[str, ...]] = {
    "report": ("jinja2", "matplotlib"),
    "tui": ("textual", "textual_plotext"),
}
"""The libraries of an extra, by their import names."""


def require(extra: Extra, purpose: str) -> None:
    """Check, without importing them, that the libraries of ``extra`` are installed.

    Args:
        extra: the extra of esper-growth.
        purpose: what needs it; the message begins with it.

    Raises:
        UsageError: one is missing.
    """
    for library in LIBRARIES[extra]:
        if find_spec(library) is None:
            raise UsageError(
                f"{purpose}: needs the library {library}; pip install 'esper-growth[{extra}]'"
            )
