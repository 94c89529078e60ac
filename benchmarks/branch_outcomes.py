"""What the recorded branches were worth, and what rules choose that look at observations."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from branch_rules import DEPTH, best_threshold, tree_choices
from branches import Branching
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor
from what_shifts import KINDS, what_shifts

from esper.runtime.tasks import find
from esper.simic.offline.recorded_data import RecordedData
from esper.simic.records.episodes import Episodes
from esper.tamiyo.policy.features import HOST_FEATURES, SLOT_FEATURES

Floats = NDArray[np.float64]
FOLDS = 5
POINTS_PER_REWARD = 10.0
"""Terminal rewards are tenfold utility; utility is a fraction."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The branches of G hosts.

    Attributes:
        branching: how the episodes branch.
        episodes: all episodes; the group of host g are the episodes ``g B`` to ``g B + B - 1``.
        above: utility of each branch above keeping the early seeds, in points, ``[G, B]``.
        decision: step of the decision, int64 ``[G]``.
    """

    branching: Branching
    episodes: Episodes
    above: Floats
    decision: Tensor

    @property
    def columns(self) -> Tensor:
        """The first episode of each host, in which all early seeds are kept, int64 ``[G]``."""
        return torch.arange(len(self.above)) * len(self.branching.branches)

    @property
    def draws(self) -> list[str]:
        """Name of the task of each host."""
        return self.episodes.draws[:: len(self.branching.branches)]

    def features(self, lag: int, names: tuple[str, ...] | None = None) -> Floats:
        """What was observed ``lag`` steps before the decision, and a step earlier, ``[G, F]``.

        Args:
            lag: steps.
            names: the features of hosts and slots; all if None.
        """
        host = [i for i, n in enumerate(HOST_FEATURES) if names is None or n in names]
        slot = [i for i, n in enumerate(SLOT_FEATURES) if names is None or n in names]
        found = []
        for back in (lag, lag + 1, self.branching.delay + 1):
            step = (self.decision - back).clamp(min=0)
            observed = self.episodes.observation
            found.append(observed.host[step, self.columns][:, host])
            found.append(observed.slots[step, self.columns][..., slot].flatten(1))
        return torch.cat(found, 1).double().numpy()

    def course(self) -> Floats:
        """What was observed of hosts and slots in all steps if seeds were kept, ``[T, G, F]``."""
        observed = self.episodes.observation
        parts = observed.host[:, self.columns], observed.slots[:, self.columns].flatten(2)
        return torch.cat(parts, -1).double().numpy()


def outcomes(data: RecordedData, branching: Branching) -> Outcomes:
    """The branches of all hosts."""
    count = len(branching.branches)
    episodes = data.episodes
    total = (episodes.rewards * episodes.valid).sum(0).view(-1, count).double().numpy()
    draws = episodes.draws[::count]
    decision = torch.tensor([branching.decision_step(find(name)) for name in draws])
    above = POINTS_PER_REWARD * (total - total[:, :1])
    return Outcomes(branching, episodes, above, decision)


def forest_choices(known: Floats, above: Floats, features: Floats) -> NDArray[np.int_]:
    """The branches that a forest chooses, learned from ``known [H, F]`` and ``above [H, B]``."""
    forest = ExtraTreesRegressor(100, min_samples_leaf=3, max_features=0.5, random_state=0)
    forest.fit(known, above - above.mean(1, keepdims=True))
    chosen: NDArray[np.int_] = forest.predict(features).argmax(1)
    return chosen


def by_forest(features: Floats, above: Floats) -> tuple[float, float]:
    """Cross-validated worth of the choices of a forest, and its standard error over hosts."""
    return mean_and_error(forest_worth(features, above))


def forest_worth(features: Floats, above: Floats) -> Floats:
    """What the branch is worth that a forest chooses for each host, cross-validated, ``[G]``."""
    fold = np.arange(len(above)) % FOLDS
    worth = np.zeros(len(above))
    for one in range(FOLDS):
        own, held_out = fold != one, np.flatnonzero(fold == one)
        chosen = forest_choices(features[own], above[own], features[held_out])
        worth[held_out] = above[held_out, chosen]
    return worth


def by_kind(found: Outcomes) -> dict[str, dict[str, Any]]:
    """Worth of the branches and of a forest's choices, by what shifts."""
    kinds = np.array([what_shifts(find(name)) for name in found.draws])
    worth, above = forest_worth(found.features(0), found.above), found.above
    return {
        kind: {
            "hosts": int((kinds == kind).sum()),
            "branches": above[kinds == kind].mean(0).tolist(),
            "hindsight": float(above[kinds == kind].max(1).mean()),
            "forest": mean_and_error(worth[kinds == kind]),
        }
        for kind in KINDS
    }


def divided(hosts: int, share: float) -> tuple[Tensor, Tensor]:
    """An eighth of the hosts, which is held out, and a share of the others."""
    order = torch.randperm(hosts, generator=torch.Generator().manual_seed(0))
    held_out, others = order[: hosts // 8], order[hosts // 8 :]
    return held_out, others[: round(share * len(others))]


def rule_points(found: Outcomes) -> dict[str, dict[str, float]]:
    """As ``by_method``, for rules that learn from all hosts but those held out."""
    held_out, learned = (part.numpy() for part in divided(len(found.above), 1.0))
    above, features = found.above, found.features(0)
    observed = found.course()
    threshold = best_threshold(observed[:, learned], above[learned])
    chosen = {
        "threshold on one feature": threshold.choices(observed[:, held_out]),
        f"tree of depth {DEPTH}, told the step": tree_choices(
            features[learned], above[learned], features[held_out]
        ),
    }
    return {
        name: _point(len(learned), above[held_out, choices]) for name, choices in chosen.items()
    }


def forest_point(found: Outcomes, share: float) -> dict[str, float]:
    """As ``by_method``, for a forest that is told the step of the decision."""
    held_out, learned = (part.numpy() for part in divided(len(found.above), share))
    features, above = found.features(0), found.above
    chosen = forest_choices(features[learned], above[learned], features[held_out])
    return _point(len(learned), above[held_out, chosen])


def _point(draws: int, worth: Floats) -> dict[str, float]:
    mean, error = mean_and_error(worth)
    return {"draws": draws, "greedy": mean, "error": error}


def mean_and_error(worth: Floats) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(worth.mean()), float(worth.std() / len(worth) ** 0.5)
