"""``esper tasks``: list the tasks with the gain from growing on each; download their data."""

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

from esper.leyline.config.groups import Reward
from esper.leyline.config.setting import SEEDS, Range, setting
from esper.leyline.errors import UsageError
from esper.leyline.laboratory import find_part, part
from esper.runtime.cifar import cifar10
from esper.runtime.gate import Permission
from esper.runtime.plugins import load
from esper.runtime.tasks import FAMILIES, SUITES, TASKS, Family, Task, find_all
from esper.scripts.check import check
from esper.scripts.flags import parse

ROOMY = 120
"""Minimum columns of a terminal for tables; narrower terminals and files get lines."""

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
            text = "\n".join([title, *(_lines(task, worth) for task in members)])
            console.print(Text(text), soft_wrap=True)
    if families:
        text = "\n".join([FAMILIES_TITLE, *map(_family_lines, families)])
        console.print(Text(text), soft_wrap=True)


def _family_lines(family: Family) -> str:
    task = family.draw(0)
    first = family.names(held_out=True)[0]
    lines = [
        ("host", _host(task)),
        ("slots", _slots(task)),
        ("data", family.summary),
        ("draws", f"{family.training} for training, {family.name}:0 and so on"),
        ("", f"{family.held_out} held out, {first} and so on"),
        ("horizon", _horizon(task)),
    ]
    return _entry(family.name, lines)


def _table(title: str, tasks: list[Task], worth: dict[str, Any]) -> Table:
    table = Table(title=Text(title), title_justify="left")
    table.add_column("task", overflow="fold", min_width=max(len(task.name) for task in tasks))
    table.add_column("host")
    table.add_column("parameters", justify="right")
    table.add_column("slots")
    table.add_column("data", ratio=1)
    table.add_column("steps", justify="right")
    table.add_column("growing is worth", ratio=1)
    for task in tasks:
        cells = (
            task.name,
            task.host.summary,
            str(task.host.parameter_count),
            _slots(task),
            "; drifts ".join([task.summary, *_drift(task)]),
            str(task.episode_length),
            "; ".join([_worth(task, worth), *_instead(task, worth)]),
        )
        table.add_row(*map(Text, cells))
    return table


def _lines(task: Task, worth: dict[str, Any]) -> str:
    lines = [
        ("host", _host(task)),
        ("slots", _slots(task)),
        ("data", task.summary),
        *(("drift", when) for when in _drift(task)),
        ("horizon", _horizon(task)),
        ("growing", _worth(task, worth)),
        *(("instead", line) for line in _instead(task, worth)),
    ]
    return _entry(task.name, lines)


def _entry(name: str, lines: list[tuple[str, str]]) -> str:
    return "\n".join([f"  {name}", *(f"    {key:<9}{value}" for key, value in lines)])


def _host(task: Task) -> str:
    return f"{task.host.summary}, {task.host.parameter_count} parameters"


def _horizon(task: Task) -> str:
    steps = f"{task.episode_length} steps of {task.max_batches} minibatches of {task.batch_size}"
    if task.max_seeds is not None:
        steps += f", at most {task.max_seeds} seed{'s' * (task.max_seeds > 1)} alive"
    return steps if task.deadline == 1.0 else f"{steps}, trained for {100 * task.deadline:.0f} %"


def _slots(task: Task) -> str:
    return " ".join(slot.name for slot in task.host.slots)


def _drift(task: Task) -> list[str]:
    """When the data drift, in percent of an episode, as text; empty without drift."""
    if task.drift is None:
        return []
    earliest, latest, never = (
        f"{100 * part:.0f}" for part in (task.drift.earliest, task.drift.latest, task.drift.never)
    )
    return [f"{earliest} to {latest} % into an episode, never in {never} % of episodes"]


def _worth(task: Task, worth: dict[str, Any]) -> str:
    if task.name not in worth:
        return "not measured"
    entry = worth[task.name]
    mean, low, high = entry.gain
    interval = f"[{low:+.1f}, {high:+.1f}]"
    return f"{mean:+.1f} points {interval}, val. {entry.validation_gain:+.1f}: {entry.schedule}"


def _instead(task: Task, worth: dict[str, Any]) -> list[str]:
    """What the best network that does not grow gains, as text; empty if it was not measured."""
    if task.name not in worth:
        return []
    return [f"{worth[task.name].network}: {worth[task.name].network_gain:+.1f} points"]


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
