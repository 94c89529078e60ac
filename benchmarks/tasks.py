"""What is growing worth on each task? Compares fixed schedules, from never to the best found.

    python benchmarks/tasks.py --write      # every task of both suites
    python benchmarks/tasks.py --check      # is the committed table reproduced?

Every plan is played by real actions in the real environment, on the same hosts and data as every
other plan. A plan's gain is here its validation utility minus that of never growing on the same
hosts. A hundred random schedules are drawn once; blueprints are drawn per slot from those that the
slot allows.

1. Screening: never, everything at step 0 (the largest blueprint in every slot), each blueprint in
   each slot from step 0, and the random schedules, on few hosts.
2. Semifinal, on other hosts: the best of these, and the best over the training suite. Both stages
   together select the task's best single seed, its best random schedule, its best plan of all, and
   the plan that is best over the suite.
3. Final, on fresh hosts that were not used for selection: the gains of the selected plans.

Results of stages are kept in ``--work``; an interrupted benchmark continues from there.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from reporting import RESULTS, kept, made_on, new_parser, publish, table
from runs import Mean

from esper.leyline.actions import BLUEPRINTS, HEAD_WIDTHS, TEMPO_STEPS, Style
from esper.runtime.tasks import SUITES, Task, find_all
from esper.runtime.worth import TABLE
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.simic.tools import diagnosis
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tolaria.precision import Precision

Floats = NDArray[np.float64]
Rows = dict[str, dict[str, Any]]
"""Results of a task's plans, by role."""

RANDOM_SCHEDULES = 100
MOST_SLOTS = 10
PER_SCREENING, PER_SEMIFINAL, PER_FINAL = 4, 10, 24
"""Groups of hosts per plan and stage; screening uses half as many for tasks outside the suite."""
SEMIFINALISTS = 6
FINAL_HOSTS, CHECK_HOSTS = 3, 4
"""Episode numbers of hosts that were not used for selection."""
CHUNK = 64
"""Plans that are played in one batch; more would not fit into the cache."""


@dataclass(frozen=True)
class Plan:
    """A fixed schedule and its name: for each slot (start, blueprint, style, tempo) or None."""

    name: str
    slots: tuple[tuple[int, int, int, int] | None, ...]

    def words(self, task: Task) -> str:
        """Describe the plan: which blueprint grows in which slot from which step."""
        parts = [
            f"{BLUEPRINTS[chosen[1]]} in {slot.name} from step {chosen[0]}"
            f" ({Style(chosen[2]).name.lower()}, {TEMPO_STEPS[chosen[3]]} steps)"
            for slot, chosen in zip(task.host.slots, self.slots, strict=True)
            if chosen
        ]
        return ", ".join(parts) or "never"


def single_plans(task: Task) -> list[Plan]:
    """Return the plans never, everything, and each blueprint in each slot, from step 0."""
    slots = task.host.slots
    style, tempo = int(Style.LINEAR_ADD), 0
    plans = [Plan("never", (None,) * len(slots))]
    most = Schedule.everything(1, slots)
    everything = tuple((0, kind, style, tempo) for kind in most.blueprint[0].tolist())
    plans.append(Plan("everything", everything))
    for slot in slots:
        for kind in slot.kinds:
            seeds = tuple((0, kind, style, tempo) if slot is s else None for s in slots)
            plans.append(Plan(f"single {BLUEPRINTS[kind]} in {slot.name}", seeds))
    return plans


def random_plans(task: Task) -> list[Plan]:
    """Return the random schedules for this task; the draws themselves do not depend on it."""
    generator = np.random.default_rng(0)
    length = task.episode_length
    plans = []
    for number in range(RANDOM_SCHEDULES):
        occupied = generator.random(MOST_SLOTS) < 2 / 3
        start = generator.random(MOST_SLOTS) * 0.6
        kind = generator.random(MOST_SLOTS)
        style = generator.integers(HEAD_WIDTHS["style"], size=MOST_SLOTS)
        tempo = generator.integers(HEAD_WIDTHS["tempo"], size=MOST_SLOTS)
        seeds = tuple(
            (
                int(start[s] * length),
                slot.kinds[int(kind[s] * len(slot.kinds))],
                int(style[s]),
                int(tempo[s]),
            )
            if occupied[s]
            else None
            for s, slot in enumerate(task.host.slots)
        )
        plans.append(Plan(f"random {number}", seeds))
    return plans


