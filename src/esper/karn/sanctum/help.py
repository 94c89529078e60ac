"""The page that explains the keys and the signs."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from esper.karn.sanctum.heads import State
from esper.karn.sanctum.palette import GLYPHS, Palette, stage_name
from esper.karn.sanctum.rows import Status

KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    "Pages": (
        ("1 2 3 4 5", "overview, policy, environment, anomalies, scoreboard"),
        ("Enter", "open what the cursor is on"),
        ("t", "dark or light"),
        ("?", "this page; Escape closes it"),
        ("q, Ctrl+C", "close Sanctum; the training is not touched"),
    ),
    "Tables": (
        ("↑ ↓ PgUp PgDn", "move the cursor"),
        ("s  S", "overview: sort by the next column; turn the order round"),
        ("f  /  Escape", "overview: next filter; search; show all again"),
        ("←  →  w", "environment: previous, next; with waits or without"),
    ),
    "Time": (
        ("Space", "pause; go on"),
        ("r", "replay from the beginning"),
        ("+  -", "faster; slower"),
        (",  .", "one step back; forward"),
        ("<  >", "one round back; forward"),
        ("l", "back to the present"),
    ),
}
"""Every key, by what it is about."""


class Help(ModalScreen[None]):
    """See the module."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "app.pop_screen", "close"),
    ]

    def __init__(self, palette: Palette):
        super().__init__()
        self.palette = palette

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(help_text(self.palette))


def help_text(palette: Palette) -> Text:
    """Keys and signs."""
    text = Text()
    for subject, keys in KEYS.items():
        text.append(f"{subject}\n", style=palette.accent)
        for key, meaning in keys:
            text.append(f"  {key:<15}", style="bold").append(f"{meaning}\n")
    text.append("A slot's life\n", style=palette.accent)
    for stage, glyph in GLYPHS.items():
        if stage:
            text.append(f"  {glyph} {stage_name(stage):<11}", style=palette.stage(stage))
            if stage in (4, 9):
                text.append("\n")
    text.append("\nAn environment  ", style=palette.accent)
    text.append("  ".join(status.value for status in Status))
    text.append("\nA head  ", style=palette.accent)
    text.append("  ".join(state.value for state in State))
    text.append(
        "\n  missing: no gradient reached the head. NaN: one did, and it was no number."
        "\n  no choice: in no decision had the head more than one option.\n"
    )
    text.append("Gain", style=palette.accent)
    text.append(" is accuracy above that of the never-grow twin of the same group.")
    return text
