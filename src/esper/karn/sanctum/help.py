"""The help screen: keys and glyphs."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from esper.karn.sanctum.palette import GLYPHS, Palette, stage_name
from esper.karn.sanctum.policy_page import State
from esper.karn.sanctum.rows import Status

KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    "Pages": (
        ("1 2 3 4 5", "overview, policy, environment, anomalies, scoreboard"),
        ("Enter", "open the row under the cursor"),
        ("t", "dark or light theme"),
        ("?", "this help; Escape closes it"),
        ("q, Ctrl+C", "close Sanctum; training continues"),
    ),
    "Tables": (
        ("↑ ↓ PgUp PgDn", "move the cursor"),
        ("s  S", "overview: sort by the next column; reverse the order"),
        ("f  /  Escape", "overview: next filter; search; show all again"),
        ("←  →  w", "environment: previous, next; show or hide waits"),
    ),
    "Words": (
        ("lead", "validation accuracy above the twin's, live"),
        ("gain", "test utility above the twin's, in points"),
        ("val. difference", "the same on the validation split"),
    ),
    "Time": (
        ("Space", "pause; continue"),
        ("r", "replay from the beginning"),
        ("+  -", "faster; slower"),
        (",  .", "one step back; forward"),
        ("<  >", "one round back; forward"),
        ("l", "return to the latest data"),
    ),
}
"""All keys and some terms with their meanings, by subject."""


class Help(ModalScreen[None]):
    """The help screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "app.pop_screen", "close"),
    ]

    def __init__(self, palette: Palette):
        super().__init__()
        self.palette = palette

    def compose(self) -> ComposeResult:
        """Yield the help text."""
        with VerticalScroll(id="help"):
            yield Static(help_text(self.palette))


def help_text(palette: Palette) -> Text:
    """Return the text of the help screen."""
    text = Text()
    for subject, keys in KEYS.items():
        text.append(f"{subject}\n", style=palette.accent)
        for key, meaning in keys:
            text.append(f"  {key:<15}", style="bold").append(f"{meaning}\n")
    text.append("Stages of a slot\n", style=palette.accent)
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
        "\n  missing: the head had no gradient. not finite: a value was NaN or infinite."
        "\n  no choice: the head never had more than one option.\n"
    )
    text.append("Gain", style=palette.accent)
    text.append(" is test utility above that of the never-grow twin of the same group.")
    return text
