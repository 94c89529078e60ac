"""The table of own models: what is tuned on what, and what is compared with what."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats
from torch.optim import AdamW


@pytest.fixture
def results(scripts_on_path: None) -> ModuleType:
    import own_model_results

    return own_model_results


class Played:
    """Stands in for training: rate 0.003 is best on validation, and worst on test."""

    def __init__(self, grown: int):
        self.grown, self.calls = grown, 0

    def __call__(self, name: str, plan: Any, seed: int) -> dict[str, Any]:
        self.calls += 1
        growing = plan.policy != "never"
        best = plan.recipe["rate"] == 0.003
        return {
            "validation": (50.0 if best else 40.0) + plan.width / 100,
            "test": (1.0 if best else 2.0) * (10 + seed) + (seed + 3 if growing else 0),
            "parameters": self.grown if growing else 465,
            "processor_seconds": 3.0 if growing else 1.0,
            "seconds": 4.0,
            "peak_mib": 300.0,
        }


def test_recipes_are_chosen_on_validation_and_opponents_are_as_large_and_as_long(
    results: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    played = Played(grown=1553)
    monkeypatch.setattr(results, "alone", played)
    found = results.measured(tmp_path, "MLP", ("heuristic", "rule"))
    plans = {arm: own["plan"] for arm, own in found.items()}
    assert {plan["recipe"]["rate"] for plan in plans.values()} == {0.003}
    assert list(plans) == [*results.STATIC, "heuristic", "rule"]

    def size(width: int) -> int:
        return 10 * width + width + width * width + width + width + 1

    width = plans[results.SAME_SIZE]["width"]
    assert size(width) >= 1553 > size(width - 1)
    # Growth took three times the time of the nets that do not grow, and the wider one is better.
    assert plans[results.SAME_TIME] == plans[results.SAME_SIZE] | {"epochs": 120}
    assert plans["rule"] == plans[results.PLAIN] | {"policy": "rule"}

    calls = played.calls
    assert results.measured(tmp_path, "MLP", ("heuristic", "rule")) == found
    assert played.calls == calls

    values = results.differences(found, "rule", results.PLAIN)
    assert values == [3.0, 4.0, 5.0, 6.0, 7.0]
    half = stats.t.ppf(0.975, 4) * np.std(values, ddof=1) / 5**0.5
    line = results.summary({"MLP": found}).splitlines()[3]
    assert f"+5.0 [+{5 - half:.1f}, +{5 + half:.1f}]: above" in line


def test_never_growing_is_compared_with_a_plain_loop(results: ModuleType, monkeypatch) -> None:
    case = results.CASES["MLP"]
    assert results.same_as_plain_loop(case, "MLP")
    # With another recipe in one of the two loops it is noticed.
    rates = iter((0.01, 0.02))
    monkeypatch.setattr(
        type(case),
        "optimizer",
        lambda self, model, recipe: AdamW(model.parameters(), lr=next(rates)),
    )
    assert not results.same_as_plain_loop(replace(case), "MLP")
