"""Does mixed precision of the hosts cost accuracy? Compares trainings in float32 and bfloat16.

    python benchmarks/precision.py --write                 # about half an hour on one free core
    python benchmarks/precision.py --amp-dtype float16 --work runs/precision16

For every seed: PPO with ``--backend torch`` in float32 and in mixed precision, all other settings
equal. Final accuracy is the committed validation accuracy of the grown hosts, averaged over the
last quarter of the rounds. Since growing is learned, it falls both when hosts learn worse and when
the policy does. Runs are kept under ``--work``: an interrupted run is resumed from its last
checkpoint, and a finished one is not repeated.
"""

import statistics
from pathlib import Path
from typing import Any

from reporting import made_on, publish, table
from runs import Run, Settings, study_parser, trained

from esper.leyline.events import EpisodeOutcome, to_floats

MIN_RATIO = 0.9
"""Smallest ratio of final accuracy in mixed precision to that in float32, median over the seeds."""


def measured(run: Run) -> dict[str, Any]:
    """Return seconds, and accuracies and gains over the twin in the first and last quarter."""

    def accuracy(part: list[EpisodeOutcome], field: str) -> float:
        return statistics.fmean(v for o in part for v in to_floats(getattr(o, field)))

    first, last = run.ends(4)
    return {
        "dtypes": sorted({s.amp_dtype or "float32" for s in run.snapshots}),
        "first": accuracy(first, "accuracy"),
        "final": accuracy(last, "accuracy"),
        "twin": accuracy(last, "twin_accuracy"),
        "gain": str(run.gain(last)),
        "rolled_back": sum(sum(o.rolled_back) for o in run.outcomes),
        "seconds": run.seconds,
    }


def compared(settings: Settings, amp_dtype: str, work: Path) -> dict[str, Any]:
    """Return the results of both runs of one seed."""
    row: dict[str, Any] = {"seed": settings["seed"]}
    # The training in float32 is the same beside either dtype.
    halves = {"use_amp": True, "amp_dtype": amp_dtype}
    for name, given in (("float32", {"use_amp": False}), (amp_dtype, halves)):
        run = trained("ppo", {**settings, **given}, work / f"{name}-seed{row['seed']}")
        row[name] = measured(run)
        if row[name]["dtypes"] != [name]:
            raise SystemExit(f"{run.path} computed in {row[name]['dtypes']}, not in {name}")
    row["ratio"] = row[amp_dtype]["final"] / row["float32"]["final"]
    return row


def page(rows: list[dict[str, Any]], amp_dtype: str) -> str:
    """Return the results in Markdown, medians last."""
    heads, medians = ["seed"], ["median"]
    lines = [[str(row["seed"])] for row in rows]
    for name in ("float32", amp_dtype):
        heads += [f"{name}: first quarter", "final accuracy", "twin", "gain (test)", "rollbacks"]
        for line, row in zip(lines, rows, strict=True):
            line += [f"{100 * row[name][key]:.1f} %" for key in ("first", "final", "twin")]
            line += [row[name]["gain"], str(row[name]["rolled_back"])]
        final = statistics.median(row[name]["final"] for row in rows)
        medians += ["", f"{100 * final:.1f} %", "", "", ""]
    ratios = [row["ratio"] for row in rows]
    lines.append(medians)
    for line, ratio in zip(lines, [*ratios, statistics.median(ratios)], strict=True):
        line.append(f"{ratio:.3f}")
    return table([*heads, "ratio"], lines)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = study_parser(__doc__, "precision", seeds=3, rounds=16)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--amp-dtype", default="bfloat16", choices=["bfloat16", "float16"])
    arguments = parser.parse_args()
    amp_dtype, names = arguments.amp_dtype, ("task", "rounds", "envs")
    settings = {name: getattr(arguments, name) for name in names} | {"backend": "torch"}
    rows = []
    for seed in arguments.seeds:
        rows.append(compared({**settings, "seed": seed}, amp_dtype, arguments.work))
        print(page(rows, amp_dtype), flush=True)
    ratio = statistics.median(row["ratio"] for row in rows)
    parts = (
        f"PPO, {arguments.envs} environments, {arguments.rounds} rounds (one episode per "
        "environment), `--backend torch`, all other settings at their defaults. Accuracy is "
        "committed validation accuracy, final means over the last quarter of the rounds; gains "
        "are points of test utility over the never-grow twin, ± one standard error. The ratio is "
        "final accuracy in mixed precision over that in float32; its median must be at least "
        f"{MIN_RATIO}: {'it is' if ratio >= MIN_RATIO else 'IT IS NOT'}.",
        page(rows, amp_dtype),
        f"{made_on()}.",
    )
    title = f"Hosts in float32 and in {amp_dtype} on {arguments.task}"
    publish("precision", title, parts, arguments.write, rows)
    return 0 if ratio >= MIN_RATIO else 1


if __name__ == "__main__":
    raise SystemExit(main())
