"""Rules on synthetic utilities for which the right answer is known."""

import numpy as np
import pytest

from esper.tamiyo.policy.features import HOST_FEATURES
from esper_lab import rules
from esper_lab.controls import training_outcomes
from esper_lab.plans import library
from esper_lab.play import Outcome
from esper_lab.rules import RULES, STATIC_FEATURES, Rule, TrainingOutcomes, best_fixed

LENGTH, FEATURES, HOSTS = 8, len(HOST_FEATURES) + 4, 200
LOOKS = 0, 2, 5
STARTS = np.array([LENGTH, *LOOKS, *LOOKS])
"""Never, and two kinds of plans with three starts each."""
KINDS = ("never", "a", "a", "a", "b", "b", "b")
PLANTED = 3
"""The feature that tells."""


@pytest.fixture(autouse=True)
def small_forest(monkeypatch) -> None:
    monkeypatch.setattr(rules, "TREES", 30)


def population(seed: int, hosts: int = HOSTS) -> TrainingOutcomes:
    """Hosts whose features are noise and for which nothing gains."""
    draws = np.random.default_rng(seed)
    features = draws.normal(size=(hosts, LENGTH, FEATURES))
    features[:, :, STATIC_FEATURES] = draws.normal(size=(hosts, 1, len(STATIC_FEATURES)))
    utility = 0.5 + 0.001 * draws.normal(size=(hosts, len(STARTS)))
    return TrainingOutcomes(utility, features, STARTS, KINDS)


def worth(rule: Rule, known: TrainingOutcomes) -> float:
    return float(known.utility[np.arange(len(known.utility)), rule(known.features)].mean())


def hidden_kind(known: TrainingOutcomes, step: int) -> TrainingOutcomes:
    """A plan of kind ``a`` or ``b`` gains, as the planted feature tells at ``step``."""
    sign = known.features[:, step, PLANTED] > 0.3
    for plan, kind in enumerate(KINDS):
        if kind != "never":
            known.utility[:, plan] += np.where(sign == (kind == "b"), 0.2, -0.2)
    return known


def event(known: TrainingOutcomes, two_sided: bool = False) -> TrainingOutcomes:
    """An event at a look, or none; a plan of kind ``b`` from that look on gains, others lose.

    If it is ``two_sided``, the side of the planted feature tells which kind of plan gains.
    """
    draws = np.random.default_rng(len(known.utility))
    when = draws.integers(len(LOOKS) + 1, size=len(known.utility))
    side = draws.random(len(when)) < (0.5 if two_sided else 1.0)
    known.features[:, :, PLANTED] = 0.1 * draws.normal(size=(len(when), LENGTH))
    for host, look in enumerate(when):
        if look < len(LOOKS):
            known.features[host, LOOKS[look] :, PLANTED] += 5.0 if side[host] else -5.0
        for plan, kind in enumerate(KINDS):
            if kind != "never":
                comes = look < len(LOOKS) and LOOKS[look] == STARTS[plan]
                known.utility[host, plan] += 0.3 if comes and (kind == "b") == side[host] else -0.3
    return known


def priced(known: TrainingOutcomes) -> TrainingOutcomes:
    """Growing early pays if the price is low."""
    price = known.features[:, 0, STATIC_FEATURES[1]]
    known.utility[:, 4] += np.where(price < 0.0, 0.3, -0.3)
    return known


def test_best_fixed_finds_the_best_plan():
    known = population(0)
    known.utility[:, 5] += 0.1
    assert (best_fixed(known)(population(1, 7).features) == [5] * 7).all()


def test_one_look_finds_a_planted_threshold():
    rule = RULES["one look"](hidden_kind(population(0), step=2))
    fresh = hidden_kind(population(1), step=2)
    chosen = rule(fresh.features)
    side = fresh.features[:, 2, PLANTED] > 0.3
    assert (np.isin(chosen, [4, 5, 6]) == side).mean() > 0.9
    assert worth(rule, fresh) > worth(best_fixed(fresh), fresh) + 0.12


def test_one_look_may_come_at_a_step_at_which_no_plan_begins():
    known = hidden_kind(population(0), step=1)
    assert 1 not in known.looks
    known.features[:, [0, 2]] = population(5).features[:, [0, 2]]
    rule, fresh = RULES["one look"](known), hidden_kind(population(1), step=1)
    assert worth(rule, fresh) > worth(best_fixed(fresh), fresh) + 0.1


