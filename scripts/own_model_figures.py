"""The table of own models from the committed results, for ``write_figures.py``."""

from pathlib import Path
from typing import Any

import numpy as np
from policy_figures import read

from esper.karn.intervals import interval
from esper_lab.ladder_steps import points_text

PLAIN = "plain"
STATIC = PLAIN, "wider, equal parameters", "longer, equal time"
KINDS = {"wider layers": "widen", "residual seeds": "rule"}
"""A policy of each kind of growth."""
MODELS = {
    "residual CNN": "residual CNN of {} parameters, shifted digits",
    "pretrained CNN": "pretrained CNN of {} parameters, shifted digits",
    "ResNet-18": "ResNet-18 of {} parameters, digits",
    "MLP": "MLP of {} parameters, diabetes",
    "GPT": "small GPT of {} parameters, text",
}


def own_models(results: Path) -> str:
    """What growing is worth on own models, beside the best that does not grow: a table."""
    found = read("own_model_results", results)
    if found is None:
        return "This is not measured yet in this version (`make bench-own`)."
    heads = ["model"]
    for policy in KINDS.values():
        heads += [f"`{policy}`", "best of its size or time that does not grow"]
    rows = []
    for name, text in MODELS.items():
        form = "+.3f" if name == "GPT" else "+.1f"
        row = []
        for kind, policy in KINDS.items():
            arms = found[kind][name]
            row += [points_text(above(arms, arm), form) for arm in (policy, best_static(arms))]
        rows.append([text.format(f"{arms[PLAIN]['runs'][0]['parameters']:,}"), *row])
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def best_static(arms: dict[str, Any]) -> str:
    """Name of the network that does not grow with the highest mean on test."""
    return max(STATIC, key=lambda arm: np.mean([run["test"] for run in arms[arm]["runs"]]))


def above(arms: dict[str, Any], arm: str, opponent: str = PLAIN) -> tuple[float, float, float]:
    """The mean difference from an opponent with its 95 % interval, paired by seed."""
    pairs = zip(arms[arm]["runs"], arms[opponent]["runs"], strict=True)
    difference = interval(np.array([[run["test"] - base["test"] for run, base in pairs]]))
    return difference.mean[0], difference.low[0], difference.high[0]
