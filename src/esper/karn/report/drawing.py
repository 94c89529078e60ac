"""Figures as inline SVG, with colours from the page's theme, and curves with intervals in them."""

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from esper.karn.intervals import Estimate, Floats, group_means, interval
from esper.karn.report.gather import RunData

NARROW, WIDE = 4.6, 9.6
"""Widths of a figure in inches: half a row of the page, or all of it."""

INK, MUTED, GRID, SURFACE = "#010101", "#020202", "#030303", "#040404"
"""Placeholders for the page's colours; ``_with_theme`` replaces them with CSS variables."""

SERIES = tuple(f"#0500{i:02x}" for i in range(8))
"""Placeholders for the colours of runs, tasks or curves."""

STAGE_COLOURS = {
    name: f"#0600{i:02x}"
    for i, name in enumerate(("GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILISED"))
}
"""Placeholders for the colours of a seed's stages."""

GOOD, BAD = "#070001", "#070002"
"""Placeholders for the colours of good and bad outcomes."""

DASHES = ("-", "--", ":", "-.")
"""Line styles of curves, so that readers can tell them apart without colour."""

_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    SURFACE: "surface",
    GOOD: "good",
    BAD: "bad",
    **{colour: f"series-{i}" for i, colour in enumerate(SERIES)},
    **{colour: f"stage-{name.lower()}" for name, colour in STAGE_COLOURS.items()},
}

