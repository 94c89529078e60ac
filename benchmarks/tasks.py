"""What is growing worth on each task? Fixed schedules, from never to the best that were found.

    python benchmarks/tasks.py --write                 # all tasks, under 20 minutes on 2 cores
    python benchmarks/tasks.py --check --suites suite  # is the committed table found again?

Every plan is played by real actions in the real environment, on the same hosts and data as every
other plan: a plan's gain is its utility minus that of never growing on the same hosts. A hundred
schedules are drawn once; what they grow in a slot is drawn for each family of slots.

1. Screening: never, everything at step 0 (the largest blueprint in every slot), each blueprint in
   each slot from step 0, and the random schedules, on few hosts.
2. The best of these once more, on other hosts.
3. Final, on fresh hosts that had no part in the choice: never, everything, the best single seed and
   the best random schedule of the task, and the schedule that was best over the training suite.

Finished tasks are kept in ``--work``; a run that was cut off goes on from there.
"""

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, HEAD_WIDTHS, TEMPO_STEPS, Style
from esper.runtime.tasks import SUITES, Task, find_all
from esper.runtime.worth import TABLE
from esper.simic.environment import GrowthEnv
from esper.simic.rewards import utility
from esper.simic.rollout import collect
from esper.simic.run_directory import processor_name
from esper.simic.step import GrowthConfig, Step
from esper.tamiyo.schedule import NEVER, Schedule, ScheduleActor
from esper.tolaria.precision import Precision

RESULTS = Path(__file__).parent / "results"
RANDOM_SCHEDULES = 100
MOST_SLOTS = 10
LARGEST = {"conv": "conv_heavy", "mlp": "mlp"}
PER_SCREENING, PER_SEMIFINAL, PER_FINAL = 2, 4, 10
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
    everything = tuple((0, BLUEPRINTS.index(LARGEST[s.family]), style, tempo) for s in slots)
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
    assert int(rows.start.min()) < NEVER or all(p.name == "never" for p in plans)
    return rows


def play(task: Task, plans: list[Plan], groups: int, episode: int, lanes: int) -> np.ndarray:
    """Utility and committed accuracy, ``[2, groups, plans]``; all plans on the same hosts.

    ``episode`` names the hosts: the same number gives the same hosts to any plans.
    """
    parts = []
    for begin in range(0, len(plans), CHUNK):
        chosen = plans[begin : begin + CHUNK]
        # Environment g * size + i plays plan i in group g, whatever the chunk.
        size = CHUNK
        identities = torch.tensor([g * size + i for g in range(groups) for i in range(len(chosen))])
        rows = torch.arange(len(chosen)).repeat(groups)
        config = GrowthConfig(
            seed=1,
            group_size=size,
            episode_length=task.episode_length,
            max_batches=task.max_batches,
            batch_size=task.batch_size,
            lanes=lanes,
        )
        env = GrowthEnv([task], identities, config, Precision("cpu"), torch.device("cpu"))
        actor = ScheduleActor(schedule(chosen, len(task.host.slots)).take(rows))
        ends: list[Step] = []
        collect(env, actor, episode, partial(_keep, ends))
        report = ends[0].report
        assert report.committed is not None
        worth: Tensor = utility(report.score, report.added, task.host.parameter_count)
        both = torch.stack([worth, report.committed.accuracy]).view(2, groups, len(chosen))
        parts.append(both.numpy())
    return np.concatenate(parts, 2)


def _keep(ends: list[Step], t: int, actions: Tensor, step: Step) -> None:
    if step.done:
        ends.append(step)


def screened(task: Task, groups: int, lanes: int) -> dict:
    """Screening and semifinal: mean gain in utility of each plan, by name."""
    plans = single_plans(task) + random_plans(task)
    first = play(task, plans, groups, 1, lanes)[0]
    gain = (first - first[:, :1]).mean(0)
    names = [plan.name for plan in plans]
    best = sorted(range(1, len(plans)), key=lambda i: -gain[i])
    singles = [i for i in best if names[i].startswith("single")][:SEMIFINALISTS]
    drawn = [i for i in best if names[i].startswith("random")][:SEMIFINALISTS]
    chosen = [0, *singles, *drawn]
    again = play(task, [plans[i] for i in chosen], PER_SEMIFINAL, 2, lanes)[0]
    later = (again - again[:, :1]).mean(0)
    total = {
        i: (groups * gain[i] + PER_SEMIFINAL * more) / (groups + PER_SEMIFINAL)
        for i, more in zip(chosen, later, strict=True)
    }
    return {
        "gains": dict(zip(names, gain.tolist(), strict=True)),
        "single": names[max(singles, key=lambda i: total[i])],
        "random": names[max(drawn, key=lambda i: total[i])],
    }


