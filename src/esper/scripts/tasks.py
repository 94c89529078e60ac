"""``esper tasks``: list the tasks, check a task or model of the user's own, download data."""

import logging
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.leyline.config import WorldConfig
from esper.leyline.config.groups import Reward
from esper.leyline.config.setting import SEEDS, Range, setting, up_to
from esper.leyline.errors import UsageError
from esper.leyline.laboratory import find_part, part
from esper.leyline.phases import duration, phase
from esper.own_models.model_check import check as check_model
from esper.runtime.cifar import cifar10
from esper.runtime.gate import Permission
from esper.runtime.own_files import LOADERS, MODEL, files_of, find_own, names_function
from esper.runtime.plugins import load, module
from esper.runtime.tasks import FAMILIES, SUITES, TASKS, Family, Task, find_all
from esper.scripts.flags import parse
from esper.simic.tools.task_check import TaskTrial, try_task

ROOMY = 120
"""Minimum columns of a terminal for tables; narrower terminals and files get lines."""

COLUMNS = ("host", "slots", "data", "drift", "horizon", "growing", "instead")
"""Columns of a table, after the name of the task."""

COUNTS = Range(2, 1024)
"""Range of --groups and --group-size: the diagnosis compares groups and members of a group."""

TITLES = {
    "suite": "the training suite",
    "held_out": "the held-out suite",
    "cifar": "the CIFAR-10 tasks; esper tasks fetch cifar10 downloads their data",
}

FAMILIES_TITLE = "families: populations of tasks; FAMILY_held_out names the held-out draws"


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksArguments:
    """List the tasks on which networks can be trained: all of them, or those named.

    `esper tasks check FILE` checks whether your own model or tasks fit, and what they will cost.
    `esper tasks fetch cifar10` downloads the data of the cifar tasks.
    """

    names: tuple[str, ...] = setting((), positional=True)
    """Tasks or suites to show; name them before any flag."""
    plugin: tuple[str, ...] = ()
    """Python files that define your own tasks."""
    describe: tuple[str, ...] = ()
    """Tasks or suites on which to try policies that do not learn, a minute or two per task. Shows
    which ops are legal, which stages seeds reach, how much of the variance of the return is due to
    the host and how much to the actions, and the signal-to-noise ratio of the reward."""
    data_dir: str = "./data"
    """Directory with the data files of tasks that need any, for --describe."""
    split_seed: int = setting(0, SEEDS)
    """Seed of the split into training, validation and test images, for tasks that draw it, for
    --describe."""
    reward: Reward = "paired"
    """Reward that --describe measures."""
    groups: int = setting(8, COUNTS)
    """Number of hosts for --describe, each with its own data."""
    group_size: int = setting(8, COUNTS)
    """Environments per host for --describe, each with its own stream of random actions."""


def tasks(arguments: list[str]) -> int:
    """List tasks; `tasks check` checks your own, `tasks fetch` downloads data."""
    if arguments[:1] == ["check"]:
        return check(arguments[1:])
    if arguments[:1] == ["fetch"]:
        return fetch(arguments[1:])
    options = parse(TasksArguments, "esper tasks", arguments)
    for path in options.plugin:
        load(path, Permission(options.plugin))
    if options.describe:
        return _describe(options)
    read_worth = find_part("worth") or dict
    names = options.names or (*TASKS, *FAMILIES)
    suites = {suite: family for family in FAMILIES for suite in (family, f"{family}_held_out")}
    families = [FAMILIES[name] for name in dict.fromkeys(suites[n] for n in names if n in suites)]
    names_of_tasks = [name for name in names if name not in suites]
    show(Console(), find_all(names_of_tasks) if names_of_tasks else (), read_worth(), families)
    return 0


def _describe(options: TasksArguments) -> int:
    """Print the diagnosis of the tasks behind ``--describe``.

    Raises:
        UsageError: a task or a setting is wrong.
    """
    if options.names:
        raise UsageError(
            f"describe: {options.names[0]} comes before --describe; name tasks after it"
        )
    tasks = [
        task.in_directory(Path(options.data_dir)).with_split(options.split_seed)
        for task in find_all(options.describe)
    ]
    status: int = part("describe", "describe")(Console(), tasks, options)
    return status


def show(
    console: Console,
    tasks: tuple[Task, ...],
    worth: dict[str, Any],
    families: Sequence[Family] = (),
) -> None:
    """Print the tasks by suite, those without a suite after them, and families at the end."""
    in_suites = {name for members in SUITES.values() for name in members}
    sections = {
        f"{suite}: {TITLES[suite]}" if suite in TITLES else suite: [
            task for task in tasks if task.name in members
        ]
        for suite, members in SUITES.items()
    }
    sections["others"] = [task for task in tasks if task.name not in in_suites]
    roomy = console.is_terminal and console.width >= ROOMY
    for title, members in sections.items():
        if members and roomy:
            console.print(_table(title, members, worth))
        elif members:
            entries = (_entry(task.name, _properties(task, worth)) for task in members)
            text = "\n".join([title, *entries])
            console.print(Text(text), soft_wrap=True)
    if families:
        entries = (_entry(family.name, _family_properties(family)) for family in families)
        text = "\n".join([FAMILIES_TITLE, *entries])
        console.print(Text(text), soft_wrap=True)


