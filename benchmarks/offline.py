"""What is learning from records worth, and how fast is its trainer?

    OMP_NUM_THREADS=1 python benchmarks/offline.py --write     # about 45 minutes on one free core
    python benchmarks/offline.py --only speed --device cuda:0 --batch-size 256
    python benchmarks/offline.py --envs 8 --record-rounds 2 --rounds 2 --hosts 7 --seeds 1

Speed: a training step of the offline trainer eager, compiled and in mixed precision, in turns.
Claims: does a clone of the best fixed schedule reach its gain; is advantage-weighted regression
above cloning on a mixed record of random actions, the heuristic and an early PPO; and how many
rounds does PPO save that starts from a clone. Everything is kept under ``--work``: an interrupted
study continues, and what is finished is not repeated.
"""

import math
import os
from typing import Any

import numpy as np
import torch
from offline_claims import WINDOW, Study, rounds_until, smoothed, studied
from offline_trainer import trainer_rows
from reporting import made_on, publish, table
from runs import Mean, study_parser, trained

from esper.simic.training.setup import resolve_device

ENOUGH = 0.95
"""Share of the schedule's gain that a clone is to reach."""


def speed_parts(rows: list[dict[str, Any]], where: str, batch_size: int) -> list[str]:
    """Return the paragraphs about the speed of the trainer."""
    lines = [
        (
            row["variant"],
            f"{row['milliseconds']:.1f}",
            f"{row['steps_per_second']:.1f}",
            f"{row['recorded_steps_per_second']:,.0f}",
            f"{row['ratio']:.2f}",
        )
        for row in rows
    ]
    heads = ("trainer", "ms per step", "steps/s", "recorded steps/s", "times eager")
    return [
        "## Speed of the trainer",
        f"{where}. Cloning, batches of {batch_size} episodes of 40 steps, loading and transfer "
        "included; medians of alternating steps, without the first two, in which compilation "
        "falls.",
        table(heads, lines),
    ]


def two_errors(differences: list[float]) -> tuple[float, float, bool]:
    """Return mean and standard error, and whether the mean is above two of them."""
    values = np.array(differences)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return float(values.mean()), error, bool(values.mean() > 2.0 * error)


def verdict(met: bool) -> str:
    """Return the verdict on a claim."""
    return "**Met.**" if met else "**Not met.**"


def claim_parts(found: dict[str, Any], study: Study) -> list[str]:
    """Return the paragraphs about what was learned."""
    seeds, schedule = found["seeds"], found["schedule_gain"]
    names = ("clone", "bc", "awr", "early ppo")
    rows = [
        (
            f"{name}, {way}",
            *(f"{seed[name][way]:+.1f}" for seed in seeds),
            str(Mean.of([seed[name][way] / 100.0 for seed in seeds])),
        )
        for name in names
        for way in ("sampled", "greedy")
    ]
    heads = ("gain in points", *(f"seed {seed['seed']}" for seed in seeds), "mean ± error")
    clone = float(np.mean([seed["clone"]["sampled"] for seed in seeds]))
    share = clone / schedule if schedule > 0 else math.nan
    mean, error, above = two_errors([s["awr"]["sampled"] - s["bc"]["sampled"] for s in seeds])
    return [
        "## What is learned",
        f"`{study.suite}`, {study.envs} environments; every record has {study.record_rounds} "
        f"rounds. Gain is test utility above never growing, on {study.hosts} fresh hosts with "
        f"{study.members} episodes each, the same for all policies. The mixed record holds equal "
        "parts of random actions, the heuristic and PPO in its first rounds (early ppo).",
        table(heads, rows),
        f"The best fixed schedule that grows one seed at a time, on training hosts, is "
        f"*{found['plan']}*; on the fresh hosts it gains {schedule:+.1f} points. Its clone reaches "
        f"{100 * share:.0f} % of that with sampled actions. At least {100 * ENOUGH:.0f} %: "
        f"{verdict(share >= ENOUGH)}",
        f"Advantage-weighted regression is above cloning of the same record by {mean:+.1f} ± "
        f"{error:.1f} points (sampled actions, mean and standard error over {len(seeds)} seeds). "
        f"By two standard errors: {verdict(above)}",
        *warm_parts(found, study),
    ]


def warm_parts(found: dict[str, Any], study: Study) -> list[str]:
    """Return the paragraphs about PPO that starts from the clone of the schedule."""
    rows, halves = [], []
    for seed in found["seeds"]:
        level = smoothed(seed["cold"])[-1]
        reached = rounds_until(seed["warm"], level)
        halves.append(reached is not None and reached <= study.rounds / 2)
        rows.append(
            (
                seed["seed"],
                f"{level:+.1f}",
                f"{smoothed(seed['warm'])[-1]:+.1f}",
                "never" if reached is None else reached,
            )
        )
    heads = ("seed", f"PPO, {study.rounds} rounds", "from the clone", "rounds to PPO's gain")
    return [
        f"PPO for {study.rounds} rounds, from random weights and from the clone "
        f"(`--initial-policy`): gain in training, mean of {WINDOW} rounds, in points.",
        table(heads, rows),
        f"PPO's gain after {study.rounds} rounds in at most half the rounds, in every seed: "
        f"{verdict(all(halves))}",
    ]


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = study_parser(__doc__, "offline", seeds=3, rounds=30)
    parser.add_argument("--only", choices=("speed", "claims"), help="one part of the page")
    parser.add_argument("--device", default="cpu", help="device of the trainers that are timed")
    parser.add_argument("--batch-size", type=int, default=32, help="episodes, when timed")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each trainer")
    parser.add_argument("--suite", default="suite", help="suite, family or task of the claims")
    parser.add_argument("--envs", type=int, default=28)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--record-rounds", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=112, help="fresh hosts")
    parser.add_argument("--training-hosts", type=int, default=56)
    parser.add_argument("--members", type=int, default=2, help="episodes per fresh host")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    page, figures = [], {}
    if arguments.only != "claims":
        torch.set_num_threads(arguments.threads if device.type == "cpu" else 1)
        settings = {"task": "digits_shift", "envs": 32, "rounds": 1, "record": True, "threads": 1}
        records = trained("random", settings, arguments.work / "timed").path
        rows = trainer_rows(records, device, arguments.batch_size, arguments.repeats)
        where = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"CPU, {arguments.threads} threads"
        )
        page += speed_parts(rows, where, arguments.batch_size)
        figures["speed"] = {"where": where, "rows": rows}
    if arguments.only != "speed":
        torch.set_num_threads(1)
        study = Study.of(arguments)
        figures["claims"] = studied(study, arguments.seeds)
        page += claim_parts(figures["claims"], study)
    whole = arguments.only is None
    name = "offline" if whole else f"offline_{arguments.only}_{device.type}"
    publish(name, "Learning from records", [*page, f"{made_on()}."], arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
