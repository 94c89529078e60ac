"""What happened while a module grew, epoch by epoch, and its picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from esper.leyline.extras import require
from esper.leyline.stages import Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGE_COLOURS = {
    Stage.GERMINATED: "#d9d9d9",
    Stage.TRAINING: "#fdd49e",
    Stage.BLENDING: "#a6cee3",
    Stage.HOLDING: "#80b1d3",
    Stage.FOSSILISED: "#74c476",
}


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch of growth.

    Attributes:
        epoch: number of the epoch, from 1.
        train_loss: mean training loss; None if the training loop did not report it.
        loss: validation loss.
        score: validation score, at most 1; see ``own_models.objectives``.
        accuracy: validation accuracy; None without classes.
        metric: value of the user's metric; None without one.
        parameters: parameters of the module and of all its seeds.
        added: parameters of the seeds that act on the output.
        stages: stage of each slot after the epoch's action, by slot.
        contributions: score with the seed minus that without it, by slot with an acting seed.
        actions: what was done after the epoch and why, one line each.
    """

    epoch: int
    train_loss: float | None
    loss: float
    score: float
    accuracy: float | None
    metric: float | None
    parameters: int
    added: int
    stages: dict[str, Stage]
    contributions: dict[str, float]
    actions: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """The record as numbers, texts, lists and dicts."""
        return asdict(self) | {"stages": {slot: int(stage) for slot, stage in self.stages.items()}}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of ``plain``."""
        stages = {slot: Stage(stage) for slot, stage in plain["stages"].items()}
        return cls(**{**plain, "stages": stages})

    def line(self, epochs: int) -> str:
        """The record in one line."""
        shown = f"score {self.score:.3f}"
        if self.accuracy is not None:
            shown = f"accuracy {100 * self.accuracy:.1f} %"
        if self.metric is not None:
            shown = f"metric {self.metric:.4g}"
        train = "" if self.train_loss is None else f"train {self.train_loss:.4f}  "
        text = f"epoch {self.epoch:>3}/{epochs}  {train}loss {self.loss:.4f}  {shown}"
        text = f"{text}  {self.parameters:,} parameters"
        return "\n".join([text, *(f"    {action}" for action in self.actions)])


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
    if path is not None:
        figure.savefig(path)
    return figure
