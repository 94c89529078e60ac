"""Rules that choose one plan of the library per host, tuned on training hosts.

Each rule is a control: what a user could do instead of training a policy. A rule that looks at a
host at some step watches it train without seeds until then, and can choose only among the plans
that begin at that step or later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.ensemble import RandomForestRegressor
from sklearn.tree import DecisionTreeRegressor

from esper.tamiyo.policy.features import HOST_FEATURES
from esper_lab.evaluation import BEST_FIXED, FOREST, LOOKUP, ONE_LOOK, STOPPING, TREE, TRIGGER

Floats = NDArray[np.float64]
Choices = NDArray[np.int_]

STATIC_FEATURES = tuple(
    HOST_FEATURES.index(name) for name in ("log_host_parameters", "log_price", "remaining")
)
"""Columns of the observation that are known before a host has trained."""
CUTS = 20
"""Thresholds tried per feature, at equal shares of the hosts."""
FOLDS = 5
TREES = 200


@dataclass(frozen=True, slots=True)
class TrainingOutcomes:
    """What a rule is tuned on: H training hosts and P plans.

    Attributes:
        utility: test utility of each plan on each host, ``[H, P]``.
        features: observations of each host while nothing grows, ``[H, T, F]``.
        starts: first step in which each plan acts; T for the plan that never does, ``[P]``.
        kinds: what each plan grows; plans of one kind differ in their start alone, ``[P]``.
    """

    utility: Floats
    features: Floats
    starts: Choices
    kinds: tuple[str, ...]

    @property
    def never(self) -> int:
        """The plan that never grows."""
        return int(self.starts.argmax())

    @property
    def looks(self) -> list[int]:
        """Steps at which some plan begins."""
        length = self.features.shape[1]
        return sorted({int(start) for start in self.starts if start < length})

    def rows(self, hosts: NDArray[np.bool_] | Choices) -> "TrainingOutcomes":
        """The outcomes of ``hosts`` alone."""
        return TrainingOutcomes(self.utility[hosts], self.features[hosts], self.starts, self.kinds)


Rule = Callable[[Floats], Choices]
"""The plan of each host, int64 ``[H]``, from its observations ``[H, T, F]``."""


def best_fixed(outcomes: TrainingOutcomes) -> Rule:
    """The plan that is best on average: no look."""
    best = int(outcomes.utility.mean(0).argmax())
    return lambda features: np.full(len(features), best)


def lookup(outcomes: TrainingOutcomes) -> Rule:
    """A tree over the static features of a host: its size, its price and its time."""
    tree = DecisionTreeRegressor(max_leaf_nodes=8, min_samples_leaf=8, random_state=0)
    tree.fit(outcomes.features[:, 0, STATIC_FEATURES], outcomes.utility)
    return lambda features: tree.predict(features[:, 0, STATIC_FEATURES]).argmax(1)


def one_look(outcomes: TrainingOutcomes) -> Rule:
    """A threshold on one feature at one step, tuned over all features, steps and pairs of plans."""
    best, rule = -np.inf, best_fixed(outcomes)
    last = max(outcomes.looks, default=-1)
    for step in range(last + 1):
        open_plans = np.flatnonzero(outcomes.starts >= step)
        utility = outcomes.utility[:, open_plans]
        for feature in range(outcomes.features.shape[2]):
            cut = _cut(outcomes.features[:, step, feature], utility)
            if cut is not None and cut[0] > best:
                best, threshold, below, above = cut
                rule = _threshold(
                    step, feature, threshold, int(open_plans[below]), int(open_plans[above])
                )
    return rule


def _threshold(step: int, feature: int, threshold: float, below: int, above: int) -> Rule:
    return lambda features: np.where(features[:, step, feature] <= threshold, below, above)


def _cut(values: Floats, utility: Floats) -> tuple[float, float, int, int] | None:
    """The best threshold on ``values [H]``: total utility, threshold, plans below and above it."""
    order = values.argsort(kind="stable")
    sorted_values, sums = values[order], utility[order].cumsum(0)
    positions = np.unique(np.linspace(0, len(values) - 1, CUTS + 2).round().astype(int)[1:-1])
    positions = positions[sorted_values[positions] < sorted_values[-1]]
    ends = np.searchsorted(sorted_values, sorted_values[positions], side="right")
    positions = np.unique(ends - 1)
    if len(positions) == 0:
        return None
    below, above = sums[positions], sums[-1] - sums[positions]
    totals = below.max(1) + above.max(1)
    cut = int(totals.argmax())
    position = positions[cut]
    threshold = float((sorted_values[position] + sorted_values[position + 1]) / 2.0)
    return float(totals[cut]), threshold, int(below[cut].argmax()), int(above[cut].argmax())


def trigger(outcomes: TrainingOutcomes) -> Rule:
    """Look again and again: the first time a feature passes a threshold, begin a plan.

    One feature, one threshold and one kind of plan for all looks; tuned over all of them. The plan
    of a look is the one that begins there; a host without a trigger never grows.
    """
    looks, plans = _by_start(outcomes)
    best, rule = -np.inf, best_fixed(outcomes)
    if len(plans) == 0:
        return rule
    never = outcomes.never
    worths = outcomes.utility[:, np.insert(plans, len(looks), never, axis=1)]
    for feature in range(outcomes.features.shape[2]):
        values = outcomes.features[:, looks, feature]
        for sign in (1.0, -1.0):
            for threshold in np.unique(np.quantile(sign * values, np.linspace(0.05, 0.95, 10))):
                first = _first(sign * values > threshold)
                worth = np.take_along_axis(worths, first[:, None, None], 2)[:, :, 0].mean(0)
                if worth.max() > best:
                    best = float(worth.max())
                    sequence = [*map(int, plans[int(worth.argmax())]), never]
                    rule = _trigger_rule(looks, feature, sign, float(threshold), sequence)
    return rule


def _by_start(outcomes: TrainingOutcomes) -> tuple[list[int], Choices]:
    """Looks, and plans that differ in their start alone, ``[kinds, looks]``.

    The looks are the starts of the kind with the most of them; the kinds that lack one are left
    out. Without a kind that has two starts there are no plans.
    """
    kinds: dict[str, dict[int, int]] = {}
    for plan, (kind, start) in enumerate(zip(outcomes.kinds, outcomes.starts, strict=True)):
        if plan != outcomes.never:
            kinds.setdefault(kind, {}).setdefault(int(start), plan)
    longest = max(map(len, kinds.values()), default=0)
    looks = next((sorted(at) for at in kinds.values() if len(at) == longest), [])
    complete = [[at[look] for look in looks] for at in kinds.values() if {*looks} <= at.keys()]
    return looks, np.array(complete if len(looks) > 1 else [], dtype=int)


def _trigger_rule(
    looks: list[int], feature: int, sign: float, threshold: float, plans: Sequence[int]
) -> Rule:
    def rule(features: Floats) -> Choices:
        return np.array(plans)[_first(sign * features[:, looks, feature] > threshold)]

    return rule


def _first(crossings: NDArray[np.bool_]) -> Choices:
    """The first look of each host that crosses, ``[H]`` of ``[H, looks]``; their number if none."""
    return np.where(crossings.any(1), crossings.argmax(1), crossings.shape[1])


def tree(outcomes: TrainingOutcomes) -> Rule:
    """A small regression tree over the observations up to one look."""
    return _regression_rule(
        outcomes,
        lambda: DecisionTreeRegressor(max_leaf_nodes=8, min_samples_leaf=5, random_state=0),
    )


def forest(outcomes: TrainingOutcomes) -> Rule:
    """A random forest (Breiman, 2001) over the observations up to one look."""
    return _regression_rule(outcomes, _forest)


def _regression_rule(outcomes: TrainingOutcomes, model: Callable[[], BaseEstimator]) -> Rule:
    """Predict the utility of every plan and choose the best, at the look of the best validation."""
    folds = np.arange(len(outcomes.utility)) % FOLDS

    def validation_utility(step: int) -> float:
        worth = []
        for fold in range(FOLDS):
            rule = _at(outcomes.rows(folds != fold), step, model)
            held_out = outcomes.rows(folds == fold)
            choices = rule(held_out.features)
            worth.append(held_out.utility[np.arange(len(choices)), choices])
        return float(np.concatenate(worth).mean())

    return _at(outcomes, max(outcomes.looks, key=validation_utility), model)


def stopping(outcomes: TrainingOutcomes) -> Rule:
    """Look at every step at which plans begin, and begin one once that beats waiting.

    Bagged trees predict the utility of the plans that begin at a look, and the value of waiting for
    the next one, backwards in time (Longstaff and Schwartz, "Valuing American options by
    simulation: a simple least-squares approach", Review of Financial Studies, 2001). The value of
    waiting is computed from predictions out of bag, so that it is not one with hindsight.
    """
    value = outcomes.utility[:, outcomes.never]
    hosts = np.arange(len(value))
    stages: list[tuple[int, Choices, RandomForestRegressor, RandomForestRegressor]] = []
    for step in reversed(outcomes.looks):
        history, plans = _history(outcomes.features, step), np.flatnonzero(outcomes.starts == step)
        begin, wait = _bagged_trees(), _bagged_trees()
        utilities = outcomes.utility[:, plans]
        begin.fit(history, utilities if len(plans) > 1 else utilities[:, 0])
        wait.fit(history, value)
        predictions = begin.oob_prediction_.reshape(len(value), -1)
        payoff = outcomes.utility[hosts, plans[predictions.argmax(1)]]
        value = np.where(predictions.max(1) > wait.oob_prediction_, payoff, value)
        stages.append((step, plans, begin, wait))

    def rule(features: Floats) -> Choices:
        choices = np.full(len(features), outcomes.never)
        for step, plans, begin, wait in stages:
            history = _history(features, step)
            predictions = begin.predict(history).reshape(len(features), -1)
            choices = np.where(
                predictions.max(1) > wait.predict(history), plans[predictions.argmax(1)], choices
            )
        return choices

    return rule


def _forest() -> RandomForestRegressor:
    return RandomForestRegressor(TREES, min_samples_leaf=3, max_features=0.3, random_state=0)


def _bagged_trees() -> RandomForestRegressor:
    """Every feature is open to every split: predictions are less drawn to the mean."""
    return RandomForestRegressor(
        TREES, min_samples_leaf=5, max_features=1.0, random_state=0, oob_score=True
    )


def _at(outcomes: TrainingOutcomes, step: int, model: Callable[[], BaseEstimator]) -> Rule:
    open_plans = np.flatnonzero(outcomes.starts >= step)
    regressor = model()
    regressor.fit(_history(outcomes.features, step), outcomes.utility[:, open_plans])
    return lambda features: open_plans[regressor.predict(_history(features, step)).argmax(1)]


def _history(features: Floats, step: int) -> Floats:
    """Observations at the beginning, half-way to and at ``step``, ``[H, F']``."""
    return features[:, sorted({0, step // 2, step})].reshape(len(features), -1)


RULES: dict[str, Callable[[TrainingOutcomes], Rule]] = {
    BEST_FIXED: best_fixed,
    LOOKUP: lookup,
    ONE_LOOK: one_look,
    TRIGGER: trigger,
    TREE: tree,
    FOREST: forest,
    STOPPING: stopping,
}
"""The rules of the ladder, from those that do not look to those that look at every step."""
