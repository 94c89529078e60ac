"""What all views have in common."""

from rich.text import Text
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static

from esper.karn.sanctum.formatting import harmless
from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment

WIDE = 140
"""Columns from which on pages stand two abreast."""


class View(Vertical):
    """One of Sanctum's pages. It is shown moments; it keeps nothing of a run itself."""

    title = ""

    class Resized(Message):
        """A page and all in it have another size: what it draws depends on that."""

    def on_resize(self) -> None:
        self.post_message(self.Resized())

    def show(self, moment: Moment, palette: Palette) -> None:
        """Draw a moment."""
        raise NotImplementedError


class Lines(Static):
    """Text of some lines. The page is laid out anew only when their number changes."""

    lines = 0

    def show(self, text: Text) -> None:
        """Show other text."""
        lines = text.plain.count("\n") + 1 if text else 0
        self.update(harmless(text), layout=lines != self.lines)
        self.lines = lines
