"""Does the policy learn? Trains it with several seeds and compares it with its controls.

    python benchmarks/learning.py                     # about 45 minutes on 2 cores
    python benchmarks/learning.py --seeds 1 --rounds 4

For every seed: PPO for ``--rounds`` rounds, then the random policy, the plateau heuristic and
never-grow on the same seed. The gain is test utility minus that of the never-grow twin with the
same host and data; see ``runs.Run.gain``. Runs are kept under ``--work``: an interrupted run is
resumed from its last checkpoint, and a finished one is not repeated. For several tasks at once, see
``suite.py``.
"""

from pathlib import Path
from typing import Any

import numpy as np
from reporting import made_on, publish, table
from runs import ZERO, Settings, controls, study_parser, trained

from esper.leyline.config import TrainConfig


def measured(settings: Settings, work: Path) -> dict[str, Any]:
    """Return everything that the table needs for one seed."""
    run = trained("ppo", settings, work / f"ppo-seed{settings['seed']}")
    begin, end = run.ends(10)
    first, last = run.gain(begin), run.gain(end)
    played = controls({**settings, "rounds": max(2, len(end))}, work)
    control = {policy: other.gain(other.outcomes) for policy, other in played.items()}
    keeps = np.mean([np.array(o.fossilised) > 0 for o in played["heuristic"].outcomes])
    fossilised = float(np.mean([o.fossilised for o in end]))
    explained, within = (
        float(run.metric(name)[-len(end) :].mean())
        for name in ("explained_variance", "explained_variance_within_step")
    )
    germinated, untrained = sum(begin[0].germinated), sum(begin[0].fossilised)
    return {
        "seed": settings["seed"],
        "seconds": run.seconds,
        "first": first,
        "last": last,
        "validation": run.gain(end, "utility"),
        "accuracy": run.gain(end, "test_accuracy"),
        **control,
        "heuristic_keeps": float(keeps),
        "fossilised": fossilised,
        "added": float(np.mean([o.added_parameters for o in end])),
        "explained": explained,
        "within": within,
        "untrained": untrained / max(1, germinated),
        "passed": all(
            (
                last.above(ZERO),
                last.above(first),
                last.above(control["random"]),
                control["heuristic"].above(ZERO),
                keeps >= 0.5,
                fossilised >= 0.5,
                explained > 0.3,
                untrained >= 0.1 * germinated,
            )
        ),
    }


def page(rows: list[dict[str, Any]]) -> str:
    """Return the results in Markdown."""
    heads = (
        "seed",
        "first tenth",
        "last tenth",
        "the same on validation",
        "test accuracy above the twin's",
        "random",
        "heuristic (environments that keep a seed)",
        "never",
        "fossilised per episode",
        "parameters added",
        "explained variance (within a step)",
        "untrained fossilises",
        "minutes",
        "holds",
    )
    cells = [
        (
            *(r["seed"], r["first"], r["last"], r["validation"], r["accuracy"], r["random"]),
            f"{r['heuristic']} ({100 * r['heuristic_keeps']:.0f} %)",
            *(r["never"], f"{r['fossilised']:.2f}", f"{r['added']:.0f}"),
            f"{r['explained']:.2f} ({r['within']:.2f})",
            f"{100 * r['untrained']:.0f} %",
            *(f"{r['seconds'] / 60:.1f}", "yes" if r["passed"] else "NO"),
        )
        for r in rows
    ]
    return table(heads, cells)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = study_parser(__doc__, "learning", seeds=3, rounds=30)
    parser.add_argument("--task", default="digits_shift")
    arguments = parser.parse_args()
    settings = {"task": arguments.task, "rounds": arguments.rounds}
    rows = []
    for seed in arguments.seeds:
        rows.append(measured({**settings, "seed": seed}, arguments.work))
        print(page(rows), flush=True)
    parts = (
        f"{TrainConfig().world.envs} environments, {arguments.rounds} rounds (one episode per "
        "environment), all other settings at their defaults. Gains are points of utility on the "
        "test split over the never-grow twin, ± one standard error. A run "
        "holds if the last tenth is above never, the first tenth and random, the heuristic is "
        "above never (each by more than two standard errors of the difference), at least "
        "half of the heuristic's environments keep a seed, at least 0.5 seeds are fossilised "
        "per episode, the explained variance is above 0.3, and the untrained policy fossilises "
        "at least 10 % of its seeds.",
        page(rows),
        f"{made_on()}. Minutes are wall time of the PPO run.",
    )
    name = f"learning_{arguments.task}"
    publish(name, f"Learning on {arguments.task}", parts, arguments.write, rows)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
