"""Several seeds of ``esper grow --model`` in one table."""

from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from esper.own_models.growth_result import table_lines
from esper.own_models.objectives import Validation


def growth_seeds_table(runs: Mapping[int, Mapping[str, Any] | None]) -> str:
    """A line for each seed, and the means with standard deviations over seeds.

    Accuracies are in percent and their gains in points; other figures are as they are.

    Figures are those of the test split, or of validation without one.

    Args:
        runs: content of ``result.json`` by seed; None where there is none.
    """
    split = "test" if all(r is None or r["grown"]["test"] for r in runs.values()) else "validation"
    lines: list[tuple[str, ...]] = [
        ("seed", f"grown ({split})", f"never grown ({split})", "parameters", "gain")
    ]
    grown, never, gains, payoffs = [], [], [], 0
    percent = all(r is None or Validation(**r["grown"][split]).in_percent for r in runs.values())
    scale, unit = (100.0, " %") if percent else (1.0, "")
    for seed, result in runs.items():
        if result is None:
            lines.append((str(seed), "failed", "", "", ""))
            continue
        model, twin = result["grown"], result["twin"]
        grown.append(_figure(model[split]))
        cells = [str(seed), Validation(**model[split]).shown(), "", f"{model['parameters']:,}", ""]
        if twin is not None:
            never.append(_figure(twin[split]))
            gains.append(grown[-1] - never[-1])
            payoffs += result["paid"]
            cells[2] = Validation(**twin[split]).shown()
            cells[4] = _number(gains[-1], scale, "+")
        lines.append(tuple(cells))
    means = (_mean(values, scale, unit) for values in (grown, never))
    lines.append(("mean", *means, "", _mean(gains, scale, "", "+")))
    text = table_lines(lines, labels=len(lines[0]))
    if len(grown) > 1:
        kind = "gains are in points of accuracy; " if percent and gains else ""
        text.append(f"{kind}± is the standard deviation over seeds")
    if gains:
        text.append(f"growth paid on validation after its price in {payoffs} of {len(gains)} seeds")
    return "\n".join(text)


def _figure(validation: Mapping[str, Any]) -> float:
    """The figure that ``Validation.shown`` shows, as a number."""
    figures = (validation[name] for name in ("metric", "accuracy", "score"))
    return float(next(value for value in figures if value is not None))


def _number(value: float, scale: float, sign: str = "") -> str:
    return f"{scale * value:{sign}.1f}" if scale > 1.0 else f"{value:{sign}.4f}"


def _mean(values: list[float], scale: float, unit: str, sign: str = "") -> str:
    if not values:
        return ""
    deviation = f" ± {_number(stdev(values), scale)}" if len(values) > 1 else ""
    return f"{_number(fmean(values), scale, sign)}{deviation}{unit}"