_STYLE: Any = {
    # A fixed salt, so that the same run gives the same file.
    "svg.hashsalt": "esper",
    "svg.fonttype": "none",
    # A dollar sign in the name of a run or task must not start a formula.
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    # The default height, without measuring every label, a quarter of the time, for another one.
    "axes.titley": 1.0,
    "axes.labelsize": 8.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.0,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure on the page, or a sentence that says why it is missing.

    Attributes:
        title: its heading.
        text: what the figure shows, or what is missing.
        svg: the SVG element; None where there is nothing to draw.
        wide: whether it takes a whole row of the page.
    """

    title: str
    text: str
    svg: str | None = None
    wide: bool = False


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the style of all figures while they are made and drawn."""
    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(width: float = NARROW, height: float = 2.9, margin: float = 0.74) -> Figure:
    """Return an empty figure, sizes in inches; ``margin`` is the margin left of the axes."""
    figure = Figure(figsize=(width, height))
    # Fixed margins: a layout engine would measure every label several times.
    figure.subplots_adjust(
        left=margin / width, right=1 - 0.12 / width, top=1 - 0.12 / height, bottom=0.48 / height
    )
    return figure


def panels(
    count: int, height: float, ylabel: str = "", sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` axes with titles, two in a row, which also fits on a phone.

    The axes share their x axis, which is the round, and with ``sharey`` also their y axis, whose
    label is ``ylabel``. Each row is ``height`` inches high.
    """
    columns = min(2, count)
    rows = -(-count // columns)
    total = height * rows + 0.35
    figure = new_figure(NARROW, total)
    between = 0.12 if sharey else 0.6
    room = (NARROW - 0.86 - between * (columns - 1)) / columns
    figure.subplots_adjust(
        top=1 - 0.3 / total, wspace=between / room, hspace=0.42 / (height - 0.42)
    )
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey)
    for cell, axes in np.ndenumerate(grid):
        number = cell[0] * columns + cell[1]
        if number >= count:
            axes.remove()
            continue
        if cell[1] == 0 and ylabel:
            axes.set_ylabel(ylabel)
        if number + columns >= count:
            axes.set_xlabel("round")
            axes.tick_params(labelbottom=True)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter("{x:.4g}")
    return figure, grid.ravel()[:count].tolist()


def picture(figure: Figure, title: str, text: str, description: str = "") -> Picture:
    """Convert a figure to a picture; without an SVG if the figure shows no finite value.

    Axes without a legend share one above them, with each label once.

    Args:
        figure: the figure as drawn.
        title: heading, also the SVG's title.
        text: a sentence or two below the figure.
        description: text for screen readers; defaults to ``text``.
    """
    _add_legend(figure)
    for axes in list(figure.axes):
        if not any(_is_drawn(artist) for artist in _data(axes)):
            axes.remove()
    if not figure.axes:
        return Picture(title, "There are no finite values.")
    wide = figure.get_figwidth() > NARROW
    return Picture(title, text, _svg(figure, title, description or text), wide)


def guide(artist: Artist) -> Artist:
    """Mark an artist as a guide line, which shows no data."""
    artist.set_gid("guide")
    return artist


def _add_legend(figure: Figure) -> None:
    handles = {
        label: handle
        for axes in figure.axes
        if axes.get_legend() is None
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if not handles:
        return
    longest = max(map(len, handles))
    columns = max(1, int(figure.get_figwidth() / (0.55 + 0.065 * longest)))
    room = 0.17 * -(-len(handles) // columns) + 0.08
    pars, height = figure.subplotpars, figure.get_figheight()
    figure.set_figheight(height + room)
    scale = height / (height + room)
    figure.subplots_adjust(top=pars.top * scale, bottom=pars.bottom * scale)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=min(columns, len(handles)),
        borderaxespad=0.1,
    )


FEW_GROUPS = 4
"""Groups of environments below which each has a thin curve, instead of an interval over them."""
MAX_POINTS = 300
"""Maximum number of points per curve; longer curves are averaged over blocks of rounds."""


def block_size(rounds: int) -> int:
    """Return how many rounds one point of a curve averages."""
    return max(1, -(-rounds // MAX_POINTS))


def blocks(rounds: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Average rounds ``[R]`` and values ``[R, N]`` over blocks, to at most ``MAX_POINTS`` rows."""
    size = block_size(len(rounds))
    if size == 1:
        return rounds, values
    numbers = group_means(rounds[None].astype(float), size)[0]
    return numbers, group_means(values.T, size).T


def look_of(runs: list[RunData], run: RunData) -> dict[str, Any]:
    """Return colour and dashes of a run among others, and its label where there are several."""
    number = runs.index(run)
    return {
        "color": SERIES[number % len(SERIES)],
        "linestyle": DASHES[number % len(DASHES)],
        "label": run.label if len(runs) > 1 else None,
    }


def curve_figure(ylabel: str, xlabel: str = "round", height: float = 3.0) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes."""
    figure = new_figure(height=height)
    return figure, figure.add_subplot(xlabel=xlabel, ylabel=ylabel)


def labelled_figure(rows: list[str], xlabel: str, height: float) -> tuple[Figure, Axes]:
    """Return a figure with a label per row of its vertical axis."""
    figure = new_figure(height=height, margin=label_width(rows))
    return figure, figure.add_subplot(xlabel=xlabel, yticks=range(len(rows)), yticklabels=rows)


def label_width(labels: list[str]) -> float:
    """Return how many inches the longest of ``labels`` takes left of the axes."""
    return 0.3 + 0.066 * max(map(len, labels))


def whole_rounds(axes: Axes) -> None:
    """Put the ticks of the x axis at whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def curve(
    axes: Axes, rounds: Floats, values: Floats, interval_drawn: bool = True, **look: Any
) -> Estimate:
    """Draw the mean of values ``[R, N]`` over rounds; return the means and their intervals.

    ``look`` has properties of the line; its ``color`` is also that of the interval. A curve of
    fewer than 40 points has dots.
    """
    x, rows = blocks(rounds, values)
    estimate = interval(rows)
    axes.plot(x, estimate.mean, marker="." if len(x) < 40 else "", **look)
    whole_rounds(axes)
    if interval_drawn and np.isfinite(estimate.low).any():
        shade = axes.fill_between(x, estimate.low, estimate.high, color=look["color"], linewidth=0)
        shade.set_alpha(0.18)
    return estimate


def band(
    axes: Axes, run: RunData, values: Floats, where: NDArray[np.int_] | None = None, **look: Any
) -> None:
    """Draw the mean of ``[R, N]`` over groups of environments, with its interval or few groups.

    ``where`` has the indices of the rounds to draw; by default all.
    """
    selection = slice(None) if where is None else where
    rounds, groups = run.rounds[selection], group_means(values[selection], run.start.group_size)
    # An interval over two or three groups is wider than all that they can reach.
    is_small = groups.shape[1] < FEW_GROUPS
    curve(axes, rounds, groups, interval_drawn=not is_small, **look)
    for column in groups.T if is_small and groups.shape[1] > 1 else ():
        x, points = blocks(rounds, column[:, None])
        guide(axes.plot(x, points, color=look["color"], linewidth=0.7, alpha=0.5)[0])


def within(axes: Axes, low: float, high: float) -> None:
    """Limit the vertical axis to what its quantity can be."""
    lower, upper = axes.get_ylim()
    axes.set_ylim(max(lower, low), min(upper, high))


def bands(axes: Axes, runs: list[RunData], outcome: str) -> None:
    """Draw an outcome of every run."""
    for run in runs:
        band(axes, run, run.outcomes[outcome], **look_of(runs, run))


def standalone(drawing: str) -> str:
    """Return the SVG of a picture as a file of its own, with the page's colours in it."""
    page = files("esper.karn.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    colours = re.search(r"^:root \{.*?^\}\n@media.*?^\}\n", page, re.MULTILINE | re.DOTALL)
    assert colours is not None
    opening, content = drawing.split(">", 1)
    ground = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    return f"{opening}><style>{colours[0]}</style>{ground}{content}"


def _artists(axes: Axes) -> list[Artist]:
    return [*axes.lines, *axes.collections, *axes.patches]


def _data(axes: Axes) -> list[Artist]:
    return [artist for artist in _artists(axes) if artist.get_gid() != "guide"]


def _is_drawn(artist: Artist) -> bool:
    """Whether an artist has a finite point."""
    if isinstance(artist, Line2D):
        points = np.column_stack([artist.get_xdata(), artist.get_ydata()]).astype(float)
    elif isinstance(artist, Collection):
        offsets = np.ma.getdata(artist.get_offsets())
        outlines = [path.vertices for path in artist.get_paths()]
        points = offsets if offsets.any() else np.concatenate([*outlines, np.empty((0, 2))])
    else:
        return True
    return bool(np.isfinite(points).all(1).any())


def _svg(figure: Figure, title: str, description: str) -> str:
    """The figure's SVG element, with a title, a description and ids that are unique on the page.

    Artists that hold data are groups whose id contains ``--data-``.
    """
    for index, artist in enumerate(a for axes in figure.axes for a in _artists(axes)):
        artist.set_gid(f"{artist.get_gid() or 'data'}-{index}")
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=no_metadata)
    drawing = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    # A picture's style element would apply to the whole page; the page has this rule already.
    drawing = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", drawing, count=1, flags=re.DOTALL)
    prefix = f"f{hashlib.sha256(title.encode()).hexdigest()[:6]}"
    drawing = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}--", drawing)
    labels = f"{prefix}--title {prefix}--description"
    head = (
        f'<title id="{prefix}--title">{escape(title, quote=False)}</title>'
        f'<desc id="{prefix}--description">{escape(description, quote=False)}</desc>'
    )
    opening, content = drawing.split(">", 1)
    return (
        f'{_with_theme(opening)} role="img" aria-labelledby="{labels}">{head}{_with_theme(content)}'
    )


def _with_theme(drawing: str) -> str:
    """Replace the placeholder colours of a drawing with the page's CSS variables."""
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda match: f"var(--{_VARIABLES[match[0]]})" if match[0] in _VARIABLES else match[0],
        drawing,
    )
