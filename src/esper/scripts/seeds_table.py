"""Several seeds of ``esper grow --model`` in one table."""

from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from esper.simic.own_models.table_text import aligned
from esper.tolaria.own_model.validation import Validation


def growth_seeds_table(found: Mapping[int, Mapping[str, Any] | None]) -> str:
    """A line for each seed, and the means with standard deviations over seeds.

    Figures are those of the test split, or of validation without one.

    Args:
        found: content of ``result.json`` by seed; None where there is none.
    """
    split = "test" if all(r is None or r["grown"]["test"] for r in found.values()) else "validation"
    lines: list[tuple[str, ...]] = [
        ("seed", f"grown ({split})", f"never grown ({split})", "parameters", "gain")
    ]
    grown, never, gains, paid = [], [], [], 0
    for seed, result in found.items():
        if result is None:
            lines.append((str(seed), "failed", "", "", ""))
            continue
        own, twin = result["grown"], result["twin"]
        grown.append(_figure(own[split]))
        cells = [str(seed), Validation(**own[split]).shown(), "", f"{own['parameters']:,}", ""]
        if twin is not None:
            never.append(_figure(twin[split]))
            gains.append(grown[-1] - never[-1])
            paid += result["worth"][0] > result["worth"][1]
            cells[2], cells[4] = Validation(**twin[split]).shown(), f"{gains[-1]:+.4f}"
        lines.append(tuple(cells))
    lines.append(("mean", _mean(grown), _mean(never), "", _mean(gains, "+")))
    text = aligned(lines, left=len(lines[0]))
    if gains:
        text.append(f"growth paid on validation after its price in {paid} of {len(gains)} seeds")
    return "\n".join(text)


def _figure(validation: Mapping[str, Any]) -> float:
    """The figure that ``Validation.shown`` shows, as a number."""
    found = (validation[name] for name in ("metric", "accuracy", "score"))
    return float(next(value for value in found if value is not None))


def _mean(values: list[float], sign: str = "") -> str:
    if not values:
        return ""
    spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.4f}{spread}"
