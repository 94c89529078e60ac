"""``esper evaluate``: place a policy between the controls, on the same fresh hosts."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from esper.leyline.config.setting import SEEDS, Range, setting
from esper.leyline.disk import replace_synced
from esper.leyline.errors import UsageError
from esper.leyline.extras import require
from esper.leyline.phases import Phase, phase
from esper.leyline.run_files import LADDERS, lock_folder
from esper.runtime.gate import Permission
from esper.runtime.plugins import load
from esper.runtime.tasks import find_all
from esper.scripts.flags import parse
from esper.scripts.output import outlive_output
from esper.scripts.play import play
from esper.simic.run.run_directory import stored_config
from esper.simic.run.unusable_run import UnusableRun
from esper.simic.tools.grow import GrowingPolicy, is_run_directory
from esper.tamiyo.baselines import SEARCHES
from esper_lab.capacity import ladder as capacity
from esper_lab.evaluation import CAPACITY, LADDER_FILE, Evaluation, encoded
from esper_lab.hosts import SPLITS, evaluation_hosts, training_of
from esper_lab.ladder import RULE, usable_controls
from esper_lab.ladder import evaluate as evaluated
from esper_lab.ladder_steps import FRONT_HEADS, differences, front, ladder_rows, sentences
from esper_lab.play import OnBatch

PROGRAM = "esper evaluate"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateArguments:
    """Measure a policy against controls on fresh hosts of a suite, on the test split.

    The controls are tuned on other hosts: never growing, growing everything, the best fixed
    schedule, rules that look at the host, and a clairvoyant that knows each host's best plan.
    Finished stages are kept, so that an interrupted evaluation continues. The controls of some
    suites ship with Esper; then only the policy is played. The report of a run shows its
    evaluations.
    """

    policy: str
    """The policy: a run directory (its latest checkpoint), a trained one of `esper policies`,
    heuristic, never, or rule for the controls alone; with the suite capacity, where rule is one
    that plants, also widen or deepen."""
    suite: str = "adaptation"
    """Suite, family or task that the hosts are drawn from; a family's fresh hosts are held-out
    draws, and rules for held-out tasks are tuned on the training suite. The suite capacity measures
    policies of `esper grow` on networks of drawn width."""
    hosts: int = setting(64, Range(4, 4096))
    """Number of fresh hosts."""
    training_hosts: int = setting(128, Range(20, 4096))
    """Number of hosts on which the rules are tuned."""
    fresh: bool = False
    """Play the controls anew instead of taking those that ship with Esper."""
    members: int = setting(4, Range(1, 64))
    """Episodes per host of a learned policy that samples its actions."""
    split_seed: int | None = setting(None, SEEDS)
    """Seed of the split into training, validation and test images of the fresh hosts, for tasks
    that draw it; by default 0 to 15 in turn. Rules are tuned on other splits."""
    slots: tuple[str, ...] = ()
    """Slots in which hosts grow, as in `esper train`; by default those of the policy's run."""
    out: Path | None = None
    """Directory of the result; by default evaluations/SUITE-POLICY."""
    work: Path | None = None
    """Directory in which finished stages are kept; by default evaluations/SUITE-stages."""
    threads: int | None = setting(None, Range(1, 4096))
    """CPU threads; by default all."""
    plugin: tuple[str, ...] = ()
    """Python files that define your own tasks and blueprints."""
    trust: bool = False
    """Whether plugins may be executed that only the run of the policy names."""


def _trained_on_gymnasium(run: str) -> bool:
    """Whether a policy is that of a Gymnasium task, which ``esper play`` evaluates."""
    try:
        return stored_config(Path(run))[0].gymnasium.gym is not None
    except UnusableRun:
        return False


