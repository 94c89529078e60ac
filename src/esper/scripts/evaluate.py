"""``esper evaluate``: place a policy between the controls, on the same fresh hosts."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from esper.karn.ladder import (
    Headroom,
    Step,
    headroom,
    ladder_picture,
    points_text,
    steps,
)
from esper.karn.report.drawing import styled
from esper.leyline.config import WorldConfig
from esper.leyline.config.setting import SEEDS, Range, setting
from esper.leyline.errors import UsageError
from esper.leyline.evaluation import LADDER_FILE, Evaluation
from esper.runtime.plugins import load
from esper.scripts.flags import parse
from esper.simic.evaluation.ladder import RULE, evaluation_hosts
from esper.simic.evaluation.ladder import evaluate as evaluated
from esper.simic.run.disk import replace_synced
from esper.simic.tools.grow import GrowingPolicy

PROGRAM = "esper evaluate"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateArguments:
    """Measure a policy against controls on fresh hosts of a suite, on the test split.

    The controls are tuned on other hosts: never growing, growing everything, the best fixed
    schedule, rules that look at the host, and a clairvoyant that knows each host's best plan.
    Finished stages are kept, so that an interrupted evaluation continues.
    """

    policy: str
    """The policy: a run directory (its latest checkpoint), heuristic, never, or rule for the
    controls alone."""
    suite: str = "adaptation"
    """Suite or family that the hosts are drawn from; a family's fresh hosts are held-out draws."""
    hosts: int = setting(64, Range(4, 4096))
    """Number of fresh hosts."""
    training_hosts: int = setting(128, Range(20, 4096))
    """Number of hosts on which the rules are tuned."""
    random_plans: int = setting(0, Range(0, 1000))
    """Number of random schedules in the library, in addition to the systematic ones."""
    members: int = setting(4, Range(1, 64))
    """Episodes per host of a learned policy that samples its actions."""
    split_seed: int | None = setting(None, SEEDS)
    """Seed of the split into training, validation and test images, for tasks that draw it; by
    default that of the policy's run, 0 for a control."""
    out: Path | None = None
    """Directory of the result; by default evaluations/SUITE-POLICY."""
    work: Path | None = None
    """Directory in which finished stages are kept; by default evaluations/SUITE-stages."""
    threads: int | None = setting(None, Range(1, 4096))
    """CPU threads; by default all."""
    plugin: tuple[str, ...] = ()
    """Python files that define your own tasks and blueprints."""


def evaluate(arguments: list[str]) -> int:
    """Measure a policy against controls on fresh hosts."""
    given = parse(EvaluateArguments, PROGRAM, arguments)
    for plugin in given.plugin:
        load(plugin)
    name = Path(given.policy).name or given.policy
    out = given.out or Path("evaluations") / f"{given.suite}-{name}"
    work = given.work or Path("evaluations") / f"{given.suite}-stages"
    for field, path in (("out", out), ("work", work)):
        _check_directory(field, path)
    threads = given.threads or os.cpu_count() or 1
    torch.set_num_threads(1)
    hosts = evaluation_hosts(
        given.suite, given.training_hosts, given.hosts, threads, _split_seed(given)
    )
    console = Console()
    with Progress(console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def on_batch(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.advance(tasks[stage], done)

        found = evaluated(
            given.policy, given.suite, hosts, given.random_plans, given.members, work, on_batch
        )
    show(console, found)
    with styled():
        drawing = ladder_picture(found).svg
    files = {LADDER_FILE: msgspec.json.encode(found)}
    if drawing is not None:
        files["ladder.svg"] = drawing.encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_synced(out / name, content)
    except OSError as error:
        raise UsageError(f"out: cannot write to {out} ({error.strerror}); name another") from error
    console.print(f"wrote {' and '.join(str(out / name) for name in files)}", soft_wrap=True)
    return 0


def _split_seed(given: EvaluateArguments) -> int:
    if given.split_seed is not None:
        return given.split_seed
    if given.policy == RULE:
        return WorldConfig().split_seed
    return GrowingPolicy.named(given.policy).settings.world.split_seed


def _check_directory(field: str, path: Path) -> None:
    """Refuse a directory that could not be written, before hours of work are lost."""
    present = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not present.is_dir():
        raise UsageError(f"{field}: {present} is not a directory; name another")
    if not os.access(present, os.W_OK):
        raise UsageError(f"{field}: {present} cannot be written; name another")


def show(console: Console, found: Evaluation) -> None:
    """Print the ladder over all hosts, and by task where there are several."""
    names = list(dict.fromkeys(found.tasks))
    console.print(_table(found.suite, steps(found)))
    if len(names) > 1:
        for name in names:
            console.print(_table(name, steps(found, np.array(found.tasks) == name)))
    console.print(_summary(headroom(found)), soft_wrap=True)


def _table(title: str, rows: list[Step]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for head in ("utility, points", "above never", "on validation", "parameters"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row.rung.name,
            points_text(row.utility, ".1f"),
            points_text(row.gain, "+.1f"),
            f"{row.validation_gain[0]:+.1f}",
            f"{row.added:.0f}",
            style="bold" if row.rung.policy else None,
        )
    return table


def _summary(found: Headroom) -> str:
    return (
        f"Never growing is best on {100 * found.never:.0f} % of the hosts; {found.plans} plans are "
        "best on 10 % or more. The clairvoyant is above the best blind rule by "
        f"{points_text(found.over_blind, '+.1f')} points and above the best rule that looks by "
        f"{points_text(found.over_looking, '+.1f')}: there is "
        f"{'room' if found.passes else 'too little room'} for a policy that looks."
    )
