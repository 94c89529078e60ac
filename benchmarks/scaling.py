"""What an environment step costs as the work grows: environments, slots, living seeds, host width.

    python benchmarks/scaling.py --write

Whole training loops (see ``scripts/hot_path_workload.py``) without the naive one, both backends.
Writes a table and plots. The exponent is the slope of log time against log size between the two
largest sizes: 1 is linear in the number of environments, slots and seeds, and in the operations of
a wider host; above it a term would be superlinear.
"""

import argparse
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import torch
from machine import made_on

from esper.kasmina.hosts.cnn import CnnHost
from esper.runtime import data
from esper.runtime.registry import Task, task

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from hot_path_workload import Loop, Workload

RESULTS = Path(__file__).parent / "results"
SLOTS = 10
WIDTHS = (4, 8, 16, 32)


def register(name: str, host: CnnHost) -> str:
    """A task on plain digits for ``host``."""

    def made() -> Task:
        return Task(name, "digits", host, data.digits)

    made.__name__ = name
    task(made)
    return name


def ten_blocks(slots: int) -> CnnHost:
    """Ten blocks of four channels, with the first ``slots`` slots in use."""
    names = tuple(f"r0c{block}" for block in range(slots))
    return CnnHost((4,) * SLOTS, 10, (8, 8, 1), slot_names=names)


def milliseconds(workload: Workload, backend: str, episodes: int) -> float:
    """Median over episodes of the time of a step of all environments, update included."""
    loop = Loop(workload, backend)
    found = []
    for episode in range(episodes + 1):
        loop.begin()
        loop.clear()
        for _ in range(workload.episode_length):
            loop.step()
        loop.end()
        if episode:
            found.append(1e3 * loop.seconds / workload.episode_length)
    loop.close()
    return statistics.median(found)


def operations_of(width: int) -> float:
    """Multiplications of the host's second block, which dominates."""
    return float(width * 2 * width)


def sweeps(most: int) -> dict[str, tuple[list[float], list[Workload]]]:
    """What is varied: sizes and workloads."""
    base = Workload(episode_length=12, threads=os.cpu_count() or 1)
    envs = [n for n in (4, 16, 64, 256, 1024) if n <= most]
    slots = [1, 2, 5, 10]
    living = [0, 1, 2, 5, 10]
    hosts = {w: register(f"scaling_width_{w}", CnnHost((w, 2 * w), 10, (8, 8, 1))) for w in WIDTHS}
    with_slots = {s: register(f"scaling_slots_{s}", ten_blocks(s)) for s in slots}
    few = replace(base, envs=16)
    return {
        "environments": ([float(n) for n in envs], [replace(base, envs=n) for n in envs]),
        "slots": (
            [float(s) for s in slots],
            [replace(few, task=with_slots[s]) for s in slots],
        ),
        # Seeds germinate one after another: a longer episode, so that most of it has all of them.
        "living seeds": (
            [float(s) for s in living],
            [replace(few, task=with_slots[SLOTS], seeds=s, episode_length=30) for s in living],
        ),
        "operations of the host": (
            [operations_of(w) / operations_of(WIDTHS[0]) for w in WIDTHS],
            [replace(few, task=hosts[w]) for w in WIDTHS],
        ),
    }


def exponent(sizes: list[float], times: list[float]) -> float:
    """Slope in the logarithms between the two largest sizes."""
    return math.log(times[-1] / times[-2]) / math.log(sizes[-1] / sizes[-2])


def plot(found: dict, path: Path) -> None:
    """One panel for each thing that is varied."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.5))
    for panel, (name, rows) in zip(panels.flat, found.items(), strict=True):
        for backend, times in rows["ms"].items():
            panel.plot(rows["sizes"], times, marker="o", label=backend)
        logarithmic = name in ("environments", "operations of the host")
        panel.set_xscale("log" if logarithmic else "linear")
        panel.set_yscale("log" if logarithmic else "linear")
        panel.set_xlabel(name)
        panel.set_ylabel("ms a step of all environments")
        if not logarithmic:
            panel.set_ylim(bottom=0)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=1024, help="environments")
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--backends", nargs="+", default=["native", "torch"])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict] = {}
    lines = [
        "# What a step costs as the work grows",
        "",
        "`python benchmarks/scaling.py --write`",
        "",
        "Milliseconds of an environment step of all environments, update included; medians of "
        f"{arguments.episodes} episodes of 12 steps (30 for living seeds). Environments: "
        "`digits_shift` with one living seed. Slots and living seeds: 16 hosts of ten blocks of 4 "
        f"channels. Operations: 16 hosts of two blocks, widths {', '.join(map(str, WIDTHS))}, in "
        "multiples of the narrowest. The exponent is the slope of log time between the two "
        "largest sizes.",
        "",
        "![plots](scaling.svg)",
        "",
    ]
    for name, (sizes, workloads) in sweeps(arguments.most).items():
        rows: dict = {"sizes": sizes, "ms": {}}
        found[name] = rows
        lines += [
            f"| {name} | {' | '.join(f'{size:g}' for size in sizes)} | exponent |",
            "|---|" + "---|" * (len(sizes) + 1),
        ]
        for backend in arguments.backends:
            times = [milliseconds(w, backend, arguments.episodes) for w in workloads]
            rows["ms"][backend] = times
            cells = " | ".join(f"{value:.1f}" for value in times)
            lines.append(f"| {backend} | {cells} | {exponent(sizes, times):.2f} |")
            print(name, lines[-1], flush=True)
        lines.append("")
    lines += [
        f"{made_on()}.",
        "",
    ]
    print("\n".join(lines))
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "scaling.md").write_text("\n".join(lines))
        (RESULTS / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")
        plot(found, RESULTS / "scaling.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