def schedule(plans: list[Plan], slots: int) -> Schedule:
    """Return a schedule with one row per plan."""
    rows = Schedule.never(len(plans), slots)
    for i, plan in enumerate(plans):
        for s, chosen in enumerate(plan.slots):
            if chosen:
                rows.start[i, s], rows.blueprint[i, s], rows.style[i, s], rows.tempo[i, s] = chosen
    return rows


def run_plans(task: Task, plans: list[Plan], groups: int, episode: int, lanes: int) -> Floats:
    """Return utility, committed accuracy and loss, ``[3, groups, plans]``, on the same hosts.

    ``episode`` determines the hosts: the same number gives the same hosts for all plans.
    """
    result = np.zeros((3, groups, len(plans)))
    at_once = [i for i, plan in enumerate(plans) if plan.name == "everything"]
    others = [i for i in range(len(plans)) if i not in at_once]
    parts = [others[begin : begin + CHUNK] for begin in range(0, len(others), CHUNK)]
    for part in [*parts, *([at_once] if at_once else [])]:
        chosen = [plans[i] for i in part]
        result[:, :, part] = _play(task, chosen, groups, episode, lanes, part == at_once)
    return result


def _play(
    task: Task, plans: list[Plan], groups: int, episode: int, lanes: int, at_once: bool
) -> Floats:
    # Environment g * CHUNK + i plays plan i of the batch in group g.
    members = [g * CHUNK + i for g in range(groups) for i in range(len(plans))]
    rows = torch.arange(len(plans)).repeat(groups)
    config = GrowthConfig(
        seed=1,
        group_size=CHUNK,
        episode_length=task.episode_length,
        max_batches=task.max_batches,
        batch_size=task.batch_size,
        one_at_a_time=not at_once,
        threads=lanes,
    )
    identities = torch.tensor(members)
    env = GrowthEnv([task], identities, config, Precision("cpu"), torch.device("cpu"))
    actor = ScheduleActor(schedule(plans, len(task.host.slots)).take(rows))
    result = diagnosis.run_policy(env, actor, episode)
    found = torch.stack([result.utility, result.accuracy, result.loss])
    return found.view(3, groups, len(plans)).numpy()


def known_plans(task: Task) -> dict[str, Plan]:
    """Return every plan of a task by name."""
    return {plan.name: plan for plan in single_plans(task) + random_plans(task)}


def gains(task: Task, names: list[str], groups: int, episode: int, lanes: int) -> dict[str, float]:
    """Return the mean gain (validation utility) of each plan over never growing, same hosts."""
    known = known_plans(task)
    plans = [known[name] for name in ["never", *names]]
    worth = run_plans(task, plans, groups, episode, lanes)[0]
    return dict(zip(names, (worth - worth[:, :1]).mean(0)[1:].tolist(), strict=True))


def best_of(found: dict[str, float], kind: str, count: int) -> list[str]:
    """Return the best ``count`` plans whose name begins with ``kind``."""
    own = [name for name in found if name.startswith(kind)]
    return sorted(own, key=lambda name: -found[name])[:count]


def chosen_plans(both: dict[str, float], suite_plan: str) -> dict[str, str]:
    """Return the plans of the final by role; ``own`` is the best of all, including never."""
    roles = {
        "never": "never",
        "everything": "everything",
        "single": best_of(both, "single", 1)[0],
        "random": best_of(both, "random", 1)[0],
        "suite": suite_plan,
    }
    worth = both | {"never": 0.0}
    return roles | {"own": max(roles.values(), key=lambda name: worth[name])}


