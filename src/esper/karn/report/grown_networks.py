"""What the report shows of networks that ``esper.grow`` grew: did it pay, what grew, at what cost.

The words are those of the network's own user: the metric in its unit, parameters, time.
"""

from collections.abc import Callable
from pathlib import Path

from esper.karn.grown_runs import inspect_grown, read_growth
from esper.karn.learning_diagnosis import Verdict
from esper.karn.report.drawing import DASHES, SERIES, Picture, curve_figure, picture, whole_rounds
from esper.karn.report.tables import Table, moment
from esper.leyline.errors import UsageError
from esper.leyline.events import POINTS, GrowthEpochCompleted


def figure_text(unit: str, value: float) -> str:
    """A figure in its unit, an accuracy in percent."""
    return f"{POINTS * value:.1f} %" if unit == "accuracy" else f"{value:.4g}"


class GrownNetwork:
    """A folder of ``esper.grow``.

    Args:
        folder: the run directory.

    Raises:
        UsageError: nothing has happened in it yet.
    """

    def __init__(self, folder: Path):
        self.label, self.growth = folder.resolve().name, read_growth(folder)
        self.info = inspect_grown(folder, self.growth)
        if self.growth.start is None:
            raise UsageError(f"run: {folder} has no events yet; wait for the first epoch")
        self.start = self.growth.start

    def moment(self) -> str:
        """When it began."""
        return moment(self.info.started)

    def summary(self) -> str:
        """What was trained, in a sentence."""
        start = self.start
        return (
            f"{start.model} of {start.parameters:,} parameters, {start.epochs} epochs, policy "
            f"{start.policy}, {start.tries} {'try' if start.tries == 1 else 'tries'}; growth by a "
            f"factor of e must gain {POINTS * start.price:.3g} points to pay."
        )

    def verdict(self) -> Verdict | None:
        """Whether growth paid; None before it is known."""
        end = self.growth.end
        if end is None:
            return None
        return Verdict("learned" if end.paid else "not learning", end.verdict.replace("\n", "; "))

    def notes(self) -> list[str]:
        """What a reader must know before the figures."""
        if self.info.status == "finished":
            return []
        epochs = f"{self.info.rounds_done} of {self.start.epochs} epochs"
        return [f"{self.label} is {self.info.status} ({epochs} of this part)."]

    def tiles(self) -> list[tuple[str, str, str]]:
        """Figures, sizes and cost: label, value, remark."""
        end, last = self.growth.end, self.growth.last
        tiles = [("status", self.info.status, "")]
        if end is None:
            if last is not None:
                tiles += [
                    (f"{last.unit} on validation", figure_text(last.unit, float(last.figure)), ""),
                    ("parameters", f"{last.parameters:,}", f"{self.start.parameters:,} before"),
                ]
            return tiles
        for split, values in (("validation", end.validation), ("test", end.test)):
            texts = [figure_text(end.unit, float(value)) for value in values]
            if texts:
                twin = f"never grown: {texts[1]}" if len(texts) > 1 else ""
                tiles.append((f"{end.unit} on {split}", texts[0], twin))
        tiles.append(("parameters", f"{end.parameters[0]:,}", f"{self.start.parameters:,} before"))
        seconds = end.seconds
        times = f"{seconds[0] / seconds[1]:.1f} times the twin's" if len(seconds) > 1 else ""
        return [*tiles, ("time", f"{seconds[0]:,.0f} s", times)]

    def tables(self) -> list[Table]:
        """What grew, and the decisions with their evidence."""
        end, tables = self.growth.end, []
        if end is not None:
            rows = [[name, change] for name, change in end.grew.items()]
            text = (
                "Layers with their sizes before and after, and the blueprints of residual seeds."
                if rows
                else "Nothing: the network has the layers that it had."
            )
            tables.append(
                Table(f"What grew in {self.label}", text, ["module", "change"], rows, False)
            )
        decisions = [
            [f"{variant}, try {attempt}" if self.start.tries > 1 else variant, str(epoch), action]
            for variant, attempt, epoch, action in self.growth.decisions()
        ]
        text = (
            "What was tried, with its evidence: figures on validation with and without, after the "
            "same minibatches. A seed germinates, trains behind the network, blends in, and is "
            "fossilised (kept) or pruned."
        )
        heads = ["network", "epoch", "decision"]
        tables.append(Table(f"Decisions in {self.label}", text, heads, decisions, False))
        return tables


Reading = Callable[[GrowthEpochCompleted], float]


def growth_curves(networks: list[GrownNetwork]) -> list[Picture]:
    """Curves over epochs: the figure, parameters and losses, with the twin's dotted."""
    units = {event.unit for each in networks for event in _events(each)}
    if not units:
        return [Picture("Curves", "No epoch is complete yet.")]
    unit = units.pop() if len(units) == 1 else "figure"
    percent = unit == "accuracy"
    pictures = []
    for title, label, reading in (
        (f"{unit.capitalize()} on validation", f"{unit}, %" if percent else unit, _figure(percent)),
        ("Parameters", "parameters", lambda event: float(event.parameters)),
        ("Validation loss", "validation loss", lambda event: float(event.loss)),
        (
            "Training loss",
            "training loss",
            lambda e: float("nan" if e.train_loss is None else e.train_loss),
        ),
    ):
        pictures.append(_curves(networks, title, label, reading))
    return pictures


def _events(network: GrownNetwork) -> list[GrowthEpochCompleted]:
    return [event for curve in network.growth.curves.values() for event in curve.values()]


def _figure(percent: bool) -> Reading:
    return lambda event: (POINTS if percent else 1.0) * float(event.figure)


def _curves(networks: list[GrownNetwork], title: str, label: str, reading: Reading) -> Picture:
    figure, axes = curve_figure(label, xlabel="epoch")
    whole_rounds(axes)
    for number, network in enumerate(networks):
        for (variant, attempt), curve in network.growth.curves.items():
            name = variant if len(networks) == 1 else f"{network.label}, {variant}"
            axes.plot(
                list(curve),
                [reading(event) for event in curve.values()],
                color=SERIES[number % len(SERIES)],
                linestyle=DASHES[2] if variant == "twin" else DASHES[0],
                drawstyle="steps-pre" if label == "parameters" else "default",
                alpha=1.0 if attempt == 1 else 0.5,
                label=name if attempt == 1 else None,
            )
    text = "Of the network that grows, and dotted of its twin that never grows."
    if any(network.start.tries > 1 for network in networks):
        text += " Later tries are pale."
    return picture(figure, title, text)
