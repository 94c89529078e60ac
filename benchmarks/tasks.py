"""What is growing worth on each task? The ladder of every task, on test, on several splits.

    python benchmarks/tasks.py --write              # every task of both suites
    python benchmarks/tasks.py --suites digits      # one task

The rules of a task are tuned on training hosts of that task, and all controls are scored on its
fresh hosts, which have other initial weights, data orders and splits of the data. A task's best
fixed schedule is what ``esper tasks`` shows. Finished stages are kept under ``--work``.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ladders import best_of, control_figures
from populations import SPLITS, controls, parts, random_plans
from reporting import made_on, new_parser, publish, table

from esper.leyline.actions import BLUEPRINTS, TEMPO_STEPS, Style
from esper.runtime.tasks import SUITES, Task, find, find_all
from esper.scripts.entry import run_guarded
from esper_lab.evaluation import CLAIRVOYANT, LOOKING, WITHOUT_GROWING, Evaluation
from esper_lab.ladder_steps import points, points_text
from esper_lab.plans import Plan, library, schedule
from esper_lab.worth import TABLE

FIXED = "best fixed schedule"
COLUMNS = {
    "never grow, tuned": "never grow, tuned",
    "static network of three times the size": "static network, three times the size",
    "everything at step 0": "everything at step 0",
    FIXED: "best fixed schedule",
    "looking": "best rule that looks",
    CLAIRVOYANT: "clairvoyant per host",
}
"""Columns of the page by key of a task's figures."""


def words(plan: Plan, task: Task) -> str:
    """Describe a plan for the host of a task: what grows in which slot from which step."""
    rows = schedule((plan,), task)
    seeds = [
        f"{BLUEPRINTS[int(rows.blueprint[0, s])]} in {slot.name} from step {int(rows.start[0, s])}"
        f" ({Style(int(rows.style[0, s])).name.lower()},"
        f" {TEMPO_STEPS[int(rows.tempo[0, s])]} steps)"
        for s, slot in enumerate(task.host.slots)
        if int(rows.start[0, s]) < task.episode_length
    ]
    return ", ".join(seeds) or "never"


def figures_of(found: Evaluation, plans: tuple[Plan, ...]) -> dict[str, Any]:
    """Return the figures of a task, points with intervals."""
    looking, network = (best_of(found, names) for names in (LOOKING, WITHOUT_GROWING))
    assert looking is not None
    assert network is not None
    fixed = next(rung for rung in found.rungs if rung.name == FIXED)
    assert fixed.chosen is not None
    plan = plans[fixed.chosen[0]]
    return {
        "hosts": len(found.tasks),
        "splits": len(set(found.splits)),
        "training_hosts": found.training_hosts,
        "schedule": words(plan, find(found.suite)),
        "looking": looking.name,
        "network": network.name,
        "above_network": points(np.subtract(fixed.utility, network.utility), found.splits),
        "controls": control_figures(found),
    }


def page(found: dict[str, dict[str, Any]], suites: list[str]) -> list[str]:
    """Return the paragraphs and tables of the page."""
    one = next(iter(found.values()))
    splits, each = one["splits"], one["hosts"] // one["splits"]
    text = [
        "Points of utility on the test split above the never-grow twin of the same recipe, and in "
        "brackets 95 % intervals; "
        f"v: the mean on validation. {splits} splits of the data with {each} fresh hosts in each; "
        "the intervals are over splits, or over hosts where there is one split. Rules are tuned on "
        f"{one['training_hosts']} training hosts of the same task, in other splits. The twin "
        "with tuned rates and the static network do not grow; the last column compares the best "
        "fixed schedule with the better of them on the same hosts. The "
        "clairvoyant takes each host's best plan with another data order."
    ]
    for suite in suites:
        names = SUITES.get(suite, (suite,))
        text += [f"## {suite}", suite_table({name: found[name] for name in names})]
    return [*text, "## Best fixed schedules", schedules_table(found)]


def suite_table(found: dict[str, dict[str, Any]]) -> str:
    """Return the tasks of one suite in Markdown."""
    lines = []
    for name, own in found.items():
        rungs = own["controls"]
        cells = [points_text(rungs["never grow"]["utility"], ".1f")]
        for key in COLUMNS:
            rung = rungs[own["looking"] if key == "looking" else key]
            text = f"{points_text(rung['gain'], '+.1f')} v {rung['validation_gain'][0]:+.1f}"
            cells.append(f"{text} ({own['looking']})" if key == "looking" else text)
        cells.append(f"{points_text(own['above_network'], '+.1f')} ({own['network']})")
        lines.append((f"`{name}`", *cells))
    heads = ("task", "utility of never growing", *COLUMNS.values(), "schedule minus network")
    return table(heads, lines)


def schedules_table(found: dict[str, dict[str, Any]]) -> str:
    """Return the best fixed schedule of every task in Markdown."""
    return table(
        ("task", "best fixed schedule"),
        [(f"`{name}`", own["schedule"]) for name, own in found.items()],
    )


def shipped(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what ``esper tasks`` reads, see ``runtime.worth``."""
    return {
        name: {
            "gain": own["controls"][FIXED]["gain"],
            "validation_gain": own["controls"][FIXED]["validation_gain"][0],
            "network": own["network"],
            "network_gain": own["controls"][own["network"]]["gain"][0],
            "schedule": own["schedule"],
        }
        for name, own in found.items()
    }


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--suites", nargs="+", default=["suite", "held_out"])
    parser.add_argument("--hosts", type=int, default=16, help="fresh hosts of each task")
    parser.add_argument("--training-hosts", type=int, default=16)
    parser.add_argument("--splits", type=int, default=SPLITS, help="0: the tasks as they are")
    parser.add_argument("--random-plans", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, default=Path("runs/tasks"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts = (arguments.training_hosts, arguments.hosts)
    plans = (*library(), *random_plans(arguments.random_plans))
    found: dict[str, dict[str, Any]] = {}
    for task in dict.fromkeys(task for suite in arguments.suites for task in find_all([suite])):
        hosts = parts(task.name, task.name, counts, arguments.splits, arguments.threads)
        stages = arguments.work / f"{arguments.splits}-splits" / task.name
        ladder = controls(task.name, hosts, arguments.random_plans, stages)
        found[task.name] = figures_of(ladder, plans)
    title = "What growing is worth on each task"
    text = [*page(found, arguments.suites), f"{made_on()}."]
    publish("tasks", title, text, arguments.write, found)
    if arguments.write:
        TABLE.write_text(json.dumps({"tasks": shipped(found)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_guarded(lambda arguments: main(), []))
