"""The table and the picture of a result."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from esper.leyline.extras import require
from esper.leyline.stages import Stage
from esper.own_models.growth_result import EpochRecord, GrowthResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGE_COLOURS = {
    Stage.GERMINATED: "#d9d9d9",
    Stage.TRAINING: "#fdd49e",
    Stage.BLENDING: "#a6cee3",
    Stage.HOLDING: "#80b1d3",
    Stage.FOSSILISED: "#74c476",
}


def draw(history: Sequence[EpochRecord], path: str | Path | None = None) -> "Figure":
    """Draw score and parameters over the epochs, with a band for each seed, coloured by stage.

    Args:
        history: at least one epoch.
        path: file to write, in the format of its ending; None for none.

    Raises:
        UsageError: matplotlib is missing.
    """
    require("report", "plot")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    epochs = [record.epoch for record in history]
    slots = [
        slot for slot in history[0].stages if any(r.stages[slot] in STAGE_COLOURS for r in history)
    ]
    figure = Figure(figsize=(8, 5 + 0.25 * len(slots)), layout="constrained")
    curves, sizes, bands = figure.subplots(
        3, sharex=True, height_ratios=(3, 1.5, max(0.4, 0.35 * len(slots)))
    )
    if history[0].accuracy is not None:
        curves.plot(epochs, [record.accuracy for record in history], label="accuracy")
    curves.plot(epochs, [record.score for record in history], label="score")
    curves.set_ylabel("on validation")
    curves.legend(loc="lower right")
    sizes.plot(epochs, [record.parameters for record in history], drawstyle="steps-post")
    sizes.set_ylabel("parameters")
    for row, slot in enumerate(slots):
        for record in history:
            colour = STAGE_COLOURS.get(record.stages[slot])
            if colour is not None:
                bands.barh(row, 1.0, left=record.epoch - 0.5, color=colour, height=0.8)
    bands.set_yticks(range(len(slots)), slots)
    bands.invert_yaxis()
    bands.set_xlabel("epoch")
    if slots:
        handles = [Patch(color=c, label=stage.name) for stage, c in STAGE_COLOURS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize="small")
    if path:
        figure.savefig(path)
    return figure


def comparison(grown: GrowthResult) -> str:
    """A result beside its twin: validation, test, parameters and time, a line each."""
    rows = [("trained", grown)]
    if grown.twin is not None:
        rows = [("grown", grown), ("never grown", grown.twin)]
    cells = [("", "test", "validation", "parameters", "time")]
    for name, result in rows:
        test = "not given" if result.test is None else result.test.shown()
        size, time = f"{result.parameters:,}", f"{result.seconds:,.1f} s"
        cells.append((name, test, result.validation.shown(), size, time))
    return "\n".join(table_lines(cells, labels=3))


def table_lines(rows: Sequence[Sequence[str]], labels: int) -> list[str]:
    """A line for each row, its cells two spaces apart and as wide as the widest of their column.

    Args:
        rows: cells, alike in number.
        labels: number of columns that are aligned on the left; those after them are on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < labels else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
