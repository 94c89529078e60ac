"""Does mixed precision of the hosts cost accuracy? The same training in float32 and in bfloat16.

    python benchmarks/precision.py --write                 # about half an hour on one free core
    python benchmarks/precision.py --amp-dtype float16 --work runs/precision16

For every seed: PPO with ``--backend torch`` in float32 and in mixed precision, all other settings
equal. Final accuracy is committed validation accuracy of the grown hosts, mean over the last
quarter of the rounds; growing is learned, so it falls both when hosts learn worse and when the
policy does. Runs lie under ``--work``; a run that was cut off goes on from its last checkpoint, and
one that is finished is not run again.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from machine import made_on
from runs import mean_gain, trained

from esper.karn.store import read_events
from esper.leyline.config import TrainConfig, flatten
from esper.leyline.events import AnalyticsSnapshot, EpisodeOutcome, to_floats
from esper.simic.run.run_directory import stored_config

RESULTS = Path(__file__).parent / "results" / "precision"
LEAST_RATIO = 0.9
"""Of mixed precision's final accuracy over that of float32; the median over the seeds counts."""


def measured(run: Path, group_size: int) -> dict:
    """Accuracies and gains over the never-grow twin, in the first and the last quarter."""
    outcomes = list(read_events(run, EpisodeOutcome))
    quarter = max(2, len(outcomes) // 4)

    def accuracy(part: list[EpisodeOutcome], field: str) -> float:
        return statistics.fmean(v for o in part for v in to_floats(getattr(o, field)))

    first, last = outcomes[:quarter], outcomes[-quarter:]
    return {
        "dtypes": sorted({s.amp_dtype or "float32" for s in read_events(run, AnalyticsSnapshot)}),
        "threads": stored_config(run)[1]["threads"],
        "first": accuracy(first, "accuracy"),
        "final": accuracy(last, "accuracy"),
        "twin": accuracy(last, "twin_accuracy"),
        "gain": str(mean_gain(last, group_size)),
        "rolled_back": sum(sum(o.rolled_back) for o in outcomes),
    }


def compared(seed: int, settings: dict, amp_dtype: str, work: Path) -> dict:
    """Both runs of one seed."""
    row: dict = {"seed": seed}
    for name, use_amp in (("float32", False), (amp_dtype, True)):
        given = {**settings, "seed": seed, "use_amp": use_amp, "amp_dtype": amp_dtype}
        run = trained("ppo", given, work / f"{name}-seed{seed}")
        row[name] = measured(run, settings["group_size"])
        if row[name]["dtypes"] != [name]:
            raise SystemExit(f"{run} computed in {row[name]['dtypes']}, not in {name}")
    row["ratio"] = row[amp_dtype]["final"] / row["float32"]["final"]
    return row


def table(rows: list[dict], amp_dtype: str) -> str:
    """The results in Markdown, the medians last."""
    heads = ["seed"]
    for name in ("float32", amp_dtype):
        heads += [f"{name}: first quarter", "final accuracy", "twin", "gain", "rollbacks"]
    lines = [f"| {' | '.join(heads)} | ratio |", "|" + "---|" * (len(heads) + 1)]
    for row in rows:
        cells = [str(row["seed"])]
        for name in ("float32", amp_dtype):
            part = row[name]
            cells += [f"{100 * part[key]:.1f} %" for key in ("first", "final", "twin")]
            cells += [part["gain"], str(part["rolled_back"])]
        lines.append(f"| {' | '.join(cells)} | {row['ratio']:.3f} |")
    medians = ["median"]
    for name in ("float32", amp_dtype):
        final = statistics.median(row[name]["final"] for row in rows)
        medians += ["", f"{100 * final:.1f} %", "", "", ""]
    ratio = statistics.median(row["ratio"] for row in rows)
    return "\n".join([*lines, f"| {' | '.join(medians)} | {ratio:.3f} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--amp-dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--work", type=Path, default=Path("runs/precision"))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/precision")
    arguments = parser.parse_args()
    settings = {
        **flatten(TrainConfig()),
        "task": arguments.task,
        "rounds": arguments.rounds,
        "envs": arguments.envs,
        "backend": "torch",
    }
    rows = []
    for seed in arguments.seeds:
        rows.append(compared(seed, settings, arguments.amp_dtype, arguments.work))
        print(table(rows, arguments.amp_dtype), flush=True)
    ratio = statistics.median(row["ratio"] for row in rows)
    threads = rows[0]["float32"]["threads"]
    page = (
        f"# Hosts in float32 and in {arguments.amp_dtype} on {arguments.task}\n\n"
        f"`OMP_NUM_THREADS={threads} python {' '.join(sys.argv)}`\n\n"
        f"PPO, {arguments.envs} environments, {arguments.rounds} rounds (episodes of each), "
        "`--backend torch`, all other settings as they come. Accuracy is committed validation "
        "accuracy, final means over the last quarter of the rounds; gains are percentage points "
        "over the never-grow twin, ± one standard error. The ratio is final accuracy in mixed "
        f"precision over that in float32; its median must be at least {LEAST_RATIO}: "
        f"{'it is' if ratio >= LEAST_RATIO else 'IT IS NOT'}.\n\n"
        f"{table(rows, arguments.amp_dtype)}\n\n"
        f"{made_on(f'{threads} thread a run')}.\n"
    )
    print(page)
    if arguments.write:
        RESULTS.with_suffix(".md").write_text(page)
        RESULTS.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if ratio >= LEAST_RATIO else 1


if __name__ == "__main__":
    raise SystemExit(main())
