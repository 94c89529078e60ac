"""What measuring empty slots costs: training with and without it, in alternating steps.

    python benchmarks/slot_measures.py --write             # about five minutes on one free core

All environments wait, so that every slot is empty and measured: the most it can cost. Pairs of
steps of the whole loop alternate in which comes first; the cost is the median difference of their
processor times, which a busy machine changes less than elapsed times, as a share of the time that
training takes without measuring: a step and its part of the update of the policy.
"""

import statistics
import time
from typing import Any

import torch
from hot_path_workload import Loop, Workload
from reporting import made_on, new_parser, publish, table

from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.backends.torch import TorchBackend

LIMIT = 0.04
"""Largest share of training that measuring the slots may take."""
CASES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"task": "digits_shift", "envs": 64}, "native"),
    ({"task": "digits_shift", "envs": 64}, "torch"),
    # As `cifar_baseline` trains, on data of its shape.
    ({"task": "pixels", "envs": 8, "max_batches": 50, "batch_size": 128}, "native"),
    ({"task": "text_gpt", "envs": 16}, "native"),
)
STEPS = 21
"""Steps of an episode: a first one, then pairs."""


def cost(settings: dict[str, Any], backend: str, pairs: int) -> dict[str, Any]:
    """Return the median cost as a share of training, and seconds of a step without measuring."""
    torch.set_num_threads(1)
    loop = Loop(Workload(threads=1, seeds=0, episode_length=STEPS, **settings), backend)
    (arithmetic,) = loop.environment.backends.values()
    assert isinstance(arithmetic, NativeBackend | TorchBackend)
    extra: list[float] = []
    plain: list[float] = []
    updates: list[float] = []

    def timed(part: Any) -> float:
        begin = time.process_time()
        part()
        return time.process_time() - begin

    while len(extra) < pairs:
        loop.begin()
        loop.step()
        for pair in range(STEPS // 2):
            seconds = {}
            for measures in (True, False) if pair % 2 else (False, True):
                arithmetic.measures_slots = measures
                seconds[measures] = timed(loop.step)
            extra.append(seconds[True] - seconds[False])
            plain.append(seconds[False])
        updates.append(timed(loop.end))
    loop.close()
    training = statistics.median(plain) + statistics.median(updates) / STEPS
    return {
        **{name: settings[name] for name in ("task", "envs")},
        "backend": backend,
        "pairs": len(extra),
        "step": statistics.median(plain),
        "cost": statistics.median(extra) / training,
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
        "Median over pairs of steps of the whole training loop, with and without measuring, in "
        "processor time, as a share of training (step and update of the policy). All slots are "
        "empty, the most that measuring can cost, because a slot with a seed is not measured.",
        table(("task", "backend", "environments", "step, ms", "cost of training, %"), rows),
        f"{made_on()}.",
    )
    publish("slot_measures", "Cost of measuring empty slots", parts, arguments.write, found)
    return int(any(row["cost"] > LIMIT for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