def _family_properties(family: Family) -> list[tuple[str, str]]:
    task = family.draw(0)
    first = family.names(held_out=True)[0]
    return [
        ("host", _host(task)),
        ("slots", _slots(task)),
        ("data", family.summary),
        ("draws", f"{family.training} for training, {family.name}:0 and so on"),
        ("", f"{family.held_out} held out, {first} and so on"),
        ("horizon", _horizon(task)),
    ]


def _properties(task: Task, worth: dict[str, Any]) -> list[tuple[str, str]]:
    """What the list says of a task; growth was not measured on the tasks that ``worth`` lacks."""
    entry = worth.get(task.name)
    properties = [("host", _host(task)), ("slots", _slots(task)), ("data", task.summary)]
    if task.drift is not None:
        earliest, latest, never = (
            f"{100 * part:.0f}"
            for part in (task.drift.earliest, task.drift.latest, task.drift.never)
        )
        when = f"{earliest} to {latest} % into an episode, never in {never} % of episodes"
        properties.append(("drift", when))
    properties.append(("horizon", _horizon(task)))
    if entry is None:
        return [*properties, ("growing", "not measured")]
    mean, low, high = entry.gain
    growing = (
        f"{mean:+.1f} points [{low:+.1f}, {high:+.1f}], "
        f"val. {entry.validation_gain:+.1f}: {entry.schedule}"
    )
    instead = f"{entry.network}: {entry.network_gain:+.1f} points"
    return [*properties, ("growing", growing), ("instead", instead)]


def _table(title: str, tasks: list[Task], worth: dict[str, Any]) -> Table:
    rows = [dict(_properties(task, worth)) for task in tasks]
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    table = Table(title=Text(title), title_justify="left")
    table.add_column("task", overflow="fold", min_width=max(len(task.name) for task in tasks))
    for name in names:
        table.add_column(name, ratio=1)
    for task, row in zip(tasks, rows, strict=True):
        table.add_row(task.name, *(Text(row.get(name, "")) for name in names))
    return table


def _entry(name: str, properties: list[tuple[str, str]]) -> str:
    return "\n".join([f"  {name}", *(f"    {key:<9}{value}" for key, value in properties)])


def _host(task: Task) -> str:
    return f"{task.host.summary}, {task.host.parameter_count:,} parameters"


def _horizon(task: Task) -> str:
    steps = f"{task.episode_length} steps of {task.max_batches} minibatches of {task.batch_size}"
    if task.max_seeds is not None:
        steps += f", at most {task.max_seeds} seed{'s' * (task.max_seeds > 1)} alive"
    return steps if task.deadline == 1.0 else f"{steps}, trained for {100 * task.deadline:.0f} %"


