"""Does the policy learn? Trains it on several seeds and compares it with its controls.

    python benchmarks/learning.py                     # about 45 minutes on 2 cores
    python benchmarks/learning.py --seeds 1 --rounds 4

For every seed: PPO for ``--rounds`` rounds, then the random policy, the plateau heuristic and
never-grow on the same seed. The gain is committed validation accuracy minus that of the never-grow
twin with the same host and data; see ``runs.mean_gain``. Runs lie under ``--work``; a run that was
cut off goes on from its last checkpoint, and one that is finished is not run again. For several
tasks at once see ``suite.py``.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from machine import made_on
from runs import ZERO, Mean, mean_gain, trained

from esper.karn.store import read_events
from esper.leyline.config import TrainConfig, flatten
from esper.leyline.events import AnalyticsSnapshot, EpisodeOutcome, PPOUpdateCompleted
from esper.leyline.metrics import Metric
from esper.simic.run.run_directory import stored_config

RESULTS = Path(__file__).parent / "results"


def report(seed: int, settings: dict, work: Path) -> dict:
    """Everything the table needs of one seed."""
    run = trained("ppo", settings, work / f"ppo-seed{seed}")
    outcomes = list(read_events(run, EpisodeOutcome))
    updates = list(read_events(run, PPOUpdateCompleted))
    speed = list(read_events(run, AnalyticsSnapshot))
    tenth = math.ceil(len(outcomes) / 10)
    size = settings["group_size"]
    first, last = (mean_gain(part, size) for part in (outcomes[:tenth], outcomes[-tenth:]))
    controls, kept = {}, {}
    for policy in ("random", "heuristic", "never"):
        control_run = trained(
            policy, {**settings, "rounds": max(2, tenth)}, work / f"{policy}-seed{seed}"
        )
        played = list(read_events(control_run, EpisodeOutcome))
        controls[policy] = mean_gain(played, size)
        kept[policy] = float(np.mean([np.array(o.fossilised) > 0 for o in played]))
    ends = outcomes[-tenth:]
    explained = [u.metrics[Metric.EXPLAINED_VARIANCE] for u in updates[-tenth:]]
    within = [u.metrics[Metric.EXPLAINED_VARIANCE_WITHIN_STEP] for u in updates[-tenth:]]
    begin = outcomes[0]
    return {
        "seed": seed,
        "seconds": sum(s.rollout_seconds + s.update_seconds for s in speed),
        "threads": stored_config(run)[1]["threads"],
        "first": first,
        "last": last,
        **controls,
        "heuristic_keeps": kept["heuristic"],
        "fossilised": float(np.mean([o.fossilised for o in ends])),
        "added": float(np.mean([o.added_parameters for o in ends])),
        "explained": float(np.mean(explained)),
        "within": float(np.mean(within)),
        "untrained": sum(begin.fossilised) / max(1, sum(begin.germinated)),
        "passed": all(
            (
                last.above(ZERO),
                last.above(first),
                last.above(controls["random"]),
                controls["heuristic"].above(ZERO),
                kept["heuristic"] >= 0.5,
                float(np.mean([o.fossilised for o in ends])) >= 0.5,
                float(np.mean(explained)) > 0.3,
                sum(begin.fossilised) >= 0.1 * sum(begin.germinated),
            )
        ),
    }


def table(rows: list[dict]) -> str:
    """The results in Markdown."""
    heads = (
        "seed",
        "first tenth",
        "last tenth",
        "random",
        "heuristic (environments that keep a seed)",
        "never",
        "fossilised an episode",
        "parameters added",
        "explained variance (within a step)",
        "untrained fossilises",
        "minutes",
        "holds",
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for r in rows:
        lines.append(
            f"| {r['seed']} | {r['first']} | {r['last']} | {r['random']} "
            f"| {r['heuristic']} ({100 * r['heuristic_keeps']:.0f} %) "
            f"| {r['never']} | {r['fossilised']:.2f} | {r['added']:.0f} "
            f"| {r['explained']:.2f} ({r['within']:.2f}) | {100 * r['untrained']:.0f} % "
            f"| {r['seconds'] / 60:.1f} | {'yes' if r['passed'] else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--work", type=Path, default=Path("runs/learning"))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    settings = {
        **flatten(TrainConfig()),
        "task": arguments.task,
        "rounds": arguments.rounds,
    }
    rows = []
    for seed in arguments.seeds:
        rows.append(report(seed, {**settings, "seed": seed}, arguments.work))
        print(table(rows), flush=True)
    threads = rows[0]["threads"]
    text = (
        f"# Learning on {arguments.task}\n\n"
        f"`OMP_NUM_THREADS={threads} python benchmarks/learning.py "
        f"--rounds {arguments.rounds} --seeds {' '.join(map(str, arguments.seeds))} --write`\n\n"
        f"{settings['envs']} environments, {arguments.rounds} rounds (episodes of each), all other "
        "settings as they come. Gains are percentage points of committed validation accuracy over "
        "the never-grow twin, ± one standard error.\n\n"
        f"{table(rows)}\n\n"
        f"{made_on(f'{threads} thread a run')}. Minutes are wall time of the PPO run.\n"
    )
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"learning_{arguments.task}.md").write_text(text)
        plain = [{k: vars(v) if isinstance(v, Mean) else v for k, v in row.items()} for row in rows]
        (RESULTS / f"learning_{arguments.task}.json").write_text(json.dumps(plain, indent=2) + "\n")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
