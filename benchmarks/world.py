"""Is there something to see? The controls on fresh hosts of each family, and the gate.

    python benchmarks/world.py --write                       # two hours on 2 cores; resumable
    python benchmarks/world.py --write --families one_seed   # the page keeps the other families

Every rule is tuned on training draws and scored on held-out draws, on the test split. A family
passes the gate if knowing a host is worth enough; see ``esper_lab.ladder_steps.Headroom``. Finished
stages are kept under ``--work``. With ``--write`` the rungs become the controls that ship with
Esper, so that ``esper evaluate`` need not play them; they are read only with ``--shipped``.
"""

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ladders import control_figures, ladder_table
from reporting import RESULTS, made_on, new_parser, publish

from esper.runtime.tasks import FAMILIES
from esper.simic.run.run_directory import git_revision
from esper_lab.controls import controls_identity
from esper_lab.hosts import SPLITS, evaluation_hosts
from esper_lab.ladder import RULE, evaluate
from esper_lab.ladder_steps import headroom, headroom_text, steps
from esper_lab.plans import library
from esper_lab.shipped_controls import ShippedControls, shipped_controls, write_shipped


def progress(suite: str, stage: str, done: int, total: int) -> None:
    """Print a line per finished batch."""
    print(f"{suite} {stage}: {done} more of {total} hosts", flush=True)


def known_figures(write: bool) -> dict[str, dict[str, Any]]:
    """The figures of the families that are on the page, if it is written again."""
    path = RESULTS / "world.json"
    if not write or not path.exists():
        return {}
    known: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return {family: known[family] for family in FAMILIES if family in known}


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--training-hosts", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, default=Path("runs/world"))
    parser.add_argument("--shipped", action="store_true", help="a page of the shipped controls")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = [
        f"Rules tuned on {arguments.training_hosts} training draws and scored on "
        f"{arguments.hosts} held-out draws, one host each, on the test split. The data of the "
        f"fresh hosts are split with the seeds {SPLITS} in turn, those of the hosts on which rules "
        "are tuned with other seeds; 95 % intervals are over these splits. The clairvoyant's plans "
        "are chosen with one data order and scored with another, so a rule can be above it."
    ]
    figures: dict[str, dict[str, Any]] = {}
    for family in arguments.families:
        (hosts,) = evaluation_hosts(
            family, arguments.training_hosts, arguments.hosts, arguments.threads
        )
        known = shipped_controls(family) if arguments.shipped else None
        work, report = arguments.work / family, partial(progress, family)
        found = evaluate(RULE, family, [hosts], 1, work, report, known)
        if arguments.write and known is None:
            plans = library()
            controls = ShippedControls(
                controls_identity(hosts, plans),
                f"commit {(git_revision() or 'unknown')[:10]}, {made_on()}",
                arguments.training_hosts,
                arguments.hosts,
                found.rungs,
            )
            print(f"wrote {write_shipped(family, controls)}")
        room = headroom(found)
        figures[family] = {
            "hosts": arguments.hosts,
            "headroom": asdict(room),
            "passes": room.passes,
            "lacking": room.lacking,
            "controls": control_figures(found),
            "page": [ladder_table(steps(found)), headroom_text(found)],
            "made": made_on() if known is None else known.origin,
        }
    figures = known_figures(arguments.write) | figures
    for family in sorted(figures, key=list(FAMILIES).index):
        parts += [f"## {family}", *figures[family]["page"], f"{figures[family]['made']}."]
    publish("world", "Is there something to see?", parts, arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
