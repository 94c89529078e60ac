"""Curves over rounds or steps, drawn with plotext."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.color import Color
from rich.style import Style
from textual.content import Content
from textual_plotext import PlotextPlot

from esper.karn.sanctum.formatting import to_float
from esper.leyline.events import Number


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


@dataclass(frozen=True, slots=True)
class Frame:
    """Limits of the axes, vertical (low, high) and horizontal; None fits the data."""

    low: float | None = None
    high: float | None = None
    left: float | None = None
    right: float | None = None


class Plot(PlotextPlot):
    """A plot with a title and a legend."""

    def __init__(self, title: str, id: str):
        super().__init__(id=id)
        self.caption = title
        self._picture: tuple[Sequence[float], Sequence[Curve], Frame] = (), (), Frame()

    def show(
        self, positions: Sequence[float], curves: Sequence[Curve], frame: Frame | None = None
    ) -> None:
        """Draw curves over ``positions``, the rounds or steps of their values, if they changed."""
        content = positions, curves, frame or Frame()
        if content != self._picture:
            self._picture = content
            self._build(*content)
            self.refresh()

    def _build(self, positions: Sequence[float], curves: Sequence[Curve], frame: Frame) -> None:
        plt = self.plt
        plt.clear_figure()
        self.border_title = self._title(curves)
        plt.xaxes(True, False)
        plt.yaxes(True, False)
        for curve in curves:
            for xs, ys in _pieces(positions, curve.values):
                plt.plot(xs, ys, marker=curve.marker, color=_rgb(curve.style))
        plt.ylim(frame.low, frame.high)
        plt.xlim(frame.left, frame.right)
        ticks = _whole_ticks(positions, frame)
        plt.xticks(ticks, [str(tick) for tick in ticks])
        if frame.low is not None and frame.high is not None:
            levels = [frame.low, (frame.low + frame.high) / 2, frame.high]
            plt.yticks(levels, [format(level, f"{TICK_WIDTH}.2f") for level in levels])

    def _title(self, curves: Sequence[Curve]) -> Content:
        """The caption, followed by the label of every curve in its colour."""
        parts = [Content(self.caption)]
        if len(curves) > 1:
            for curve in curves:
                sample = f"  {_SAMPLE.get(curve.marker, curve.marker)} {curve.label}"
                parts.append(Content.styled(sample, _hex(curve.style)))
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
    triplet = color.get_truecolor()
    return triplet.red, triplet.green, triplet.blue


def _whole_ticks(positions: Sequence[float], frame: Frame) -> list[float]:
    """Up to five integer ticks of the horizontal axis, which counts rounds or steps."""
    if not positions:
        return []
    low = positions[0] if frame.left is None else frame.left
    high = positions[-1] if frame.right is None else frame.right
    return sorted({round(low + part * (high - low) / 4) for part in range(5)})


def _hex(style: str) -> str:
    return "#{:02x}{:02x}{:02x}".format(*_rgb(style))