def _slots(task: Task) -> str:
    return " ".join(slot.name for slot in task.host.slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckArguments:
    """Check whether the model or the tasks in a Python file fit Esper, and what they will cost.

    A model is named as for `esper grow --model`: FILE.py:NAME, or FILE.py with `model` and
    `loaders`. At most four samples pass through it at a time; memory and time are predicted, of
    growing it and of training a policy on it.

    Of a task, every blueprint is tried in every slot, then the largest one grows in every slot for
    some steps. If something does not fit, one line gives the reason and the exit status is 2.
    """

    file: str = setting(positional=True)
    """The Python file that defines the tasks, or the model as FILE.py:NAME."""
    data: str | None = None
    """Loaders of the model, FILE.py or FILE.py:NAME; by default `loaders` of its file."""
    loss: str | None = None
    """Loss of the model, see `esper grow`; by default that of its recipe, or cross_entropy."""
    epochs: int = setting(40, up_to(1_000_000))
    """Epochs of growing the model whose time is predicted."""
    split_seed: int = setting(0, SEEDS)
    """Seed of the split into training, validation and test images, for tasks that draw it."""


def check(arguments: list[str]) -> int:
    """Check whether the model or the tasks in a file fit, and what they will cost.

    Raises:
        UsageError: something does not fit, or the file has neither.
    """
    settings = parse(CheckArguments, "esper tasks check", arguments)
    if settings.data is not None or names_function(settings.file):
        return _check_model(settings)
    earlier_names = set(TASKS)
    permission = Permission((settings.file,))
    load(settings.file, permission)
    names = [name for name in TASKS if name not in earlier_names]
    if not names:
        if all(hasattr(module(settings.file, permission), name) for name in (MODEL, LOADERS)):
            return _check_model(settings)
        raise UsageError(
            f"plugin: {settings.file} has no task; write one with @task, or the functions {MODEL} "
            f"and {LOADERS}, or name your model, {settings.file}:NAME"
        )
    console = Console()
    for task in find_all(names):
        with phase(f"trying {task.name}"):
            trial = try_task(task.with_split(settings.split_seed))
        console.print(Text(_fit(task, trial)), soft_wrap=True)
    return 0


def _check_model(settings: CheckArguments) -> int:
    """Check a model of the user's own.

    Raises:
        UsageError: it does not fit; the report says why.
    """
    permission = Permission(files_of(settings.file, settings.data))
    source = find_own(settings.file, settings.data, permission)
    recipe = source.recipe(settings.epochs)
    loaders = source.loaders()
    held_back = {"validation": loaders.validation, "test": loaders.test}
    with phase(f"checking {source.model}"):
        report = check_model(
            source.build(),
            loaders.train,
            epochs=settings.epochs,
            held_back={name: each for name, each in held_back.items() if each is not None},
            **{name: recipe[name] for name in ("slots", "unpack") if name in recipe},
            loss=settings.loss or recipe.get("loss", "cross_entropy"),
        )
    if not report.ok:
        raise UsageError(f"{source.model}: {report.problems[0]}")
    return 0


def _fit(task: Task, trial: TaskTrial) -> str:
    data, world = trial.data, WorldConfig()
    sizes = " / ".join(
        f"{len(labels):,}"
        for labels in (data.train_labels, data.validation_labels, data.test_labels)
    )
    steps = world.rounds * world.envs * task.episode_length
    memory = "not known on this system"
    if trial.bytes is not None:
        mebibytes = trial.bytes / 2**20
        total = f"{world.envs * mebibytes:.0f} MiB for {world.envs}"
        memory = f"{mebibytes:.1f} MiB per environment, {total}"
    lines = [
        ("host", _host(task)),
        *(("slot", slot.summary) for slot in task.host.slots),
        ("data", f"{sizes} images {tuple(data.train_images.shape[1:])}, {data.classes} classes"),
        ("horizon", _horizon(task)),
        ("tried", f"every blueprint in every slot and style; backend {trial.backend}"),
        ("memory", f"{memory}, with the largest seed in every slot"),
        (
            "time",
            f"{1000 * trial.seconds:.2f} ms per environment step on one thread, "
            f"{duration(steps * trial.seconds)} for {world.rounds} rounds of {world.envs} "
            "environments (without the policy)",
        ),
    ]
    return "\n".join([f"{task.name} fits", *(f"  {name:<9}{value}" for name, value in lines)])


@dataclass(frozen=True, slots=True)
class Archive:
    """A published archive.

    Attributes:
        url: its address.
        checksum: SHA-256 of the file.
    """

    url: str
    checksum: str


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchArguments:
    """Download data that is not part of Esper, and verify it by its SHA-256."""

    names: tuple[str, ...] = setting((), positional=True)
    """What to download: cifar10 (170 MB)."""
    data_dir: str = "./data"
    """Directory for the downloaded data."""


def fetch(arguments: list[str]) -> int:
    """Download data that is not part of Esper."""
    program = "esper tasks fetch"
    options = parse(FetchArguments, program, arguments)
    names, directory = " ".join(options.names), Path(options.data_dir)
    if names not in ARCHIVES:
        raise UsageError(f"{program}: name one of {', '.join(ARCHIVES)}, got {names!r}")
    _fetch(ARCHIVES[names], directory)
    splits = cifar10(directory.resolve())
    counts = (len(splits.train_labels), len(splits.validation_labels), len(splits.test_labels))
    print("{}: {} images for training, {} for validation, {} for test".format(directory, *counts))
    return 0


def _fetch(archive: Archive, directory: Path) -> None:
    """Download and unpack an archive into a directory, which is created if needed.

    Raises:
        UsageError: it cannot be downloaded, has the wrong SHA-256, or cannot be written.
    """
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            path = pooch.retrieve(archive.url, f"sha256:{archive.checksum}", "archive", folder)
            with tarfile.open(path) as content:
                content.extractall(directory, filter="data")
    except ValueError as error:
        raise UsageError(
            f"fetch: {archive.url} does not have the published SHA-256; "
            "nothing was kept, try again or download it by hand"
        ) from error
    except (OSError, tarfile.TarError) as error:
        raise UsageError(
            f"fetch: {archive.url} could not be downloaded to {directory} ({error}); "
            "download and unpack it there by hand"
        ) from error
