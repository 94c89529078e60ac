"""Base classes of pages, the table that draws only its visible rows, and plots."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static
from textual_plotext import PlotextPlot

from esper.karn.sanctum.signs import Palette, harmless, to_float
from esper.karn.sanctum.snapshot import Moment
from esper.leyline.events import Number

Cell = Text | str
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of rows of type ``T``.

    Attributes:
        title: heading of the column.
        width: in characters, without the blank that separates columns.
        cell: makes the cell of a row.
        right: whether cells are aligned to the right.
    """

    title: str
    width: int
    cell: Callable[[T], Cell]
    right: bool = False


class RowsTable(ScrollView, can_focus=True, inherit_bindings=False):
    """Rows under a fixed heading.

    Cells are made when they become visible, so a thousand rows cost as much as thirty.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "move(-1000000)", "first", show=False),
        Binding("end", "move(1000000)", "last", show=False),
        Binding("enter", "choose", "open", show=False),
    ]
    cursor: reactive[int] = reactive(0)

    class Choice(Message):
        """A row was opened."""

        def __init__(self, table: "RowsTable", row: int):
            super().__init__()
            self.table, self.row = table, row

    class CursorMove(Message):
        """Another row is under the cursor."""

    class HeadingClick(Message):
        """A column's heading was clicked."""

        def __init__(self, title: str):
            super().__init__()
            self.title = title

    def __init__(self, id: str, nothing: str):
        """
        Args:
            id: id of the widget.
            nothing: text that is shown when there are no rows.
        """
        super().__init__(id=id)
        self.nothing = nothing
        self.columns: Sequence[Column[Any]] = ()
        self.rows: Sequence[Any] = ()
        self.cursor_style = "reverse"

    def show(self, columns: Sequence[Column[T]], rows: Sequence[T], cursor_style: str) -> None:
        """Replace columns and rows; the cursor keeps its row number."""
        self.columns, self.rows, self.cursor_style = columns, rows, cursor_style
        width = sum(column.width + 1 for column in columns)
        size = Size(width, len(rows) + 1)
        if size != self.virtual_size:
            self.virtual_size = size
        self.cursor = max(0, min(self.cursor, len(rows) - 1))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Draw line ``y`` of the widget: the heading, a row, or a blank."""
        scroll_x, scroll_y = self.scroll_offset
        row = y - 1 + scroll_y
        base = self.rich_style
        if y == 0:
            strip = self._line([c.title for c in self.columns], base + Style(bold=True, dim=True))
        elif row < len(self.rows):
            style = base
            if row == self.cursor:
                style = base + Style.parse(self.cursor_style)
            strip = self._line([c.cell(self.rows[row]) for c in self.columns], style)
        elif y == 1 and not self.rows:
            strip = Strip([Segment(self.nothing, base + Style(dim=True))])
        else:
            return Strip.blank(self.size.width, base)
        return strip.crop_extend(scroll_x, scroll_x + self.size.width, base)

    def _line(self, cells: Sequence[Cell], base: Style) -> Strip:
        segments: list[Segment] = []
        blank = Segment(" ", base)
        for column, cell in zip(self.columns, cells, strict=False):
            text = harmless(cell.copy() if isinstance(cell, Text) else Text(cell))
            text.truncate(column.width, overflow="ellipsis")
            text.align("right" if column.right else "left", column.width)
            text.end = ""
            pieces = text.render(self.app.console)
            segments += [Segment(s.text, base + (s.style or Style.null())) for s in pieces]
            segments.append(blank)
        return Strip(segments)

    def watch_cursor(self) -> None:
        """Scroll to the cursor and post ``CursorMove``."""
        height = max(1, self.size.height - 1)
        top = round(self.scroll_y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)
        self.post_message(self.CursorMove())
        self.refresh()

    def action_move(self, by: int) -> None:
        """Move the cursor by ``by`` rows."""
        self.cursor = max(0, min(len(self.rows) - 1, self.cursor + by))

    def action_page(self, pages: int) -> None:
        """Move the cursor by ``pages`` screens."""
        self.action_move(pages * max(1, self.size.height - 2))

    def action_choose(self) -> None:
        """Open the row under the cursor."""
        if self.rows:
            self.post_message(self.Choice(self, self.cursor))

    def on_click(self, event: Click) -> None:
        """Move the cursor to the clicked row; a double click opens it."""
        if event.y == 0:
            self._click_heading(event.x + round(self.scroll_x))
            return
        row = event.y - 1 + round(self.scroll_y)
        if 0 <= row < len(self.rows):
            self.cursor = row
            if event.chain == 2:
                self.action_choose()

    def _click_heading(self, x: int) -> None:
        for column in self.columns:
            if x <= column.width:
                self.post_message(self.HeadingClick(column.title))
                return
            x -= column.width + 1


WIDE = 140
"""Least width of a terminal, in characters, for pages with two parts side by side."""


class View(Vertical):
    """One of Sanctum's pages. It draws moments of a run and keeps the last one drawn."""

    title = ""

    class SizeChange(Message):
        """The size of the page changed, so it must be redrawn."""

    class Choice(Message):
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
        self._latest: tuple[Moment, Palette] | None = None

    def on_resize(self) -> None:
        """Request that the page be redrawn in its new size."""
        self.post_message(self.SizeChange())

    def show(self, moment: Moment, palette: Palette) -> None:
        """Show a moment."""
        self._latest = moment, palette
        self.draw(moment, palette)

    def show_again(self) -> None:
        """Draw the same moment again, after a choice on the page."""
        if self._latest is not None:
            self.draw(*self._latest)

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


