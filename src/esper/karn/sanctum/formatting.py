"""How numbers and times are written, and lines drawn in characters."""

import math
from collections.abc import Sequence

from rich.text import Text

from esper.leyline.events import Number

MISSING = "missing"
"""What stands where there is no number. Never 0, and not NaN, which is one that came out wrong."""

_BARS = "▁▂▃▄▅▆▇█"


def harmless(text: Text) -> Text:
    """``text``, its control characters replaced: a run copied from elsewhere may hold any."""
    if not text.plain.replace("\n", "").isprintable():
        text.plain = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.plain)
    return text


def to_float(value: Number | None) -> float | None:
    """The number an event holds; None where it is missing."""
    return None if value is None else float(value)


def written(value: Number | None, form: str = ".3f") -> str:
    """A number in the given form; ``missing``, ``NaN``, ``Inf`` or ``-Inf`` where it is none."""
    number = to_float(value)
    if number is None:
        return MISSING
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Inf" if number > 0 else "-Inf"
    return format(number, form)


def compact(value: Number | None) -> str:
    """A number of any size in at most eight characters."""
    number = to_float(value)
    if number is None or not math.isfinite(number):
        return written(value)
    size = abs(number)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{number:.1e}"
    return f"{number:.4f}" if size < 10 else f"{number:.1f}"


def count(value: float) -> str:
    """A whole number with its thousands marked."""
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def sparkline(values: Sequence[Number | None], width: int) -> str:
    """The last ``width`` values as bars between their least and greatest.

    ``×`` stands for one that is not finite, ``·`` for a missing one.
    """
    recent = [to_float(value) for value in values[-width:]] if width > 0 else []
    finite = [v for v in recent if v is not None and math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)

    def bar(value: float | None) -> str:
        if value is None:
            return "·"
        if not math.isfinite(value):
            return "×"
        share = (value - low) / (high - low) if high > low else 0.0
        return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]

    return "".join(map(bar, recent))


def gauge(share: float, width: int) -> str:
    """A bar that is full at ``share`` 1, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def trend(values: Sequence[Number | None], window: int = 5) -> str:
    """Where a line is going: ``▲`` up, ``▼`` down, ``=`` neither, nothing while that is unknown.

    Compares the means of the last two windows; a change below a tenth counts as none.
    """
    numbers = [to_float(value) for value in values]
    finite = [v for v in numbers if v is not None and math.isfinite(v)]
    size = min(window, len(finite) // 2)
    if size == 0:
        return " "
    before = sum(finite[-2 * size : -size]) / size
    now = sum(finite[-size:]) / size
    if abs(now - before) <= 0.1 * max(abs(before), abs(now)):
        return "="
    return "▲" if now > before else "▼"
