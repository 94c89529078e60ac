"""Glyphs, colours and names, and numbers as text, bars and sparklines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from esper.leyline.actions import Op
from esper.leyline.events import Number
from esper.leyline.stages import Stage

GLYPHS: dict[int, str] = {
    0: " ",
    Stage.DORMANT: "·",
    Stage.GERMINATED: "○",
    Stage.TRAINING: "◔",
    Stage.BLENDING: "◑",
    Stage.HOLDING: "◕",
    Stage.FOSSILISED: "●",
    Stage.PRUNED: "✕",
    Stage.EMBARGOED: "⊘",
    Stage.RESETTING: "↺",
}
"""Glyph of each stage: a circle that fills up. 0 means that the host lacks the slot."""


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours by role, as ``rich`` style strings."""

    stages: dict[int, str]
    good: str
    bad: str
    warning: str
    muted: str
    accent: str
    grown: str
    twin: str
    cursor: str

    def stage(self, stage: int) -> str:
        """Return the style of a stage."""
        return self.stages.get(stage, self.muted)


_STAGES = {
    Stage.GERMINATED: ("#7dd3fc", "#075985"),
    Stage.TRAINING: ("#facc15", "#6b4b00"),
    Stage.BLENDING: ("#fb923c", "#8f3f05"),
    Stage.HOLDING: ("#c4a7ff", "#5b21b6"),
    Stage.FOSSILISED: ("bold #4ade80", "bold #14532d"),
    Stage.PRUNED: ("#f87171", "#991b1b"),
    Stage.EMBARGOED: ("#d3a0a0", "#6b3c3c"),
    Stage.RESETTING: ("#a3b1c4", "#3f4a5a"),
}
_ROLES = {
    "good": ("#4ade80", "#14532d"),
    "bad": ("bold #ff7b72", "bold #991b1b"),
    "warning": ("#facc15", "#6b4b00"),
    "muted": ("#9da7b1", "#474f59"),
    "accent": ("bold #7dd3fc", "bold #075985"),
    "grown": ("#4ade80", "#14532d"),
    "twin": ("#8fb3ff", "#1e40af"),
    "cursor": ("on #2d3f55", "on #cfe0f2"),
}
"""Colours on a dark and on a light background."""

DARK, LIGHT = (
    Palette(
        {stage: colours[i] for stage, colours in _STAGES.items()},
        **{role: colours[i] for role, colours in _ROLES.items()},
    )
    for i in range(2)
)


def stage_name(stage: int) -> str:
    """Return the name of a stage."""
    try:
        return Stage(stage).name.lower()
    except ValueError:
        return "no slot" if stage == 0 else f"stage {stage}"


def op_name(op: int) -> str:
    """Return the name of an operation."""
    try:
        return Op(op).name.lower().replace("_", " ").removesuffix(" target")
    except ValueError:
        return f"op {op}"


MISSING = "missing"
"""Text for a missing value, which is neither 0 nor NaN."""

_BARS = "▁▂▃▄▅▆▇█"


def harmless(text: Text) -> Text:
    """Replace control characters in ``text``, which a copied run may contain."""
    if not text.plain.replace("\n", "").isprintable():
        text.plain = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.plain)
    return text


def to_float(value: Number | None) -> float | None:
    """Convert an event's number to a float; None where it is missing."""
    return None if value is None else float(value)


def number_text(value: Number | None, form: str = ".3f") -> str:
    """Format a number; ``missing``, ``NaN``, ``Inf`` or ``-Inf`` where it is not finite."""
    number = to_float(value)
    if number is None:
        return MISSING
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Inf" if number > 0 else "-Inf"
    return format(number, form)


def compact(value: Number | None) -> str:
    """Format a number of any size in about eight characters."""
    number = to_float(value)
    if number is None or not math.isfinite(number):
        return number_text(value)
    size = abs(number)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{number:.1e}"
    return f"{number:.4f}" if size < 10 else f"{number:.1f}"


def difference_text(value: float | None, form: str, palette: Palette) -> Text:
    """Format a difference from the twin in the colour of its sign; a dash for None."""
    if value is None:
        return Text("-", style=palette.muted)
    return Text(number_text(value, form), style=palette.good if value >= 0 else palette.bad)


def count(value: float) -> str:
    """Format a number as an integer with thousands separators."""
    return f"{value:,.0f}"


def count_text(number: int, one: str, plural: str) -> str:
    """Format a number of things with the singular or the plural of their name."""
    return f"{number} {one if number == 1 else plural}"


def sparkline(values: Sequence[Number | None], width: int) -> str:
    """Draw the last ``width`` values as bars between their minimum and maximum.

    ``×`` stands for a value that is not finite, ``·`` for a missing one.
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
    """Draw a bar of ``width`` characters that is full at ``share`` 1."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, eighth = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[eighth] if eighth else "")).ljust(width)


def trend(values: Sequence[Number | None], window: int = 5) -> str:
    """Return a curve's trend: ``▲`` up, ``▼`` down, ``=`` flat, a blank where it is unknown.

    Compares the means of the last two windows; a change of at most 10 % counts as flat.
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
