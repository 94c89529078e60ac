"""The step at which a variant of try-and-keep decides."""

import pytest

from esper.tamiyo.try_and_keep import MARGIN
from esper_lab.controls import TRIALS, TrialPlan


@pytest.mark.parametrize("length", [12, 24, 150])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_every_slot_is_decided_before_the_end(length: int, slots: int):
    for plan in TRIALS:
        assert 1 <= plan.decision_step(length, slots) <= length - slots - MARGIN


def test_the_decision_is_half_way_or_as_late_as_the_slots_allow():
    half, late = (TrialPlan(1 / 3, 0.0, 1, decision) for decision in (0.5, 1.0))
    assert half.decision_step(150, 3) == 75
    assert late.decision_step(150, 3) == 145
    assert half.decision_step(12, 8) == late.decision_step(12, 8) == 2
    assert {plan.decision for plan in TRIALS} == {0.5, 1.0}
