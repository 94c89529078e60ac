"""What is growing worth on each task? Fixed schedules, from never to the best that were found.

    python benchmarks/tasks.py --write      # every task of both suites
    python benchmarks/tasks.py --check      # is the committed table found again?

Every plan is played by real actions in the real environment, on the same hosts and data as every
other plan: a plan's gain is its utility minus that of never growing on the same hosts. A hundred
schedules are drawn once; what they grow in a slot is drawn for each family of slots.

1. Screening: never, everything at step 0 (the largest blueprint in every slot), each blueprint in
   each slot from step 0, and the random schedules, on few hosts.
2. Semifinal, on other hosts: the best of these, and the best over the training suite. With both
   stages the choices are made: the task's best single seed, its best random schedule, its best plan
   of all, and the plan that is best over the suite.
3. Final, on fresh hosts that had no part in any choice: what the chosen plans are worth.

Stages are kept in ``--work``; a run that was cut off goes on from there.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from machine import made_on
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, HEAD_WIDTHS, TEMPO_STEPS, Style
from esper.runtime.tasks import SUITES, Task, find_all
from esper.runtime.worth import TABLE
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.rewards import utility
from esper.simic.growth.step import GrowthConfig, Step
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tolaria.precision import Precision

RESULTS = Path(__file__).parent / "results"
RANDOM_SCHEDULES = 100
MOST_SLOTS = 10
PER_SCREENING, PER_SEMIFINAL, PER_FINAL = 4, 10, 24
"""Groups of hosts each plan is played on; screening takes half for what is not trained on."""
SEMIFINALISTS = 6
FINAL_HOSTS, CHECK_HOSTS = 3, 4
"""Episode numbers that stand for hosts nothing was chosen by."""
CHUNK = 64
"""Plans that are played at once; more would not fit into the cache."""


@dataclass(frozen=True)
class Plan:
    """A fixed schedule and its name: for each slot (start, blueprint, style, tempo) or None."""

    name: str
    slots: tuple[tuple[int, int, int, int] | None, ...]

    def words(self, task: Task) -> str:
        """What grows where from when."""
        parts = [
            f"{BLUEPRINTS[chosen[1]]} in {slot.name} from step {chosen[0]}"
            f" ({Style(chosen[2]).name.lower()}, {TEMPO_STEPS[chosen[3]]} steps)"
            for slot, chosen in zip(task.host.slots, self.slots, strict=True)
            if chosen
        ]
        return ", ".join(parts) or "never"


def single_plans(task: Task) -> list[Plan]:
    """Never, everything, and each blueprint in each slot, from step 0."""
    slots = task.host.slots
    style, tempo = int(Style.LINEAR_ADD), 0
    plans = [Plan("never", (None,) * len(slots))]
    most = Schedule.everything(1, slots)
    everything = tuple((0, kind, style, tempo) for kind in most.blueprint[0].tolist())
    plans.append(Plan("everything", everything))
    for place, slot in enumerate(slots):
        for kind in slot.kinds:
            seeds = [None] * len(slots)
            seeds[place] = (0, kind, style, tempo)  # type: ignore[call-overload]
            plans.append(Plan(f"single {BLUEPRINTS[kind]} in {slot.name}", tuple(seeds)))
    return plans


def random_plans(task: Task) -> list[Plan]:
    """The random schedules as this task plays them; the draws do not depend on the task."""
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
    """One row for each plan."""
    rows = Schedule.never(len(plans), slots)
    for i, plan in enumerate(plans):
        for s, chosen in enumerate(plan.slots):
            if chosen:
                rows.start[i, s], rows.blueprint[i, s], rows.style[i, s], rows.tempo[i, s] = chosen
    return rows


def play(task: Task, plans: list[Plan], groups: int, episode: int, lanes: int) -> np.ndarray:
    """Utility, committed accuracy and loss, ``[3, groups, plans]``; all plans on the same hosts.

    ``episode`` names the hosts: the same number gives the same hosts to any plans.
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
) -> np.ndarray:
    # Environment g * CHUNK + i plays plan i in group g, whatever the part.
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
    ends: list[Step] = []
    collect(env, actor, episode, partial(_keep, ends))
    report = ends[0].report
    assert report.committed is not None
    worth: Tensor = utility(report.score, report.added, task.host.parameter_count)
    found = torch.stack([worth, report.committed.accuracy, report.committed.loss])
    return found.view(3, groups, len(plans)).numpy()


def _keep(ends: list[Step], t: int, actions: Tensor, step: Step) -> None:
    if step.done:
        ends.append(step)


