"""Base classes of the pages."""

from rich.text import Text
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static

from esper.karn.sanctum.formatting import harmless
from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment

WIDE = 140
"""Columns of a terminal from which pages show two parts side by side."""


class View(Vertical):
    """One of Sanctum's pages. It draws moments of a run and keeps only the last one."""

    title = ""

    class Resized(Message):
        """The page has a new size, on which its content depends."""

    class Chosen(Message):
        """A round, an environment or an environment's episode was opened.

        Attributes:
            round: None for the moment that is shown.
            environment: None for all of them.
        """

        def __init__(self, round_number: int | None, environment: int | None):
            super().__init__()
            self.round, self.environment = round_number, environment

    def __init__(self) -> None:
        super().__init__(id=self.title)
        self._shown: tuple[Moment, Palette] | None = None

    def on_resize(self) -> None:
        """Ask for the page to be drawn in its new size."""
        self.post_message(self.Resized())

    def show(self, moment: Moment, palette: Palette) -> None:
        """Show a moment."""
        self._shown = moment, palette
        self.draw(moment, palette)

    def show_again(self) -> None:
        """Draw the same moment again, after a choice on the page."""
        if self._shown is not None:
            self.draw(*self._shown)

    def draw(self, moment: Moment, palette: Palette) -> None:
        """Draw a moment; each page implements this."""
        raise NotImplementedError


class Lines(Static):
    """Lines of text. The page is laid out again only when their number changes."""

    lines = 0

    def show(self, text: Text) -> None:
        """Show a text."""
        lines = text.plain.count("\n") + 1 if text else 0
        self.update(harmless(text), layout=lines != self.lines)
        self.lines = lines
