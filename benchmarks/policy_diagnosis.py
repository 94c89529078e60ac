"""What the branches teach: by step of the look, by feature, by method and by number of draws.

    python benchmarks/policy_diagnosis.py --write      # after `policy.py --only record`; 20 minutes

Works on the records of ``policy.py``. Nothing is played: a choice is worth what the branch that it
names was worth on a host that was not learned from, on the validation split, above keeping the
early seed, which is the best fixed schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from branches import BRANCHES, DELAY, decision_step
from matplotlib.figure import Figure
from numpy.typing import NDArray
from reporting import RESULTS, kept, made_on, new_parser, publish, table
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor

from esper.leyline.config.offline import OfflineConfig, OfflineMethod
from esper.runtime.tasks import find
from esper.simic.evaluation.without_looking import SCORES
from esper.simic.offline.batches import batch_of, groups_of, shuffled
from esper.simic.offline.offline_run import build_trainer
from esper.simic.offline.recorded_data import RecordedData, read_data
from esper.simic.offline.vine import branches
from esper.simic.records.episodes import Episodes
from esper.tamiyo.policy.features import (
    EMPTY_SLOT_SIGNALS,
    HOST_FEATURES,
    SEED_SIGNALS,
    SLOT_FEATURES,
)

Floats = NDArray[np.float64]
FOLDS = 5
METHODS: dict[OfflineMethod, str] = {
    "vine": "vine",
    "awr": "advantage-weighted regression",
    "bc": "cloning the clairvoyant",
}
"""Methods of ``esper train offline``, and their names."""
SHARES = 1 / 8, 1 / 2, 1.0
LAGS = 0, 2, 4, 6, 8
EPOCHS = 8
"""Passes over all draws; as many steps for fewer draws."""
POINTS_PER_REWARD = 10.0
"""Terminal rewards are tenfold utility; utility is a fraction."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The branches of G hosts.

    Attributes:
        episodes: all episodes; the group of host g are the episodes ``g B`` to ``g B + B - 1``.
        above: utility of each branch above keeping the early seed, in points, ``[G, B]``.
        decision: step of the decision, int64 ``[G]``.
    """

    episodes: Episodes
    above: Floats
    decision: Tensor

    def features(self, lag: int, names: tuple[str, ...] | None = None) -> Floats:
        """What was observed ``lag`` steps before the decision, and a step earlier, ``[G, F]``.

        Args:
            lag: steps.
            names: the features of hosts and slots; all if None.
        """
        count = len(BRANCHES)
        columns = torch.arange(len(self.above)) * count
        host = [i for i, n in enumerate(HOST_FEATURES) if names is None or n in names]
        slot = [i for i, n in enumerate(SLOT_FEATURES) if names is None or n in names]
        found = []
        for back in (lag, lag + 1, DELAY + 1):
            step = (self.decision - back).clamp(min=0)
            observed = self.episodes.observation
            found.append(observed.host[step, columns][:, host])
            found.append(observed.slots[step, columns][..., slot].flatten(1))
        return torch.cat(found, 1).double().numpy()


def outcomes(data: RecordedData) -> Outcomes:
    """The branches of all hosts."""
    count = len(BRANCHES)
    episodes = data.episodes
    total = (episodes.rewards * episodes.valid).sum(0).view(-1, count).double().numpy()
    decision = torch.tensor([decision_step(find(name)) for name in episodes.draws[::count]])
    above = POINTS_PER_REWARD * (total - total[:, :1])
    return Outcomes(episodes, above, decision)


def forest_choices(known: Floats, above: Floats, features: Floats) -> NDArray[np.int_]:
    """The branches that a forest chooses, learned from ``known [H, F]`` and ``above [H, B]``."""
    forest = ExtraTreesRegressor(100, min_samples_leaf=3, max_features=0.5, random_state=0)
    forest.fit(known, above - above.mean(1, keepdims=True))
    chosen: NDArray[np.int_] = forest.predict(features).argmax(1)
    return chosen


def by_forest(features: Floats, above: Floats) -> tuple[float, float]:
    """Cross-validated worth of the choices of a forest, and its standard error over hosts."""
    fold = np.arange(len(above)) % FOLDS
    worth = np.zeros(len(above))
    for one in range(FOLDS):
        own, held_out = fold != one, np.flatnonzero(fold == one)
        chosen = forest_choices(features[own], above[own], features[held_out])
        worth[held_out] = above[held_out, chosen]
    return _mean(worth)


def divided(hosts: int, share: float) -> tuple[Tensor, Tensor]:
    """An eighth of the hosts, which is held out, and a share of the others."""
    order = torch.randperm(hosts, generator=torch.Generator().manual_seed(0))
    held_out, others = order[: hosts // 8], order[hosts // 8 :]
    return held_out, others[: round(share * len(others))]


def forest_point(found: Outcomes, share: float) -> dict[str, float]:
    """As ``by_method``, for a forest that is told the step of the decision."""
    held_out, learned = (part.numpy() for part in divided(len(found.above), share))
    features, above = found.features(0), found.above
    chosen = forest_choices(features[learned], above[learned], features[held_out])
    worth, error = _mean(above[held_out, chosen])
    return {"draws": len(learned), "greedy": worth, "error": error}


def by_method(
    data: RecordedData, found: Outcomes, method: OfflineMethod, share: float
) -> dict[str, float]:
    """Worth on held-out hosts of what a controller chooses that learned from some of the others.

    Cloning copies the best branch of each host, as a clairvoyant would choose it; the other
    methods learn from all branches.
    """
    count = len(BRANCHES)
    held_out, learned = divided(len(found.above), share)
    config = OfflineConfig(
        records=("-",),
        method=method,
        temperature=0.25 if method == "awr" else 0.5,
        entropy=0.02,
        lstm_hidden=64,
        value_weight=0.05,
        threads=1,
        compile="off",
        amp=False,
    )
    trainer = build_trainer(config, data, torch.device("cpu"), 1)
    groups = groups_of(data.episodes)
    places = torch.arange(count)
    best = torch.tensor(found.above.argmax(1))
    for epoch in range(round(EPOCHS / share)):
        for part in shuffled(learned, 1, epoch).split(160 // count):
            chosen = (part[:, None] * count + places).flatten()
            if method == "bc":
                chosen = part * count + best[part]
            trainer.step(batch_of(data.episodes, data.returns, chosen, groups))
    greedy, expected = [], []
    for part in held_out.split(64):
        chosen = (part[:, None] * count + places).flatten()
        batch = batch_of(data.episodes, data.returns, chosen, groups)
        with torch.no_grad():
            _, log_chosen = branches(trainer.network(batch).log_prob, batch)
        probability = log_chosen.exp().view(-1, count).double().numpy()
        above = found.above[part.numpy()]
        greedy.append(above[np.arange(len(above)), probability.argmax(1)])
        expected.append((probability * above).sum(1))
    worth, error = _mean(np.concatenate(greedy))
    return {
        "draws": len(learned),
        "greedy": worth,
        "error": error,
        "sampled": float(np.concatenate(expected).mean()),
    }


def groups_of_features() -> dict[str, tuple[str, ...] | None]:
    """Names of the features by group."""
    static = ("log_host_parameters", "log_rent", "remaining", "depth", "log_channels")
    return {
        "everything": None,
        "static": tuple(n for n in static if n in (*HOST_FEATURES, *SLOT_FEATURES)),
        "scores": SCORES,
        "signals of the seed": SEED_SIGNALS,
        "signals of empty slots": EMPTY_SLOT_SIGNALS,
        "all but scores": _without(SCORES),
        "all but signals of the seed": _without(SEED_SIGNALS),
        "all but signals of empty slots": _without(EMPTY_SLOT_SIGNALS),
    }


def _without(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(n for n in (*HOST_FEATURES, *SLOT_FEATURES) if n not in names)


def drawn(curves: dict[str, list[dict[str, float]]], ceiling: float, path: Path) -> None:
    """Draw worth against the number of draws."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        x, y, error = ([point[key] for point in points] for key in ("draws", "greedy", "error"))
        axes.errorbar(x, y, error, marker="o", capsize=2, label=name)
    axes.axhline(0.0, color="grey", linewidth=0.8)
    axes.axhline(ceiling, color="grey", linewidth=0.8, linestyle="--")
    axes.annotate("best branch in hindsight", (x[0], ceiling), va="bottom", fontsize=8)
    axes.annotate("best fixed schedule", (x[0], 0.0), va="bottom", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(round(value)) for value in x])
    axes.set_xlabel("recorded hosts")
    axes.set_ylabel("points above the best fixed schedule")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> int:
    """Measure; return the exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/policy"))
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    torch.set_num_threads(1)
    records = tuple(str(path) for path in sorted((work / "records").iterdir()))
    data = read_data(OfflineConfig(records=records, method="vine", held_out=0.0, threads=1))
    found = outcomes(data)
    above = found.above

    def told(name: str, make: Callable[[], Any]) -> Any:
        result = kept(work / "diagnosis" / f"{name}.json", make)
        print(name, result, flush=True)
        return result

    looks = {
        lag: told(f"look-{lag}", partial(by_forest, found.features(lag), above)) for lag in LAGS
    }
    features = {
        name: told(f"features-{name}", partial(by_forest, found.features(0, names), above))
        for name, names in groups_of_features().items()
    }
    curves: dict[str, list[dict[str, float]]] = {
        METHODS[method]: [
            told(f"{method}-{share:.3f}", partial(by_method, data, found, method, share))
            for share in SHARES
        ]
        for method in METHODS
    }
    counts = [round(point["draws"]) for point in curves[METHODS["vine"]]]
    curves["forest, told the step"] = [
        told(f"forest-{share:.3f}", partial(forest_point, found, share)) for share in SHARES
    ]
    ceiling = float(above.max(1).mean())
    if arguments.write:
        drawn(curves, ceiling, RESULTS / "policy_diagnosis.svg")
    page = [
        f"{len(above)} hosts of `one_seed`, {len(BRANCHES)} branches each; utility on validation, "
        f"in points above keeping the early seed, with standard errors over hosts. In hindsight "
        f"the best branch is worth {ceiling:.1f}; keeping, pruning and moving to slot 0 or 1 are "
        "best on " + ", ".join(f"{share:.0%}" for share in _best_shares(above)) + " of the hosts.",
        "## When to look",
        "A forest (cross-validated over hosts) chooses the branch from the observations some steps "
        f"after the first step of the shift; the branches themselves part {DELAY} steps after it.",
        table(
            ("steps after the shift", *(DELAY - lag for lag in reversed(LAGS))),
            [("worth", *(_worth(looks[lag]) for lag in reversed(LAGS)))],
        ),
        "## What the observation carries",
        table(("features", "worth"), [(name, _worth(one)) for name, one in features.items()]),
        "## What the methods make of it",
        "Greedy choices among the branches, and expected worth of sampled choices, on one eighth "
        "of the hosts. Cloning copies the best branch of each host.",
        "![Worth against recorded hosts](policy_diagnosis.svg)",
        table(
            ("recorded hosts", *counts),
            [
                (f"{name}, {way}", *(_point(point, way) for point in points))
                for name, points in curves.items()
                for way in ("greedy", "sampled")
                if way in points[0]
            ],
        ),
        f"{made_on()}.",
    ]
    figures = {"looks": looks, "features": features, "curves": curves, "ceiling": ceiling}
    publish("policy_diagnosis", "What the branches teach", page, arguments.write, figures)
    return 0


def _mean(worth: Floats) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(worth.mean()), float(worth.std() / len(worth) ** 0.5)


def _best_shares(above: Floats) -> list[float]:
    counts = np.bincount(above.argmax(1), minlength=above.shape[1])
    return (counts / len(above)).tolist()


def _worth(found: tuple[float, float]) -> str:
    return f"{found[0]:+.1f} ± {found[1]:.1f}"


def _point(point: dict[str, float], way: str) -> str:
    text = f"{point[way]:+.1f}"
    return f"{text} ± {point['error']:.1f}" if way == "greedy" else text


if __name__ == "__main__":
    raise SystemExit(main())
