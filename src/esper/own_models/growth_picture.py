"""The picture of growth."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from esper.leyline.extras import require
from esper.leyline.stages import Stage
from esper.own_models.growth_result import EpochRecord

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
    results = [record.validation for record in history]
    if results[0].accuracy is not None:
        curves.plot(epochs, [each.accuracy for each in results], label="accuracy")
    curves.plot(epochs, [each.score for each in results], label="score")
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