def known_plans(task: Task) -> dict[str, Plan]:
    """Every plan of a task by name."""
    return {plan.name: plan for plan in single_plans(task) + random_plans(task)}


def gains(task: Task, names: list[str], groups: int, episode: int, lanes: int) -> dict[str, float]:
    """Mean gain in utility of each plan over never growing on the same hosts."""
    known = known_plans(task)
    plans = [known[name] for name in ["never", *names]]
    worth = play(task, plans, groups, episode, lanes)[0]
    return dict(zip(names, (worth - worth[:, :1]).mean(0)[1:].tolist(), strict=True))


def best_of(found: dict[str, float], kind: str, count: int) -> list[str]:
    """The best plans whose name begins with ``kind``."""
    own = [name for name in found if name.startswith(kind)]
    return sorted(own, key=lambda name: -found[name])[:count]


def chosen_plans(both: dict[str, float], suite_plan: str) -> dict[str, str]:
    """What goes to the final, by role; ``own`` is the best of all, never growing included."""
    roles = {
        "never": "never",
        "everything": "everything",
        "single": best_of(both, "single", 1)[0],
        "random": best_of(both, "random", 1)[0],
        "suite": suite_plan,
    }
    worth = both | {"never": 0.0}
    return roles | {"own": max(roles.values(), key=lambda name: worth[name])}


def final(task: Task, names: dict[str, str], lanes: int, episode: int = FINAL_HOSTS) -> dict:
    """Each plan of ``names`` on fresh hosts."""
    known, different = known_plans(task), list(dict.fromkeys(names.values()))
    worth, accuracy, _ = play(task, [known[n] for n in different], PER_FINAL, episode, lanes)
    rows = {}
    for role, name in names.items():
        i, plan = different.index(name), known[name]
        gain = worth[:, i] - worth[:, 0]
        rows[role] = {
            "plan": plan.name,
            "schedule": plan.words(task),
            "utility": float(worth[:, i].mean()),
            "utility_error": _error(worth[:, i]),
            "accuracy": float(accuracy[:, i].mean()),
            "accuracy_error": _error(accuracy[:, i]),
            "gain": float(gain.mean()),
            "gain_error": _error(gain),
            "utilities": worth[:, i].tolist(),
        }
    return rows


def _error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def best_fixed(rows: dict) -> dict:
    """The task's own best plan as ``esper tasks`` reads it."""
    row = rows["own"]
    low, high = row["gain"] - 2 * row["gain_error"], row["gain"] + 2 * row["gain_error"]
    return {
        "schedule": row["schedule"],
        "utility": row["utility"],
        "accuracy": row["accuracy"],
        "gain_interval": [low, high],
    }