def test_the_lookup_finds_the_price_but_nothing_that_shows_later():
    rule = RULES["lookup on static features"](priced(population(0)))
    fresh = priced(population(1))
    assert worth(rule, fresh) > worth(best_fixed(fresh), fresh) + 0.1
    later = RULES["lookup on static features"](hidden_kind(population(0), step=2))
    fresh = hidden_kind(population(1), step=2)
    assert worth(later, fresh) < worth(best_fixed(fresh), fresh) + 0.02
    blind = fresh.features.copy()
    others = [i for i in range(FEATURES) if i not in STATIC_FEATURES]
    blind[:, :, others] = 0.0
    assert (later(blind) == later(fresh.features)).all()


def test_the_trigger_finds_an_event_whenever_it_comes():
    rule = RULES["trigger"](event(population(0)))
    fresh = event(population(1))
    right = fresh.utility.argmax(1)
    # The thresholds that are tried are ten quantiles, so the best one misses a few events.
    assert (rule(fresh.features) == right).mean() > 0.85
    assert worth(rule, fresh) > worth(RULES["one look"](event(population(0))), fresh) + 0.03


def test_optimal_stopping_waits_for_an_event_and_then_chooses():
    rule = RULES["optimal stopping"](event(population(0), two_sided=True))
    fresh = event(population(1), two_sided=True)
    assert (rule(fresh.features) == fresh.utility.argmax(1)).mean() > 0.95
    for other in ("one look", "trigger", "forest"):
        lesser = RULES[other](event(population(0), two_sided=True))
        assert worth(rule, fresh) > worth(lesser, fresh) + 0.05


def test_optimal_stopping_never_grows_where_all_plans_are_worth_the_same():
    known = population(0)
    known.utility[:] = 0.5
    assert (RULES["optimal stopping"](known)(known.features) == known.never).all()


@pytest.mark.parametrize("name", ["tree", "forest"])
def test_a_learned_rule_beats_the_fixed_plan(name: str):
    rule = RULES[name](hidden_kind(population(0), step=2))
    fresh = hidden_kind(population(1), step=2)
    assert worth(rule, fresh) > worth(best_fixed(fresh), fresh) + 0.12


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("step", LOOKS)
def test_a_rule_chooses_no_plan_that_begins_before_what_it_saw(name: str, step: int):
    """Whatever a host shows after the start of its plan must not matter."""
    rule = RULES[name](hidden_kind(population(0, 80), step))
    fresh = population(1, 60)
    chosen = rule(fresh.features)
    draws = np.random.default_rng(9)
    for plan in np.unique(chosen):
        changed = fresh.features.copy()
        later = slice(int(STARTS[plan]) + 1, None)
        changed[:, later] = draws.normal(size=changed[:, later].shape)
        rows = chosen == plan
        assert (rule(changed)[rows] == plan).all()


@pytest.mark.parametrize("name", list(RULES))
def test_a_rule_gains_nothing_where_there_is_nothing_to_see(name: str):
    rule, fresh = RULES[name](population(0, 80)), population(1)
    assert abs(worth(rule, fresh) - 0.5) < 0.01


def test_starts_of_random_plans_do_not_disturb_the_trigger(scripts_on_path):
    from populations import random_plans

    known = event(population(0))
    more = TrainingOutcomes(
        np.concatenate([known.utility, known.utility[:, :1] - 1.0], 1), known.features,
        np.append(STARTS, 3), (*KINDS, "random"),
    )  # fmt: skip
    fresh = event(population(1))
    chosen = RULES["trigger"](more)(fresh.features)
    assert (chosen == RULES["trigger"](known)(fresh.features)).all()
    plans = (*library(), *random_plans(5))
    shape = (30, len(plans))
    draws = np.random.default_rng(0)
    outcome = Outcome(*[draws.normal(size=shape)] * 6, features=known.features[:30])
    found = RULES["trigger"](training_outcomes(outcome, LENGTH, plans))(known.features[:30])
    assert found.max() < len(plans)


def test_the_trigger_without_plans_to_delay_is_the_fixed_plan():
    known = population(0, 40)
    kept = [0, 1, 4]
    few = TrainingOutcomes(
        known.utility[:, kept], known.features, STARTS[kept], ("never", "a", "b")
    )
    assert len({*RULES["trigger"](few)(known.features).tolist()}) == 1


def test_never_may_stand_anywhere():
    known, order = event(population(0)), [4, 1, 0, 6, 2, 5, 3]
    moved = TrainingOutcomes(
        known.utility[:, order], known.features, STARTS[order], tuple(KINDS[i] for i in order)
    )
    assert moved.never == 2
    fresh = event(population(1)).features
    chosen = np.array(order)[RULES["trigger"](moved)(fresh)]
    assert (chosen == RULES["trigger"](known)(fresh)).all()
