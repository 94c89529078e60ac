"""The table of a result beside its twin, and whether growth paid, in the user's own figure."""

from collections.abc import Sequence
from math import isnan

from esper.own_models.growth_result import GrowthResult
from esper.own_models.objectives import Validation


def comparison(result: GrowthResult) -> str:
    """A result beside its twin: validation, test, parameters and time, a line each."""
    rows = [("trained", result)]
    if result.twin is not None:
        rows = [("grown", result), ("never grown", result.twin)]
    cells = [("", "test", "validation", "parameters", "time")]
    for name, each in rows:
        test = "not given" if each.test is None else each.test.shown()
        size, time = f"{each.parameters:,}", f"{each.seconds:,.1f} s"
        cells.append((name, test, each.validation.shown(), size, time))
    return "\n".join(table_lines(cells, labels=3))


def verdict(result: GrowthResult) -> str:
    """Whether growth paid, and the differences by which it did or did not.

    The difference on validation decides: it must exceed the price of the parameters. The difference
    on the test split stands beside it, because the choice was made by validation.
    """
    if old_data := result.old_data:
        words = {"before": "before", "after": "now", "stripped": "without the seeds"}
        figures = ", ".join(f"{each.shown()} {words[name]}" for name, each in old_data.items())
        return f"{_verdict(result)}\nold data: {figures}"
    return _verdict(result)


def _verdict(result: GrowthResult) -> str:
    twin = result.twin
    actions = any(record.actions for record in result.history)
    if twin is None:
        if not actions and not result.grew:
            return "trained without growing"
        return "grown without a twin that never grows: twin=True says whether growth pays"
    if isnan(twin.worth) and not isnan(result.worth):
        return "growth paid: the twin that never grows diverged"
    if not result.grew and not actions:
        return "nothing grew: the network is that of the plain loop"
    answer = "growth paid" if result.paid else "growth did not pay"
    answer = answer if result.grew else "nothing that grew was kept"
    growth = result.parameters - result.host_parameters
    price = f"; the price of {growth:,} more parameters is {_amount(twin.validation, result.cost)}"
    lines = [f"{answer}: {_difference(result, 'validation')}{price if growth else ''}"]
    if result.test is not None and twin.test is not None:
        lines.append(_difference(result, "test"))
    return "\n".join(lines)


def _difference(result: GrowthResult, split: str) -> str:
    """Both figures of a split with their sizes, and how far they differ."""
    assert result.twin is not None
    one, two = (getattr(each, split) for each in (result, result.twin))
    sizes = [f"{each.parameters:,}" for each in (result, result.twin)]
    interval = ""
    if split in result.difference:
        bounds = [_number(two, bound) for bound in result.difference[split]]
        interval = f" [{bounds[0]}, {bounds[1]}]"
    unit = "points" if two.unit == "accuracy" else two.unit
    difference = f"{_number(two, one.figure - two.figure)}{interval} {unit} on {split}"
    low, high = result.difference.get(split, (1.0, 1.0))
    within = low <= 0.0 <= high
    noise = ", within the noise of its samples" if within and one.net > two.net else ""
    figures = one.shown(), two.shown().removeprefix(f"{two.unit} ")
    return (
        f"grown {figures[0]} ({sizes[0]} parameters) against {figures[1]} ({sizes[1]}): "
        f"{difference}{noise}"
    )


def _number(kind: Validation, value: float) -> str:
    """A signed difference of figures of a kind, without a negative zero."""
    if kind.unit == "accuracy":
        return f"{round(100 * value, 1) + 0.0:+.1f}"
    return f"{value:+.3g}"


def _amount(kind: Validation, net: float) -> str:
    """An amount of ``Validation.net`` in its unit."""
    if kind.unit == "accuracy":
        return f"{100 * net:.1f} points"
    return f"{net:.3g} of R²" if kind.unit == "R²" else f"{net:.3g} of the score"


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
