"""Base classes of the pages."""

from rich.text import Text
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static

from esper.karn.sanctum.formatting import harmless
from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment

WIDE = 140
"""Least width of a terminal, in characters, for pages with two parts side by side."""


class View(Vertical):
    """One of Sanctum's pages. It draws moments of a run and keeps the last one drawn."""

    title = ""

    class Resized(Message):
        """The size of the page changed, so it must be redrawn."""

    class Chosen(Message):
        """The user opened a round, an environment, or an episode of an environment.

        Attributes:
            round: number of the round; None for the moment that is shown.
            environment: number of the environment; None for all of them.
        """

        def __init__(self, round_number: int | None, environment: int | None):
            super().__init__()
            self.round, self.environment = round_number, environment

    def __init__(self) -> None:
        super().__init__(id=self.title)
        self._shown: tuple[Moment, Palette] | None = None

    def on_resize(self) -> None:
        """Request that the page be redrawn in its new size."""
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
    """Lines of text. The page is laid out again only when the number of lines changes."""

    lines = 0

    def show(self, text: Text) -> None:
        """Show a text."""
        lines = text.plain.count("\n") + 1 if text else 0
        self.update(harmless(text), layout=lines != self.lines)
        self.lines = lines