def evaluate(arguments: list[str]) -> int:
    """Measure a policy against controls on fresh hosts."""
    if arguments and not arguments[0].startswith("-"):
        if _trained_on_gymnasium(arguments[0]):
            return play(arguments)
        arguments = ["--policy", *arguments]
    options = parse(EvaluateArguments, PROGRAM, arguments)
    outlive_output()
    name = Path(options.policy).name or options.policy
    out = options.out or Path("evaluations") / f"{options.suite}-{name}"
    work = options.work or Path("evaluations") / f"{options.suite}-stages"
    for field, path in (("out", out), ("work", work)):
        _check_directory(field, path)
    torch.set_num_threads(1)
    prepare = _capacity if options.suite == CAPACITY else _tasks
    ladder, why_not = prepare(options, work)
    console = Console()
    if why_not is not None:
        console.print(why_not, soft_wrap=True)
    progress = Progress(console=console, transient=True)
    live = console.is_terminal
    lock = lock_folder(work, ".lock", "work")
    with lock, progress, phase(f"preparing {options.suite}", live=live), ExitStack() as phases:
        tasks: dict[str, tuple[TaskID, Phase]] = {}

        def on_batch(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                current = phases.enter_context(phase(stage, total, "episodes", live))
                tasks[stage] = progress.add_task(stage, total=total), current
            task, current = tasks[stage]
            progress.advance(task, done)
            current.advance(done)

        evaluation = ladder(on_batch)
    evaluation = msgspec.structs.replace(
        evaluation, differences=differences(evaluation), front=front(evaluation)
    )
    show(console, evaluation)
    if evaluation.shipped is not None:
        way = "benchmarks/capacity_ladder.py" if evaluation.suite == CAPACITY else "--fresh"
        line = f"The controls ship with Esper ({evaluation.shipped}); {way} plays them anew."
        console.print(line, soft_wrap=True)
    files = {LADDER_FILE: encoded(evaluation), **_picture(evaluation, console)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_synced(out / name, content)
    except OSError as error:
        raise UsageError(f"out: cannot write to {out} ({error.strerror}); name another") from error
    paths = [out / name for name in files]
    if is_run_directory(options.policy):
        paths += _into_run(Path(options.policy), evaluation, console)
    console.print(f"wrote {' and '.join(map(str, paths))}", soft_wrap=True)
    return 0


Ladder = Callable[[OnBatch], Evaluation]


def _check_policy(options: EvaluateArguments) -> None:
    """Load the plugins of the command line, and those of a run if permitted; find the policy."""
    permission = Permission(options.plugin, trust=options.trust)
    for plugin in options.plugin:
        load(plugin, permission)
    if options.policy not in (RULE, *SEARCHES):
        GrowingPolicy.named(options.policy, permission)


def _tasks(options: EvaluateArguments, work: Path) -> tuple[Ladder, str | None]:
    """What plays the ladder of a suite of tasks, and why shipped controls are not used.

    Raises:
        UsageError: the policy grows models of the user's own alone.
    """
    if options.policy in SEARCHES:
        raise UsageError(
            f"policy: {options.policy!r} grows a model of your own; give --suite {CAPACITY}"
        )
    _check_policy(options)
    threads = options.threads or os.cpu_count() or 1
    splits = SPLITS if options.split_seed is None else (options.split_seed,)
    slots = options.slots
    if is_run_directory(options.policy) and not slots:
        tasks = find_all([training_of(options.suite)])
        slots = GrowingPolicy.named(options.policy).slots_for(tasks)
    counts = options.training_hosts, options.hosts
    parts = evaluation_hosts(options.suite, *counts, threads, splits, slots)
    controls, why_not = None, None
    if not options.fresh:
        controls, why_not = usable_controls(options.suite, *counts, splits, slots)
    play = partial(evaluated, options.policy, options.suite, parts, options.members, work)
    return partial(play, controls=controls), why_not


def _capacity(options: EvaluateArguments, work: Path) -> tuple[Ladder, str | None]:
    """The same for the suite of networks whose width is chosen, which knows fewer settings.

    Raises:
        UsageError: a setting has no meaning here.
    """
    defaults = EvaluateArguments(policy=options.policy)
    common = {"policy", "suite", "hosts", "out", "work", "plugin", "trust"}
    for name in (field.name for field in fields(options) if field.name not in common):
        if getattr(options, name) != getattr(defaults, name):
            raise UsageError(f"{name}: the suite {CAPACITY} does not have it; leave it out")
    _check_policy(options)
    controls = capacity.usable_controls(options.hosts)
    return partial(capacity.evaluate, options.policy, options.hosts, controls, work), None


def _picture(evaluation: Evaluation, console: Console) -> dict[str, bytes]:
    """The drawn ladder, by the name of its file; a line instead if the library is missing."""
    try:
        require("report", "no ladder.svg")
    except UsageError as missing:
        console.print(str(missing), soft_wrap=True, markup=False)
        return {}
    from esper.karn.report.drawing import figure_style, standalone
    from esper_lab.ladder_figures import ladder_picture

    with figure_style():
        drawing = ladder_picture(evaluation).svg
    return {} if drawing is None else {"ladder.svg": standalone(drawing).encode()}


def _into_run(run: Path, evaluation: Evaluation, console: Console) -> list[Path]:
    """Keep a copy where the report of the run finds it; return the paths that were written.

    The evaluation itself is written elsewhere, so a run that cannot be written is no error.
    """
    path = run / LADDERS / f"{evaluation.suite}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        replace_synced(path, encoded(evaluation))
    except OSError as error:
        line = f"The report of {run} will not show it: cannot write {path} ({error.strerror})."
        console.print(line, soft_wrap=True)
        return []
    return [path]


def _check_directory(field: str, path: Path) -> None:
    """Refuse a directory that could not be written, before hours of work are lost."""
    present = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not present.is_dir():
        raise UsageError(f"{field}: {present} is not a directory; name another")
    try:
        # Only writing shows it: permissions say nothing of /proc or of a full disk.
        TemporaryDirectory(dir=present).cleanup()
    except OSError as error:
        raise UsageError(
            f"{field}: {present} cannot be written ({error.strerror}); name another"
        ) from error


def show(console: Console, evaluation: Evaluation) -> None:
    """Print the ladder over all hosts, by task and by price; rungs of the policies stand out."""
    policies = [rung.name for rung in evaluation.rungs if rung.policy]
    for part, heads, rows in sorted(ladder_rows(evaluation), key=lambda x: x[1] == FRONT_HEADS):
        table, last = Table(title=part or evaluation.suite, title_justify="left"), ""
        for head in (*(["price"] if heads == FRONT_HEADS else []), "", *heads):
            table.add_column(head, justify="right" if head in heads else "left")
        for prices, rung, *numbers in rows:
            if prices != last:
                table.add_section()
            labels = ["" if prices == last else prices, rung] if prices else [rung]
            table.add_row(*labels, *numbers, style="bold" if rung in policies else None)
            last = prices
        console.print(table)
    for text in sentences(evaluation):
        console.print(text, soft_wrap=True)
