"""How much memory does an environment take? The slope of peak memory over environments.

    python benchmarks/memory.py --write                # every task, a few minutes
    python benchmarks/memory.py --tasks digits_mlp

Each measurement is a separate process that trains with a seed growing in every slot (the largest
blueprint that the slot allows) until all seeds act. It uses one minibatch per step: memory peaks
within a minibatch or a validation batch, so more minibatches would take longer but not more memory.
The slope is that of peak resident memory between two numbers of environments; it includes one
never-grow twin per eight environments. The backend is torch; the native one works on one
environment at a time and needs little beyond its parameters.
"""

import argparse
import json
import subprocess
import sys

import torch
from reporting import RESULTS, made_on, new_parser, publish, table

from esper.runtime.tasks import SUITES, find
from esper.simic.tools.task_check import measure_grown

FEW, MANY = 64, 256


def peak(task_name: str, envs: int, backend: str) -> int:
    """Return the peak resident memory, in bytes, of a fresh process in which all seeds act."""
    command = [sys.executable, __file__, "--measure", task_name, str(envs), backend]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def slope(task_name: str, backend: str = "torch") -> float:
    """Return bytes per environment."""
    many, few = (peak(task_name, envs, backend) for envs in (MANY, FEW))
    return (many - few) / (MANY - FEW)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    suites = [name for names in SUITES.values() for name in names]
    parser.add_argument("--tasks", nargs="+", default=suites)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        name, envs, backend = arguments.measure
        torch.set_num_threads(1)
        print(measure_grown(find(name), int(envs), backend)[0])
        return 0
    stored = RESULTS / "memory.json"
    found = json.loads(stored.read_text()) if stored.exists() else {}
    for name in arguments.tasks:
        found[name] = slope(name)
        print(f"{name:20} {found[name] / 2**20:6.2f} MiB per environment", flush=True)
    rows = [(f"`{name}`", f"{value / 2**20:.2f}") for name, value in found.items()]
    parts = (
        f"Slope of peak resident memory between {FEW} and {MANY} environments with the largest "
        "seed in every slot.",
        table(("task", "MiB per environment"), rows),
        f"{made_on()}.",
    )
    publish("memory", "Memory per environment", parts, arguments.write, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
