"""The ladder of an evaluation as a picture and as tables."""

from pathlib import Path

import msgspec
import numpy as np
from matplotlib.axes import Axes

from esper.karn.report.drawing import DASHES, MUTED, SERIES, Picture, new_figure, picture
from esper.karn.report.tables import Table
from esper.leyline.errors import UsageError
from esper.leyline.run_files import LADDERS
from esper_lab.comparisons import budget_text, differences_text
from esper_lab.evaluation import Evaluation, PricedRung, read_evaluation
from esper_lab.ladder_steps import HEADS, headroom_text, step_cells, steps
from esper_lab.price_front import FRONT_HEADS, front, front_cells, price_range

FRONT_HEIGHT = 2.4
"""Height of the front below the ladder in inches, with its labels."""
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
    found, refused = [], []
    for path in sorted((run / LADDERS).glob("*.json")):
        try:
            evaluation = read_evaluation(path)
        except UsageError as error:
            refused.append(str(error))
            continue
        if evaluation.suite == path.stem:
            found.append(msgspec.structs.replace(evaluation, policy=label))
        else:
            refused.append(f"evaluation: {path} is of {evaluation.suite}; rename it")
    tables = [table for evaluation in found for table in ladder_tables(evaluation)]
    return [ladder_picture(evaluation) for evaluation in found], tables, refused


def ladder_picture(found: Evaluation) -> Picture:
    """Utility of every rung with its interval, the policy in colour; below it the front.

    The front is accuracy against parameters added, a point for each third of the price.
    """
    rows, priced = steps(found), front(found)
    whole = 0.6 + 0.27 * len(rows) + (FRONT_HEIGHT if priced else 0.0)
    figure = new_figure(height=whole, left=MARGIN)
    axes = figure.add_subplot(xlabel="utility on the test split, points")
    for place, row in enumerate(rows):
        mean, low, high = row.utility
        colour = SERIES[0] if row.rung.policy else MUTED
        axes.plot([low, high], [place, place], color=colour, linewidth=2.0)
        axes.plot(mean, place, "o", color=colour)
    axes.set_yticks(range(len(rows)), [row.rung.name for row in rows])
    text = (
        f"Mean over {len(found.tasks)} fresh hosts of {found.suite}, with 95 % intervals over "
        f"hosts. Rules were tuned on {found.training_hosts} other hosts."
    )
    if priced:
        box = axes.get_position()
        bottom = (FRONT_HEIGHT + BELOW) / whole
        axes.set_position((box.x0, bottom, box.width, box.y1 - bottom))
        height = FRONT_HEIGHT - GAP
        _draw_front(figure.add_axes((box.x0, BELOW / whole, box.width, height / whole)), priced)
        text += (
            " Below: mean accuracy and parameters added in each third of the prices; the larger "
            "the point, the higher the price."
        )
    return picture(figure, f"{found.policy} on {found.suite}", text)


def _draw_front(axes: Axes, rows: list[PricedRung]) -> None:
    names = list(dict.fromkeys(row.rung for row in rows))
    policies = [name for name in names if name.startswith("policy")]
    for number, name in enumerate(names):
        own = [row for row in rows if row.rung == name]
        added, score = ([getattr(row, field)[0] for row in own] for field in ("added", "score"))
        colour = SERIES[policies.index(name)] if name in policies else MUTED
        axes.plot(added, score, DASHES[number % len(DASHES)], color=colour, label=name)
        for place, point in enumerate(zip(added, score, strict=True)):
            axes.plot(*point, "o", color=colour, markersize=3.0 + 2.0 * place)
    axes.set_xlabel("parameters added")
    axes.set_ylabel("test accuracy, %")
    axes.legend(loc="center right", bbox_to_anchor=(-0.22, 0.5))


def ladder_tables(found: Evaluation) -> list[Table]:
    """The rungs over all hosts, by price if it was drawn, and by task if there are several."""
    title = f"{found.policy} on {found.suite}"
    parts = (headroom_text(found), differences_text(found), budget_text(found))
    text = " ".join(part for part in parts if part)
    if found.shipped is not None:
        text += f" The controls ship with Esper ({found.shipped})."
    tables = [_table(found, title, text, None)]
    priced = front(found)
    if priced:
        tables.append(_front_table(title, priced))
    names = list(dict.fromkeys(found.tasks))
    if len(names) > 1:
        tables += [_table(found, f"{title}: {name}", "", name) for name in names]
    return tables


def _table(found: Evaluation, title: str, text: str, task: str | None) -> Table:
    rows = steps(found, None if task is None else np.array(found.tasks) == task)
    return Table(title, text, ["rung", *HEADS], [[r.rung.name, *step_cells(r)] for r in rows])


def _front_table(title: str, rows: list[PricedRung]) -> Table:
    text = (
        "The hosts by thirds of the price of parameters. Accuracy is the expected accuracy on the "
        "test split."
    )
    cells = [[f"{price_range(row)}, {row.rung}", *front_cells(row)] for row in rows]
    return Table(f"{title}, by price", text, ["price, rung", *FRONT_HEADS], cells)
