"""How does the cost of a step grow with environments, slots, living seeds and host width?

    python benchmarks/scaling.py --write

Times whole training loops (see ``hot_path_workload.py``) with both backends; the naive loop is not
run. Writes a table and plots. The exponent is the slope of log time against log size between the
two largest sizes: 1 means linear in the number of environments, slots and seeds, or in the
operations of a wider host; more means superlinear.
"""

import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from reporting import RESULTS, made_on, new_parser, publish, table

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime import data
from esper.runtime.tasks import Task, task

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from hot_path_workload import Loop, Workload

SLOTS = 10
WIDTHS = (4, 8, 16, 32)


def register(name: str, host: CnnHost) -> str:
    """Register a task on plain digits for ``host``; return its name."""

    def made() -> Task:
        return Task(name, "digits", host, data.digits)

    made.__name__ = name
    task(made)
    return name


def ten_blocks(slots: int) -> CnnHost:
    """Return a host of ten blocks of four channels, with slots in the first ``slots`` blocks."""
    names = tuple(f"r0c{block}" for block in range(slots))
    return CnnHost((4,) * SLOTS, 10, (8, 8, 1), slot_names=names)


def milliseconds(workload: Workload, backend: str, episodes: int) -> float:
    """Return the median over episodes of the time per step of all environments, with update."""
    loop = Loop(workload, backend)
    found = []
    for _ in range(episodes + 1):
        loop.begin()
        loop.clear()
        loop.play_episode()
        found.append(1e3 * loop.seconds / workload.episode_length)
    loop.close()
    return statistics.median(found[1:])


def sweeps(most: int) -> dict[str, dict[float, Workload]]:
    """Return the workloads of each sweep, by size."""
    base = Workload(episode_length=12, threads=os.cpu_count() or 1)
    few = replace(base, envs=16)
    slots = {s: register(f"scaling_slots_{s}", ten_blocks(s)) for s in (1, 2, 5, SLOTS)}
    # Seeds germinate one after another: in a longer episode, most steps have all of them.
    ten = replace(few, task=slots[SLOTS], episode_length=30)
    hosts = {w: register(f"scaling_width_{w}", CnnHost((w, 2 * w), 10, (8, 8, 1))) for w in WIDTHS}
    return {
        "environments": {n: replace(base, envs=n) for n in (4, 16, 64, 256, 1024) if n <= most},
        "slots": {s: replace(few, task=name) for s, name in slots.items()},
        "living seeds": {s: replace(ten, seeds=s) for s in (0, 1, 2, 5, 10)},
        # The second block dominates: its multiplications grow with the square of the width.
        "operations of the host": {
            (w / WIDTHS[0]) ** 2: replace(few, task=name) for w, name in hosts.items()
        },
    }


def exponent(sizes: list[float], times: list[float]) -> float:
    """Return the slope of log time over log size between the two largest sizes."""
    return math.log(times[-1] / times[-2]) / math.log(sizes[-1] / sizes[-2])


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot one panel per sweep."""
    figure = Figure(figsize=(9, 6.5), layout="tight")
    for panel, (name, rows) in zip(figure.subplots(2, 2).flat, found.items(), strict=True):
        for backend, times in rows["ms"].items():
            panel.plot(rows["sizes"], times, marker="o", label=backend)
        if name in ("environments", "operations of the host"):
            panel.set(xscale="log", yscale="log")
        else:
            panel.set_ylim(bottom=0)
        panel.set(xlabel=name, ylabel="ms per step of all environments")
        panel.legend()
    figure.savefig(path)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--most", type=int, default=1024, help="largest number of environments")
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--backends", nargs="+", default=["native", "torch"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    parts = [
        "Milliseconds per step of all environments together, update included; medians of "
        f"{arguments.episodes} episodes of 12 steps (30 for living seeds). Environments: "
        "`digits_shift` with one living seed. Slots and living seeds: 16 hosts of ten blocks of 4 "
        f"channels. Operations: 16 hosts of two blocks, widths {', '.join(map(str, WIDTHS))}, in "
        "multiples of the narrowest. The exponent is the slope of log time between the two "
        "largest sizes.",
        "![plots](scaling.svg)",
    ]
    for name, workloads in sweeps(arguments.most).items():
        sizes = list(workloads)
        times = {
            backend: [milliseconds(w, backend, arguments.episodes) for w in workloads.values()]
            for backend in arguments.backends
        }
        found[name] = {"sizes": sizes, "ms": times}
        rows = [
            (backend, *(f"{value:.1f}" for value in values), f"{exponent(sizes, values):.2f}")
            for backend, values in times.items()
        ]
        parts.append(table((name, *(f"{size:g}" for size in sizes), "exponent"), rows))
        print(parts[-1], flush=True)
    parts.append(f"{made_on()}.")
    publish("scaling", "Time per step against the amount of work", parts, arguments.write, found)
    if arguments.write:
        plot(found, RESULTS / "scaling.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