def final(task: Task, names: dict[str, str], lanes: int, episode: int = FINAL_HOSTS) -> dict:
    """Each plan of ``names`` on fresh hosts."""
    known = {plan.name: plan for plan in single_plans(task) + random_plans(task)}
    plans = [known[name] for name in names.values()]
    worth, accuracy = play(task, plans, PER_FINAL, episode, lanes)
    rows = {}
    for i, (role, plan) in enumerate(zip(names, plans, strict=True)):
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
    """The best of the task's own plans, never growing included, as ``esper tasks`` reads it."""
    role = max(("never", "everything", "single", "random"), key=lambda r: rows[r]["gain"])
    row = rows[role]
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
        own = max(roles[:4], key=lambda r: rows[r]["gain"])
        gap = np.array(rows[own]["utilities"]) - np.array(rows["suite"]["utilities"])
        lines.append(
            f"| `{name}` | {' | '.join(cells)} | {_points(gap.mean(), _error(gap))} ({own}) |"
        )
    return lines


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
    torch.set_num_threads(arguments.threads)
    if arguments.check:
        stored = json.loads((RESULTS / "tasks.json").read_text())["final"]
        members = {task.name for suite in arguments.suites for task in find_all([suite])}
        chosen = {name: rows for name, rows in stored.items() if name in members}
        return 0 if reproduces(chosen, arguments.threads) else 1
    arguments.work.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    tasks = {task.name: task for suite in arguments.suites for task in find_all([suite])}

    def kept(stage: str, name: str, make) -> dict:  # type: ignore[no-untyped-def]
        path = arguments.work / f"{stage}-{name}.json"
        if not path.exists():
            found = make()
            path.write_text(json.dumps(found))
            print(f"{time.perf_counter() - begin:6.0f} s  {stage} {name}", flush=True)
        return json.loads(path.read_text())

    training = find_all(["suite"])
    lanes, found = arguments.threads, {}
    for name, task in {t.name: t for t in [*training, *tasks.values()]}.items():
        groups = PER_SCREENING if name in SUITES["suite"] else PER_SCREENING // 2
        found[name] = kept("screening", name, partial(screened, task, groups, lanes))
    drawn = [f"random {i}" for i in range(RANDOM_SCHEDULES)]
    over_all = {
        plan: float(np.mean([found[task.name]["gains"][plan] for task in training]))
        for plan in drawn
    }
    suite_wide = max(drawn, key=lambda plan: over_all[plan])
    finals = {}
    for name, task in tasks.items():
        names = {
            "never": "never",
            "everything": "everything",
            "single": found[name]["single"],
            "random": found[name]["random"],
            "suite": suite_wide,
        }
        finals[name] = kept("final", name, partial(final, task, names, lanes))
    seconds = time.perf_counter() - begin
    text = report(finals, arguments.suites, suite_wide, training[0], seconds, arguments.threads)
    print(text)
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "tasks.md").write_text(text)
        (RESULTS / "tasks.json").write_text(
            json.dumps({"screening": found, "final": finals}, indent=1) + "\n"
        )
        entries = {
            name: {
                "never": {
                    "utility": rows["never"]["utility"],
                    "accuracy": rows["never"]["accuracy"],
                },
                "best_fixed": best_fixed(rows),
            }
            for name, rows in finals.items()
        }
        TABLE.write_text(json.dumps({"tasks": entries}, indent=1) + "\n")
    return 0


def report(
    finals: dict[str, dict],
    suites: list[str],
    suite_wide: str,
    first: Task,
    seconds: float,
    threads: int,
) -> str:
    """The page of results."""
    words = {plan.name: plan for plan in random_plans(first)}[suite_wide].words(first)
    lines = [
        "# What growing is worth on each task",
        "",
        f"`python benchmarks/tasks.py --suites {' '.join(suites)} --threads {threads} --write`, "
        f"{seconds / 60:.0f} minutes",
        "",
        "Utility in points (committed validation accuracy in brackets), ± two standard errors over "
        f"{PER_FINAL} hosts and data orders that had no part in choosing the schedules. The last "
        "column is the difference in utility on the same hosts: what a policy can gain that knows "
        "the task, over one schedule for all.",
        "",
    ]
    for suite in suites:
        lines += [f"## {suite}", "", *table(finals, SUITES[suite]), ""]
    lines += [
        f"Best random schedule over the training suite: {suite_wide}, which on `{first.name}` is "
        f"{words}.",
        "",
        "| task | best single seed | best of 100 random |",
        "|---|---|---|",
        *(
            f"| `{name}` | {rows['single']['schedule']} | {rows['random']['schedule']} |"
            for name, rows in finals.items()
        ),
        "",
        f"torch {torch.__version__}, {os.cpu_count()} x {processor_name()}, {threads} threads, "
        f"{time.strftime('%Y-%m-%d')}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
