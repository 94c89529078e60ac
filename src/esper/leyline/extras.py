"""Libraries that not every user needs, by the extra of the distribution that installs them."""

from importlib.util import find_spec
from typing import Literal

from esper.leyline.errors import UsageError

Extra = Literal["onnx", "report", "tui", "video"]
LIBRARIES: dict[Extra, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript"),
    "report": ("jinja2", "matplotlib"),
    "tui": ("textual", "textual_plotext"),
}
"""The libraries that every use of an extra needs, by their import names, of those in ``all``."""


def require(extra: Extra, purpose: str, *more: str) -> None:
    """Check, without importing them, that libraries of ``extra`` are installed.

    Args:
        extra: the extra of esper-growth.
        purpose: what needs it; the message begins with it.
        more: libraries of the extra that this purpose needs besides ``LIBRARIES``.

    Raises:
        UsageError: one is missing.
    """
    for library in (*LIBRARIES.get(extra, ()), *more):
        if find_spec(library) is None:
            raise UsageError(
                f"{purpose}: needs the library {library}; pip install 'esper-growth[{extra}]'"
            )
