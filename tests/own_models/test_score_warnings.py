"""A validation score that is not finite is mentioned, because no seed can be measured by it."""

import pytest
from torch.optim import SGD

from esper.own_models.controller import Growth
from own_modules import perceptron


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_score_that_is_not_finite_is_mentioned_once(value: float) -> None:
    model, lines = perceptron(), []
    made = SGD(model.parameters(), lr=0.1)
    growth = Growth(model, made, policy="never", report=lines.append)
    for score in (0.5, value, 0.5, value):
        growth.step(score)
    warnings = [line for line in lines if line.startswith("warning")]
    assert warnings == [
        f"warning: the validation score is {value}; no seed can be measured until it is finite"
    ]
    assert lines.index(warnings[0]) == 1, "it comes before the line of its epoch"
