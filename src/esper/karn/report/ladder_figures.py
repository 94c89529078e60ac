"""The ladder of an evaluation as a picture and as tables."""

import numpy as np

from esper.karn.comparisons import budget_text, differences_text
from esper.karn.ladder import HEADS, headroom_text, step_cells, steps
from esper.karn.report.drawing import MUTED, SERIES, Picture, new_figure, picture
from esper.karn.report.tables import Table
from esper.leyline.evaluation import Evaluation


def ladder_picture(found: Evaluation) -> Picture:
    """Utility of every rung with its interval, the policy in colour."""
    rows = steps(found)
    figure = new_figure(height=0.6 + 0.27 * len(rows), left=2.3)
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
    return picture(figure, f"{found.policy} on {found.suite}", text)


def ladder_tables(found: Evaluation) -> list[Table]:
    """The rungs over all hosts, and for each task where there are several."""
    title = f"{found.policy} on {found.suite}"
    parts = (headroom_text(found), differences_text(found), budget_text(found))
    text = " ".join(part for part in parts if part)
    if found.shipped is not None:
        text += f" The controls ship with Esper ({found.shipped})."
    tables = [_table(found, title, text, None)]
    names = list(dict.fromkeys(found.tasks))
    if len(names) > 1:
        tables += [_table(found, f"{title}: {name}", "", name) for name in names]
    return tables


def _table(found: Evaluation, title: str, text: str, task: str | None) -> Table:
    rows = steps(found, None if task is None else np.array(found.tasks) == task)
    return Table(title, text, ["rung", *HEADS], [[r.rung.name, *step_cells(r)] for r in rows])