@dataclass(frozen=True, slots=True)
class Curve:
    """One line; values that are missing or not finite leave a gap.

    Attributes:
        label: its name.
        values: one per horizontal position of the plot.
        style: a ``rich`` style, of which only the colour is used.
        marker: the marker of its points, so that lines differ without colour.
    """

    label: str
    values: Sequence[Number | None]
    style: str
    marker: str = "braille"


Frame = tuple[float, float, float, float]
"""Limits of the axes: low, high, left and right."""


class Plot(PlotextPlot):
    """A plot with a title and a legend."""

    def __init__(self, title: str, id: str):
        super().__init__(id=id)
        self.caption = title
        self._picture: tuple[Sequence[float], Sequence[Curve], Frame | None] = (), (), None

    def show(
        self, positions: Sequence[float], curves: Sequence[Curve], frame: Frame | None = None
    ) -> None:
        """Draw curves over ``positions``, the rounds or steps of their values, if they changed."""
        if (positions, curves, frame) == self._picture:
            return
        self._picture = positions, curves, frame
        plt = self.plt
        plt.clear_figure()
        self.border_title = self._title(curves)
        plt.xaxes(True, False)
        plt.yaxes(True, False)
        for curve in curves:
            for xs, ys in _pieces(positions, curve.values):
                plt.plot(xs, ys, marker=curve.marker, color=_rgb(curve.style))
        ends = positions[:1], positions[-1:]
        if frame is not None:
            low, high, *limits = frame
            plt.ylim(low, high)
            plt.xlim(*limits)
            levels = [low, (low + high) / 2, high]
            plt.yticks(levels, [format(level, f"{TICK_WIDTH}.2f") for level in levels])
            ends = limits[:1], limits[1:]
        # Whole numbers, as the horizontal axis counts rounds or steps.
        ticks: list[float] = sorted(
            {round(a + part * (b - a) / 4) for a, b in zip(*ends, strict=True) for part in range(5)}
        )
        plt.xticks(ticks, [str(tick) for tick in ticks])
        self.refresh()

    def _title(self, curves: Sequence[Curve]) -> Content:
        """The caption, followed by the label of every curve in its colour."""
        parts = [Content(self.caption)]
        if len(curves) > 1:
            for curve in curves:
                sample = f"  {_SAMPLE.get(curve.marker, curve.marker)} {curve.label}"
                parts.append(
                    Content.styled(sample, "#{:02x}{:02x}{:02x}".format(*_rgb(curve.style)))
                )
        return Content("").join(parts)


TICK_WIDTH = 5
"""Width in characters of the vertical tick labels of a ``Frame`` with limits; the axis adds one."""
_SAMPLE = {"braille": "━"}


def _pieces(
    positions: Sequence[float], values: Sequence[Number | None]
) -> list[tuple[list[float], list[float]]]:
    """The finite segments of a curve, thinned to fewer than 800 points."""
    stride = max(1, len(positions) // 400)
    pieces: list[tuple[list[float], list[float]]] = []
    gap = True
    for x, value in zip(positions[::stride], values[::stride], strict=False):
        y = to_float(value)
        if y is None or not math.isfinite(y):
            gap = True
            continue
        if gap:
            pieces.append(([], []))
        gap = False
        pieces[-1][0].append(x)
        pieces[-1][1].append(y)
    return pieces


def _rgb(style: str) -> tuple[int, int, int]:
    color = Style.parse(style).color or Color.parse("white")
    red, green, blue = color.get_truecolor()
    return red, green, blue