def reproduces(finals: dict[str, dict], lanes: int) -> bool:
    """Whether the gains of the committed table are found again on other hosts.

    Within three standard errors of the difference: there are some fifty gains to compare.
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


def table(finals: dict[str, dict], members: tuple[str, ...]) -> list[str]:
    """The rows of one suite in Markdown."""
    roles = ("never", "everything", "single", "random", "suite")
    heads = (
        "never grow",
        "everything at step 0",
        "best single seed",
        "best of 100 random",
        "best for the whole suite",
    )
    lines = ["| task | " + " | ".join(heads) + " | own best above the suite's |"]
    lines.append("|" + "---|" * (len(heads) + 2))
    for name in members:
        rows = finals[name]
        cells = [
            f"{_points(rows[r]['utility'], rows[r]['utility_error'])} "
            f"({_points(rows[r]['accuracy'], rows[r]['accuracy_error'])})"
            for r in roles
        ]
        gap = _gap(rows)
        own = next(r for r in roles if rows[r]["plan"] == rows["own"]["plan"])
        lines.append(
            f"| `{name}` | {' | '.join(cells)} | {_points(gap.mean(), _error(gap))} ({own}) |"
        )
    return lines


def _gap(rows: dict) -> np.ndarray:
    """What the task's own best plan has above the suite's, by host."""
    return np.array(rows["own"]["utilities"]) - np.array(rows["suite"]["utilities"])


def _points(value: float, error: float) -> str:
    return f"{100 * value:.1f} ± {200 * error:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="+", default=["suite", "held_out"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--check", action="store_true", help="is the committed table found again?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lanes = arguments.threads
    tasks = {task.name: task for suite in arguments.suites for task in find_all([suite])}
    stored = RESULTS / "tasks.json"
    if arguments.check:
        table = json.loads(stored.read_text())
        return 0 if reproduces({n: rows for n, rows in table.items() if n in tasks}, lanes) else 1
    arguments.work.mkdir(parents=True, exist_ok=True)
    seconds = 0.0

    def kept(stage: str, name: str, make: Callable[[], dict]) -> dict:
        nonlocal seconds
        path = arguments.work / f"{stage}-{name}.json"
        if not path.exists():
            begin = time.perf_counter()
            found = make()
            took = time.perf_counter() - begin
            path.write_text(json.dumps({"seconds": took, "found": found}))
            print(f"{took:6.0f} s  {stage} {name}", flush=True)
        content = json.loads(path.read_text())
        seconds += content["seconds"]
        found: dict = content["found"]
        return found

    training = {task.name: task for task in find_all(["suite"])}
    screening, both = {}, {}
    for name, task in (training | tasks).items():
        names = [plan for plan in known_plans(task) if plan != "never"]
        groups = PER_SCREENING if name in training else PER_SCREENING // 2
        screening[name] = kept("screening", name, partial(gains, task, names, groups, 1, lanes))
    common = ["everything", *(f"random {i}" for i in range(RANDOM_SCHEDULES))]

    def over_the_suite(found: dict[str, dict[str, float]], plans: list[str]) -> dict[str, float]:
        return {p: float(np.mean([found[task][p] for task in training])) for p in plans}

    candidates = best_of(over_the_suite(screening, common), "", SEMIFINALISTS)
    for name, task in (training | tasks).items():
        first = screening[name]
        singles, drawn = (best_of(first, kind, SEMIFINALISTS) for kind in ("single", "random"))
        names = list(dict.fromkeys(["everything", *singles, *drawn, *candidates]))
        again = kept("semifinal", name, partial(gains, task, names, PER_SEMIFINAL, 2, lanes))
        weight = PER_SCREENING if name in training else PER_SCREENING // 2
        total = weight + PER_SEMIFINAL
        both[name] = {p: (weight * first[p] + PER_SEMIFINAL * again[p]) / total for p in names}
    suite_wide = over_the_suite(both, candidates) | {"never": 0.0}
    suite_plan = max(suite_wide, key=lambda plan: suite_wide[plan])
    finals = {
        name: kept(
            "final",
            name,
            partial(final, task, chosen_plans(both[name], suite_plan), lanes),
        )
        for name, task in tasks.items()
    }
    first_task = next(iter(training.values()))
    text = report(
        finals, arguments.suites, known_plans(first_task)[suite_plan], first_task, seconds
    )
    print(text)
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "tasks.md").write_text(text)
        before = json.loads(stored.read_text()) if stored.exists() else {}
        stored.write_text(json.dumps(before | finals, indent=1) + "\n")
        shipped = json.loads(TABLE.read_text())["tasks"] if TABLE.exists() else {}
        for name, rows in finals.items():
            never = {key: rows["never"][key] for key in ("utility", "accuracy")}
            shipped[name] = {"never": never, "best_fixed": best_fixed(rows)}
        TABLE.write_text(json.dumps({"tasks": shipped}, indent=1) + "\n")
    return 0


def report(
    finals: dict[str, dict], suites: list[str], suite_plan: Plan, first: Task, seconds: float
) -> str:
    """The page of results."""
    lines = [
        "# What growing is worth on each task",
        "",
        f"`python benchmarks/tasks.py --suites {' '.join(suites)} --write`, all stages together "
        f"{seconds / 60:.0f} minutes",
        "",
        "Utility in points (committed validation accuracy in brackets), ± two standard errors "
        f"over {PER_FINAL} hosts and data orders that had no part in choosing the plans. The last "
        "column is the difference in utility, on the same hosts, between the task's own best plan "
        "and the best for the whole suite: what a policy can gain that knows the task, over one "
        "plan for all.",
        "",
    ]
    for suite in suites:
        gaps = [_gap(finals[name]) for name in SUITES[suite]]
        error = math.sqrt(sum(_error(gap) ** 2 for gap in gaps)) / len(gaps)
        mean = float(np.mean([gap.mean() for gap in gaps]))
        lines += [
            *(f"## {suite}", "", *table(finals, SUITES[suite]), ""),
            f"Mean of the last column: {_points(mean, error)}.",
            "",
        ]
    lines += [
        f"Best for the whole training suite: {suite_plan.name}, which on `{first.name}` is "
        f"{suite_plan.words(first)}.",
        "",
        "| task | best single seed | best of 100 random |",
        "|---|---|---|",
        *(
            f"| `{name}` | {rows['single']['schedule']} | {rows['random']['schedule']} |"
            for name, rows in finals.items()
        ),
        "",
        f"{made_on()}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
