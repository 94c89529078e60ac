"""Factors of wide convolutions in bfloat16, natively: accuracy and speed beside float32.

    OMP_NUM_THREADS=1 python benchmarks/native_bfloat16.py --write     # five minutes on one core

A processor with a matrix unit (AMX) has a page of its own.

Hosts of 32-64 channels are trained for 40 steps without growing, in both precisions from the same
initial weights and on the same minibatches. The speed is that of whole environment steps, which
take turns.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hot_path_workload import wide_128
from reporting import made_on, new_parser, publish, table

from esper.karn.intervals import interval
from esper.kasmina.hosts.cnn import CnnHost
from esper.leyline.actions import HEADS
from esper.native.library import has_matrix_unit
from esper.runtime.tasks import Task, find
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.tolaria.precision import Precision

TASKS = ("digits_noisy", "digits_few_labels", "digits_shift")
WIDTHS = ((32, 64), (64, 128), (128, 256))
PRECISIONS = {"float32": Precision("cpu"), "bfloat16": Precision("cpu", torch.bfloat16)}
STEPS = 40


def environment(task: Task, precision: str, envs: int, batches: int) -> GrowthEnv:
    """Return environments of a task on the native backend, of which none shares minibatches."""
    config = GrowthConfig(
        seed=1,
        episode_length=STEPS,
        max_batches=batches,
        batch_size=task.batch_size,
        group_size=1,
        backend="native",
    )
    device = torch.device("cpu")
    return GrowthEnv([task], torch.arange(envs), config, PRECISIONS[precision], device)


def wait(envs: int) -> torch.Tensor:
    """Return the action WAIT of all environments."""
    return torch.zeros(envs, len(HEADS), dtype=torch.long)


def accuracy(name: str, precision: str, envs: int) -> list[float]:
    """Return the validation accuracy of every host of a task after the last step."""
    task = find(name)
    host = CnnHost((32, 64), task.host.classes, task.host.image, pools=1)
    trained = environment(replace(task, host=host), precision, envs, task.max_batches)
    assert trained.precision.enabled == (precision == "bfloat16")
    trained.reset(0)
    for _ in range(STEPS):
        step = trained.step(wait(trained.count))
    found: list[float] = step.report.scores.accuracy[:envs].tolist()
    return found


def speed(channels: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Return processor seconds of a step of hosts of this width, and the median ratio of both."""
    base = wide_128()
    task = replace(base, host=CnnHost(channels, 10, base.host.image, pools=1))
    both = {name: environment(task, name, 2, 8) for name in PRECISIONS}
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for each in both.values():
        each.reset(0)
    for _ in range(rounds + 1):
        for name, each in both.items():
            begin = time.process_time()
            each.step(wait(each.count))
            seconds[name].append(time.process_time() - begin)
    taken = {name: np.array(values[1:]) for name, values in seconds.items()}
    return {
        "channels": channels,
        **{name: float(np.median(values)) for name, values in taken.items()},
        "ratio": float(np.median(taken["float32"] / taken["bfloat16"])),
    }


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--envs", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, figures = [], dict[str, Any]()
    for name in arguments.tasks:
        found = {p: np.array(accuracy(name, p, arguments.envs)) for p in PRECISIONS}
        difference = interval(100 * (found["bfloat16"] - found["float32"])[None])
        figures[name] = {p: values.tolist() for p, values in found.items()}
        means = (f"{100 * values.mean():.1f} %" for values in found.values())
        low, high = difference.low[0], difference.high[0]
        rows.append((f"`{name}`", *means, f"{difference.mean[0]:+.2f} [{low:+.2f}, {high:+.2f}]"))
        print(*rows[-1], flush=True)
    speeds = [speed(channels, arguments.rounds) for channels in WIDTHS[: arguments.rounds]]
    parts = (
        f"{arguments.envs} hosts of 32-64 channels a task, never grown, after {STEPS} steps: mean "
        "validation accuracy, and the difference in points with its 95 % interval over hosts.",
        table(("task", *PRECISIONS, "bfloat16 − float32"), rows),
        "Processor time of an environment step (8 minibatches of 64 images of 8 by 8, and "
        "validation), in turns.",
        table(
            ("channels", "float32, ms", "bfloat16, ms", "float32 / bfloat16"),
            (
                (
                    "-".join(map(str, row["channels"])),
                    *(f"{1000 * row[name]:.1f}" for name in PRECISIONS),
                    f"{row['ratio']:.2f}",
                )
                for row in speeds
            ),
        ),
        f"{made_on()}.",
    )
    figures["speed"] = speeds
    unit, title = ("_amx", ", by AMX") if has_matrix_unit() else ("", "")
    title = f"Wide convolutions in bfloat16{title}"
    publish(f"native_bfloat16{unit}", title, parts, arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
