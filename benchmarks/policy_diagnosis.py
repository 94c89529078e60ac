"""What the branches teach: by step of the look, by feature, by method and by number of draws.

    python benchmarks/policy_diagnosis.py --write      # after `policy.py --only record`; 20 minutes

Works on the records of ``policy.py``. Nothing is played: a choice is worth what the branch that it
names was worth on a host that was not learned from, on the validation split, above keeping the
early seed.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from branch_learning import by_method
from branch_outcomes import (
    Floats,
    by_forest,
    by_kind,
    forest_point,
    mean_and_error,
    outcomes,
    rule_points,
)
from branches import LARGE, ONE_SEED
from matplotlib.figure import Figure
from policy_further import ladder_hosts, tuning, work_of
from reporting import RESULTS, kept, made_on, new_parser, publish, table

from esper.leyline.config.offline import OfflineConfig, OfflineMethod
from esper.simic.offline.recorded_data import read_data
from esper.tamiyo.policy.features import (
    EMPTY_SLOT_SIGNALS,
    HOST_FEATURES,
    SEED_SIGNALS,
    SLOT_FEATURES,
)
from esper_lab.plans import PlannedSeed, library
from esper_lab.without_looking import SCORES

FAMILY = ONE_SEED.family
METHODS: dict[OfflineMethod, str] = {
    "vine": "vine",
    "awr": "advantage-weighted regression",
    "bc": "cloning the clairvoyant",
}
"""Methods of ``esper train offline``, and their names."""
SHARES = 1 / 8, 1 / 2, 1.0
LAGS = range(ONE_SEED.delay + 1)


def groups_of_features() -> dict[str, tuple[str, ...] | None]:
    """Names of the features by group."""
    static = ("log_host_parameters", "log_price", "remaining", "depth", "log_channels")
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


def schedule_above_keeping(work: Path) -> tuple[float, float]:
    """Points of the best fixed schedule above keeping the early seed, and their standard error."""
    _, hosts = ladder_hosts(FAMILY, 1)
    utility = 100.0 * tuning(hosts.training, work / "further").validation_utility
    kept_seed = PlannedSeed(0.0, LARGE, start=0.0)
    (keeping,) = (i for i, plan in enumerate(library()) if plan.seeds == (kept_seed,))
    return mean_and_error(utility[:, utility.mean(0).argmax()] - utility[:, keeping])


def drawn(curves: dict[str, list[dict[str, float]]], lines: dict[str, float], path: Path) -> None:
    """Draw worth against the number of draws; ``lines`` are drawn across."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        x, y, error = ([point[key] for point in points] for key in ("draws", "greedy", "error"))
        axes.errorbar(x, y, error, marker="o", capsize=2, label=name)
    for name, value in lines.items():
        axes.axhline(value, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(name, (x[0], value), va="bottom", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(round(value)) for value in x])
    axes.set_xlabel("recorded hosts")
    axes.set_ylabel("points above keeping the early seed")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def diagnosis_page(figures: dict[str, Any], above: Floats) -> list[str]:
    """The paragraphs.

    Args:
        figures: see ``main``.
        above: see ``Outcomes``.
    """
    curves, schedule = figures["curves"], _worth(figures["schedule"])
    vine = curves[METHODS["vine"]]
    counts, whole = [round(point["draws"]) for point in vine], vine[-1]
    names = [branch.name for branch in ONE_SEED.branches]
    return [
        f"{len(above)} hosts of `{FAMILY}`, {len(names)} branches each; utility on validation, "
        "in points above keeping the early seed, with standard errors over hosts. In hindsight "
        f"the best branch is worth {figures['ceiling']:.1f}; "
        + ", ".join(
            f"{name} is best on {share:.0%}"
            for name, share in zip(names, _best_shares(above), strict=True)
        )
        + f" of the hosts. The best fixed schedule is worth {schedule} on training hosts of the "
        "ladder.",
        "## When to look",
        "A forest (cross-validated over hosts) chooses the branch from the observations some steps "
        f"after the first step of the shift; the branches themselves part {ONE_SEED.delay} steps "
        "after it.",
        table(
            ("steps after the shift", *(ONE_SEED.delay - lag for lag in reversed(LAGS))),
            [("worth", *(_worth(figures["looks"][lag]) for lag in reversed(LAGS)))],
        ),
        "## What the observation carries",
        table(
            ("features", "worth"),
            [(name, _worth(one)) for name, one in figures["features"].items()],
        ),
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
        "From all of them:",
        table(
            ("", "greedy"),
            [
                ("vine", _point(whole, "greedy")),
                (
                    "vine, LSTM that begins anew in every step",
                    _point(figures["memoryless"], "greedy"),
                ),
                *((name, _point(point, "greedy")) for name, point in figures["rules"].items()),
            ],
        ),
        "The threshold may be on any feature or its change, is told nothing, and is counted as if "
        "it moved when the branches part.",
        f"Of the variance of the returns of these branches the critic explains "
        f"{whole['explained']:.0%} within a step, and {whole['explained_of_host']:.0%} within a "
        "step and a host.",
        "## Where looking pays",
        "By what shifts: worth of the branches above keeping the seed, of the best of them in "
        "hindsight, and of the choices of a forest (cross-validated).",
        table(
            ("what shifts", "hosts", *names[1:], "hindsight", "forest"),
            [
                (
                    name,
                    one["hosts"],
                    *(f"{worth:+.1f}" for worth in one["branches"][1:]),
                    f"{one['hindsight']:+.1f}",
                    _worth(one["forest"]),
                )
                for name, one in figures["kinds"].items()
            ],
        ),
    ]