def final(task: Task, names: dict[str, str], lanes: int, episode: int = FINAL_HOSTS) -> Rows:
    """Play each plan of ``names`` on fresh hosts; return its results by role."""
    known, different = known_plans(task), list(dict.fromkeys(names.values()))
    worth, accuracy, _ = run_plans(task, [known[n] for n in different], PER_FINAL, episode, lanes)
    rows: Rows = {}
    for role, name in names.items():
        i, plan = different.index(name), known[name]
        rows[role] = {"plan": plan.name, "schedule": plan.words(task)}
        figures = {"utility": worth[:, i], "accuracy": accuracy[:, i]}
        for what, values in (figures | {"gain": worth[:, i] - worth[:, 0]}).items():
            mean = Mean.of(values)
            rows[role] |= {what: mean.value, f"{what}_error": mean.error}
        rows[role]["utilities"] = worth[:, i].tolist()
    return rows


def best_fixed(rows: Rows) -> dict[str, Any]:
    """Return the task's own best plan in the form that ``esper tasks`` reads."""
    row = rows["own"]
    low, high = (row["gain"] + errors * row["gain_error"] for errors in (-2, 2))
    fields = {name: row[name] for name in ("schedule", "utility", "accuracy")}
    return fields | {"gain_interval": [low, high]}


def reproduces(finals: dict[str, Rows], lanes: int) -> bool:
    """Whether the gains of the committed table are reproduced on other hosts.

    The bound is three standard errors of the difference, because some fifty gains are compared.
    """
    fine = True
    for name, rows in finals.items():
        (task,) = find_all([name])
        names = {role: row["plan"] for role, row in rows.items()}
        for role, again in final(task, names, lanes, CHECK_HOSTS).items():
            then, bound = rows[role], 3 * math.hypot(rows[role]["gain_error"], again["gain_error"])
            found = abs(again["gain"] - then["gain"]) <= bound
            fine &= found
            print(
                f"{name:20} {role:11} {100 * then['gain']:+6.2f} then, "
                f"{100 * again['gain']:+6.2f} now{'' if found else '  DIFFERS'}",
                flush=True,
            )
    return fine


def suite_table(finals: dict[str, Rows], members: tuple[str, ...]) -> str:
    """Return the rows of one suite in Markdown."""
    roles = {
        "never": "never grow",
        "everything": "everything at step 0",
        "single": "best single seed",
        "random": "best of 100 random",
        "suite": "best for the whole suite",
    }
    lines = []
    for name in members:
        rows = finals[name]
        cells = [
            "{} ({})".format(
                *(_points(Mean(rows[r][w], rows[r][f"{w}_error"])) for w in ("utility", "accuracy"))
            )
            for r in roles
        ]
        own = next(r for r in roles if rows[r]["plan"] == rows["own"]["plan"])
        lines.append((f"`{name}`", *cells, f"{_points(_gap(rows))} ({own})"))
    return table(("task", *roles.values(), "own best above the suite's"), lines)


def _gap(rows: Rows) -> Mean:
    """Difference in utility between the task's own best plan and the suite's, on the same hosts."""
    return Mean.of(np.subtract(rows["own"]["utilities"], rows["suite"]["utilities"]))


def _points(mean: Mean) -> str:
    return f"{100 * mean.value:.1f} ± {200 * mean.error:.1f}"


