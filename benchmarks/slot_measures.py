"""What measuring empty slots costs: environment steps with and without it, alternating.

    python benchmarks/slot_measures.py --write             # about four minutes on one free core

All environments wait, so that every slot is empty and measured: the most it can cost. Pairs of
steps alternate in which comes first, and the result is the median ratio of their processor times,
which a busy machine changes less than elapsed times.
"""

import statistics
import time
from typing import Any

import torch
from hot_path_workload import Workload
from reporting import made_on, new_parser, publish, table

from esper.leyline.actions import HEADS
from esper.simic.growth.environment import GrowthEnv
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.backends.torch import TorchBackend

LIMIT = 0.10
"""Largest share of a step that measuring the slots may take."""
CASES = (("digits_shift", "native", 64), ("pixels", "native", 16), ("digits_shift", "torch", 64))


def cost(task: str, backend: str, envs: int, pairs: int) -> dict[str, Any]:
    """Return the median cost as a share of a step without measuring, and that step's seconds."""
    torch.set_num_threads(1)
    work = Workload(task=task, envs=envs, threads=1)
    rows = torch.arange(envs)
    env = GrowthEnv([work.found], rows, work.growth(backend), work.precision, torch.device("cpu"))
    (arithmetic,) = env.backends.values()
    assert isinstance(arithmetic, NativeBackend | TorchBackend)
    wait = torch.zeros(envs, len(HEADS), dtype=torch.long)
    ratios, plain, left = [], [], 0
    for pair in range(pairs):
        if left < 2:
            env.reset(pair)
            env.step(wait)
            left = work.episode_length // 2
        seconds = {}
        for measures in (True, False) if pair % 2 else (False, True):
            arithmetic.measures_slots = measures
            begin = time.process_time()
            env.step(wait)
            seconds[measures] = time.process_time() - begin
        left -= 2
        ratios.append(seconds[True] / seconds[False])
        plain.append(seconds[False])
    return {
        "task": task,
        "backend": backend,
        "envs": envs,
        "pairs": pairs,
        "step": statistics.median(plain),
        "cost": statistics.median(ratios) - 1.0,
    }


def main() -> int:
    """Run the benchmark; return its exit status, 1 if a cost exceeds the limit."""
    parser = new_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps per case")
    arguments = parser.parse_args()
    found = [cost(*case, arguments.pairs) for case in CASES]
    rows = [
        (
            f"`{row['task']}`",
            row["backend"],
            row["envs"],
            f"{1000 * row['step']:.0f}",
            f"{100 * row['cost']:.1f}",
        )
        for row in found
    ]
    parts = (
        "Median over pairs of steps, with and without measuring, in processor time. All slots are "
        "empty, the most that measuring can cost, because a slot with a seed is not measured.",
        table(("task", "backend", "environments", "step, ms", "cost, %"), rows),
        f"{made_on()}.",
    )
    publish("slot_measures", "Cost of measuring empty slots", parts, arguments.write, found)
    return int(any(row["cost"] > LIMIT for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
