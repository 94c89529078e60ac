"""The ladder of an evaluation as a picture and as tables."""

from pathlib import Path

import msgspec
from matplotlib.axes import Axes

from esper.karn.report.drawing import DASHES, MUTED, SERIES, Picture, new_figure, picture
from esper.karn.report.tables import Table
from esper.leyline.errors import UsageError
from esper.leyline.run_files import LADDERS
from esper_lab.evaluation import Evaluation, PricedRung, read_evaluation
from esper_lab.ladder_steps import FRONT_HEADS, front, ladder_rows, sentences, steps

FRONT_HEIGHT = 2.4
"""Height of the front below the ladder in inches, with its labels."""
FRONT_TEXT = (
    "The hosts by thirds of the price of parameters. Accuracy is the expected accuracy on the test "
    "split."
)
MARGIN, BELOW, GAP = 2.3, 0.48, 0.6
"""Inches left of the axes, below them, and between ladder and front."""


def ladders(run: Path, label: str) -> tuple[list[Picture], list[Table], list[str]]:
    """What the report of a run shows of the evaluations that ``esper evaluate`` left in it.

    Args:
        run: its directory.
        label: its name in the report, which stands for the policy.

    Returns:
        pictures and tables; and why other files were refused.
    """
    evaluations, refusals = [], []
    for path in sorted((run / LADDERS).glob("*.json")):
        try:
            evaluation = read_evaluation(path)
        except UsageError as error:
            refusals.append(str(error))
            continue
        if evaluation.suite == path.stem:
            evaluations.append(msgspec.structs.replace(evaluation, policy=label))
        else:
            refusals.append(f"evaluation: {path} is of {evaluation.suite}; rename it")
    tables = [table for evaluation in evaluations for table in ladder_tables(evaluation)]
    return [ladder_picture(evaluation) for evaluation in evaluations], tables, refusals


def ladder_picture(evaluation: Evaluation) -> Picture:
    """Utility of every rung with its interval, the policy in colour; below it the front.

    The front is accuracy against parameters added, a point for each third of the price.
    """
    rows, front_rows = steps(evaluation), front(evaluation)
    total_height = 0.6 + 0.27 * len(rows) + (FRONT_HEIGHT if front_rows else 0.0)
    figure = new_figure(height=total_height, margin=MARGIN)
    axes = figure.add_subplot(xlabel="utility on the test split, points")
    for rank, row in enumerate(rows):
        mean, low, high = row.utility
        colour = SERIES[0] if row.rung.policy else MUTED
        axes.plot([low, high], [rank, rank], color=colour, linewidth=2.0)
        axes.plot(mean, rank, "o", color=colour)
    axes.set_yticks(range(len(rows)), [row.rung.name for row in rows])
    text = (
        f"Mean over {len(evaluation.tasks)} fresh hosts of {evaluation.suite}, with 95 % intervals "
        f"over hosts. Rules were tuned on {evaluation.training_hosts} other hosts."
    )
    if front_rows:
        box = axes.get_position()
        bottom = (FRONT_HEIGHT + BELOW) / total_height
        axes.set_position((box.x0, bottom, box.width, box.y1 - bottom))
        size = box.width, (FRONT_HEIGHT - GAP) / total_height
        _draw_front(figure.add_axes((box.x0, BELOW / total_height, *size)), front_rows)
        text += (
            " Below: mean accuracy and parameters added in each third of the prices; the larger "
            "the point, the higher the price."
        )
    return picture(figure, f"{evaluation.policy} on {evaluation.suite}", text)


def _draw_front(axes: Axes, rows: list[PricedRung]) -> None:
    names = list(dict.fromkeys(row.rung for row in rows))
    policies = [name for name in names if name.startswith("policy")]
    for number, name in enumerate(names):
        thirds = [row for row in rows if row.rung == name]
        parameters, score = (
            [getattr(row, field)[0] for row in thirds] for field in ("added", "score")
        )
        colour = SERIES[policies.index(name)] if name in policies else MUTED
        axes.plot(parameters, score, DASHES[number % len(DASHES)], color=colour, label=name)
        for third, point in enumerate(zip(parameters, score, strict=True)):
            axes.plot(*point, "o", color=colour, markersize=3.0 + 2.0 * third)
    axes.set_xlabel("parameters added")
    axes.set_ylabel("test accuracy, %")
    axes.legend(loc="center right", bbox_to_anchor=(-0.22, 0.5))


def ladder_tables(evaluation: Evaluation) -> list[Table]:
    """See ``ladder_rows``; beside the ladder of all hosts stands what it says."""
    title = f"{evaluation.policy} on {evaluation.suite}"
    text = " ".join(sentences(evaluation))
    if evaluation.shipped is not None:
        text += f" The controls ship with Esper ({evaluation.shipped})."
    tables = []
    for part, heads, rows in ladder_rows(evaluation):
        label, words, of_part = "rung", "" if part else text, part and f": {part}"
        if heads == FRONT_HEADS:
            label, words, of_part = "price, rung", FRONT_TEXT, ", by price"
        cells = [
            [", ".join(filter(None, labels)), *numbers]
            for labels, numbers in ((row[:2], row[2:]) for row in rows)
        ]
        tables.append(Table(title + of_part, words, [label, *heads], cells))
    return tables