def chosen_and_played(tasks: dict[str, Task], work: Path, lanes: int) -> dict[str, Rows]:
    """Run all three stages; return the results of the final by task and role."""
    training = {task.name: task for task in find_all(["suite"])}

    def stage(name: str, task: Task, make: Callable[..., Any], *given: object) -> Any:
        begin = time.perf_counter()
        found = kept(work / f"{name}-{task.name}.json", partial(make, task, *given, lanes))
        print(f"{time.perf_counter() - begin:6.0f} s  {name} {task.name}", flush=True)
        return found

    def over_the_suite(found: dict[str, dict[str, float]], plans: list[str]) -> dict[str, float]:
        return {p: float(np.mean([found[task][p] for task in training])) for p in plans}

    groups = {name: PER_SCREENING // (1 if name in training else 2) for name in training | tasks}
    screening, both = {}, {}
    for name, task in (training | tasks).items():
        names = [plan for plan in known_plans(task) if plan != "never"]
        screening[name] = stage("screening", task, gains, names, groups[name], 1)
    common = ["everything", *(f"random {i}" for i in range(RANDOM_SCHEDULES))]
    candidates = best_of(over_the_suite(screening, common), "", SEMIFINALISTS)
    for name, task in (training | tasks).items():
        first = screening[name]
        singles, drawn = (best_of(first, kind, SEMIFINALISTS) for kind in ("single", "random"))
        names = list(dict.fromkeys(["everything", *singles, *drawn, *candidates]))
        again = stage("semifinal", task, gains, names, PER_SEMIFINAL, 2)
        weights = np.array([groups[name], PER_SEMIFINAL])
        both[name] = {p: float(np.average([first[p], again[p]], weights=weights)) for p in names}
    suite_wide = over_the_suite(both, candidates) | {"never": 0.0}
    suite_plan = max(suite_wide, key=lambda plan: suite_wide[plan])
    return {
        name: stage("final", task, final, chosen_plans(both[name], suite_plan))
        for name, task in tasks.items()
    }


def page(finals: dict[str, Rows], suites: list[str]) -> list[str]:
    """Return the paragraphs and tables of the page."""
    parts = [
        "Utility on validation in points (validation accuracy in brackets), ± two standard errors "
        f"over {PER_FINAL} hosts and data orders that were not used to choose the plans. The last "
        "column is the difference in utility, on the same hosts, between the task's own best plan "
        "and the best plan for the whole suite. A policy that distinguishes the tasks can gain "
        "this difference.",
    ]
    for suite in suites:
        gaps = [_gap(finals[name]) for name in SUITES[suite]]
        error = math.hypot(*(gap.error for gap in gaps)) / len(gaps)
        mean = Mean(float(np.mean([gap.value for gap in gaps])), error)
        parts += [f"## {suite}", suite_table(finals, SUITES[suite])]
        parts.append(f"Mean of the last column: {_points(mean)}.")
    first, rows = next(iter(finals.items()))
    best = [
        (f"`{n}`", *(r[role]["schedule"] for role in ("single", "random")))
        for n, r in finals.items()
    ]
    return [
        *parts,
        f"Best for the whole training suite: {rows['suite']['plan']}, which on `{first}` is "
        f"{rows['suite']['schedule']}.",
        table(("task", "best single seed", "best of 100 random"), best),
        f"{made_on()}.",
    ]


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--suites", nargs="+", default=["suite", "held_out"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, default=Path("runs/tasks"))
    parser.add_argument(
        "--check", action="store_true", help="check that the committed table is reproduced"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tasks = {task.name: task for suite in arguments.suites for task in find_all([suite])}
    stored = RESULTS / "tasks.json"
    before = json.loads(stored.read_text()) if stored.exists() else {}
    if arguments.check:
        known = {name: rows for name, rows in before.items() if name in tasks}
        return 0 if reproduces(known, arguments.threads) else 1
    finals = chosen_and_played(tasks, arguments.work, arguments.threads)
    title = "What growing is worth on each task"
    publish("tasks", title, page(finals, arguments.suites), arguments.write, before | finals)
    if arguments.write:
        shipped = json.loads(TABLE.read_text())["tasks"] if TABLE.exists() else {}
        for name, rows in finals.items():
            never = {key: rows["never"][key] for key in ("utility", "accuracy")}
            shipped[name] = {"never": never, "best_fixed": best_fixed(rows)}
        TABLE.write_text(json.dumps({"tasks": shipped}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
