"""Does a policy that looks beat every rule? Record, learn, select and score eight controllers.

    make bench-policy                # hours, for each family; resumable
    python benchmarks/policy.py --family adaptation --only learn --controllers 1 2  # on one core

Branching episodes of training draws of a family are recorded (``branches.py``), and eight
controllers learn from them with ``--method vine``. Each is scored on the held-out draws of the
ladder, with its misled twin and its yoked copy, and then, beside the rules alone, on further
draws. One of them is selected on draws of its own. Finished stages are kept under
``--work``.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from branch_learning import learning
from branches import BRANCHINGS, Branching, record_branches
from policy_further import everywhere, greedy_utilities, ladder_hosts, population, tell, work_of
from policy_page import result_page
from reporting import kept, made_on, new_parser, publish

from esper.leyline.config.offline import OfflineConfig
from esper.simic.offline.offline_run import learn_offline
from esper.simic.tools.grow import GrowingPolicy
from esper_lab.evaluation import Evaluation, Rung
from esper_lab.hosts import FRESH_HOSTS
from esper_lab.ladder import policy_rungs
from esper_lab.plans import library
from esper_lab.play import Population, Stages

RECORDED, CHUNK = 2688, 64
"""Draws whose branches are recorded, and how many of them in a run."""
SELECTION = range(4000, 4128)
"""Training draws, not recorded, on which the controller that ships is selected."""
PAGES = {
    "one_seed": ("policy", "A policy that looks"),
    "adaptation": ("policy_adaptation", "A policy that looks where several seeds may live"),
}
"""Name and title of the page of a family."""


def recorded(
    branching: Branching, first: int, folder: Path, threads: int, only: str | None
) -> Path:
    """Record the branches of ``CHUNK`` draws unless ``only`` another stage runs.

    Returns:
        the run directory.

    Raises:
        SystemExit: a signal ended the recording; the part is recorded anew next time.
    """
    run = folder / f"{branching.family}-{first}"

    def make() -> str:
        shutil.rmtree(run, ignore_errors=True)  # of an interrupted start
        summary = record_branches(branching, first, CHUNK, folder, threads)
        if summary.status != "finished":
            raise SystemExit(summary.exit_code)
        return summary.status

    if only in (None, "record"):
        kept(folder / f"{run.name}.json", make)
    return run


def learned(
    branching: Branching, seed: int, records: list[Path], folder: Path, threads: int
) -> Path:
    """Learn one controller; return its run directory."""
    run = folder / f"controller-{seed}"

    def make() -> int:
        shutil.rmtree(run, ignore_errors=True)  # of an interrupted start
        config = OfflineConfig(
            records=tuple(map(str, records)),
            seed=seed,
            threads=threads,
            name=run.name,
            telemetry_dir=str(folder),
            **learning(branching),
        )
        return learn_offline(config).best

    kept(folder / f"{run.name}.json", make)
    return run


def selection(run: Path, family: str, work: Path, seed: int, threads: int) -> list[float]:
    """Validation utility of a controller on the draws on which one is selected."""
    hosts = population(family, SELECTION, (50, 51, 52, 53), FRESH_HOSTS + 20_000, threads)
    grower = GrowingPolicy.named(str(run))
    path = work / f"selection-{seed}.json"
    return kept(path, lambda: greedy_utilities(hosts, grower, validation=True))


def placed(run: Path, seed: int, hosts: Population, members: int, work: Path) -> list[Rung]:
    """The rungs of a controller on the hosts of the ladder."""

    def make() -> list[dict[str, Any]]:
        grower = GrowingPolicy.named(str(run))
        stages = Stages(work / f"stages-{seed}", tell)
        return msgspec.to_builtins(policy_rungs(grower, hosts, members, stages))

    return msgspec.convert(kept(work / f"rungs-{seed}.json", make), list[Rung])


def controls_of(family: str, threads: int) -> Evaluation:
    """The controls of a family, as they come with Esper."""
    stored, hosts = ladder_hosts(family, threads)
    tasks = hosts.fresh.tasks
    return Evaluation(
        policy="",
        suite=family,
        training_hosts=stored.training_hosts,
        tasks=[task.label for task in tasks],
        plans=[plan.name for plan in library()],
        rungs=stored.first(len(tasks)),
        splits=[task.split_seed for task in tasks],
        shipped=None,
        rule_episodes=0,
        policy_episodes=RECORDED * len(BRANCHINGS[family].branches),
        rents=[task.price for task in tasks],
    )


def main() -> int:
    """Run the stages; return the exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--family", choices=BRANCHINGS, default="one_seed")
    parser.add_argument("--work", type=Path, help="by default runs/policy/FAMILY")
    parser.add_argument("--controllers", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--only", choices=("record", "learn", "score", "further"))
    parser.add_argument("--members", type=int, default=1, help="sampled episodes per host")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    family, threads, only = arguments.family, arguments.threads, arguments.only
    work, branching = work_of(family, arguments.work), BRANCHINGS[family]
    torch.set_num_threads(1)
    chunks = range(0, RECORDED, CHUNK)
    records = [recorded(branching, first, work / "records", threads, only) for first in chunks]
    if only == "record":
        return 0
    runs = {
        seed: learned(branching, seed, records, work / "controllers", threads)
        for seed in arguments.controllers
    }
    if only == "learn":
        return 0
    _, hosts = ladder_hosts(family, threads)
    policies = []
    if only in (None, "score"):
        policies = [
            placed(run, seed, hosts.fresh, arguments.members, work) for seed, run in runs.items()
        ]
        chosen = {seed: selection(run, family, work, seed, threads) for seed, run in runs.items()}
    if only in (None, "further"):
        more = everywhere(runs, family, hosts.training, work)
    if only is not None:
        return 0
    page, figures = result_page(controls_of(family, threads), policies, chosen, more, RECORDED)
    name, title = PAGES[family]
    publish(name, title, [*page, f"{made_on()}."], arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