def main() -> int:
    """Measure; return the exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    work = work_of(FAMILY, arguments.work)
    torch.set_num_threads(1)
    records = tuple(str(path) for path in sorted((work / "records").iterdir()))
    data = read_data(OfflineConfig(records=records, method="vine", held_out=0.0, threads=1))
    found = outcomes(data, ONE_SEED)
    above = found.above

    def told(name: str, make: Callable[[], Any]) -> Any:
        result = kept(work / "diagnosis" / f"{name}.json", make)
        print(name, result, flush=True)
        return result

    features = {
        name: told(f"features-{name}", partial(by_forest, found.features(0, names), above))
        for name, names in groups_of_features().items()
    }
    looks = {0: features["everything"]} | {
        lag: told(f"look-{lag}", partial(by_forest, found.features(lag), above)) for lag in LAGS[1:]
    }
    curves: dict[str, list[dict[str, float]]] = {
        METHODS[method]: [
            told(f"{method}-{share:.3f}", partial(by_method, data, found, method, share))
            for share in SHARES
        ]
        for method in METHODS
    }
    curves["forest, told the step"] = [
        told(f"forest-{share:.3f}", partial(forest_point, found, share)) for share in SHARES
    ]
    rules = told("rules", partial(rule_points, found))
    forgetful = told("vine-memoryless", partial(by_method, data, found, "vine", 1.0, False))
    kinds = told("kinds", partial(by_kind, found))
    ceiling = float(above.max(1).mean())
    schedule = schedule_above_keeping(work)
    if arguments.write:
        lines = {
            "best branch in hindsight": ceiling,
            "best fixed schedule": schedule[0],
            "keeping the early seed": 0.0,
        }
        drawn(curves, lines, RESULTS / "policy_diagnosis.svg")
    figures = {
        "looks": looks,
        "features": features,
        "curves": curves,
        "ceiling": ceiling,
        "schedule": schedule,
        "rules": rules,
        "memoryless": forgetful,
        "kinds": kinds,
    }
    page = [*diagnosis_page(figures, above), f"{made_on()}."]
    publish("policy_diagnosis", "What the branches teach", page, arguments.write, figures)
    return 0


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
