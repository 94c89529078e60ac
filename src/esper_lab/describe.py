"""``esper tasks --describe``: print the figures of ``diagnosis`` as tables."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from esper.karn.intervals import group_means, interval
from esper.leyline.actions import Op
from esper.leyline.errors import UsageError
from esper.runtime.tasks import Task, find_all
from esper.simic.growth.step import GrowthConfig
from esper_lab.diagnosis import STAGES, Diagnosis, diagnose

if TYPE_CHECKING:
    from esper.scripts.tasks import TasksArguments

SEED = 42
MAX_ENVIRONMENTS = 2048


def describe(console: Console, arguments: "TasksArguments") -> int:
    """Play the tasks with policies that do not learn, and print the diagnosis.

    Raises:
        UsageError: a task or a setting is wrong.
    """
    if arguments.names:
        raise UsageError(
            f"describe: {arguments.names[0]} comes before --describe; name tasks after it"
        )
    if arguments.groups * arguments.group_size > MAX_ENVIRONMENTS:
        raise UsageError(
            f"groups: {arguments.groups} groups of {arguments.group_size} are more than "
            f"{MAX_ENVIRONMENTS} environments; take fewer"
        )
    config = GrowthConfig(seed=SEED, group_size=arguments.group_size, reward=arguments.reward)
    for task in find_all(arguments.describe):
        task = task.in_directory(Path(arguments.data_dir)).with_split(arguments.split_seed)
        with console.status("") as status:
            diagnosis = diagnose(
                task,
                arguments.groups,
                config,
                lambda policy, name=task.name: status.update(f"{name}: {policy}"),  # type: ignore[misc]
            )
        _show(console, task, diagnosis, arguments)
    return 0


def _show(console: Console, task: Task, diagnosis: Diagnosis, arguments: "TasksArguments") -> None:
    table = Table(
        title=f"{task.name}: an episode of {task.episode_length} steps, "
        f"{arguments.groups} hosts x {arguments.group_size} environments, "
        f"reward {arguments.reward}",
        title_justify="left",
    )
    table.add_column("")
    for name in diagnosis.results:
        table.add_column(name, justify="right")
    results = list(diagnosis.results.values())

    def row(label: str, cells: list[str]) -> None:
        table.add_row(label, *cells)

    def means(label: str, values: list[Tensor], form: str = ".1f") -> None:
        row(label, [f"{100.0 * float(value.mean()):{form}}" for value in values])

    gains = torch.stack([policy.test.gain for policy in results])
    gains_interval = interval(group_means(100.0 * gains.numpy(), arguments.group_size))
    means("gain (test), points", [p.test.gain for p in results], "+.1f")
    ends = zip(gains_interval.low, gains_interval.high, strict=True)
    row("95 % interval", [f"{low:+.1f}, {high:+.1f}" for low, high in ends])
    means("gain on validation", [p.validation.gain for p in results], "+.1f")
    means("utility (test), points", [p.test.utility for p in results])
    means("utility on validation", [p.validation.utility for p in results])
    means("accuracy (test), %", [p.test.accuracy for p in results])
    means("accuracy on validation", [p.validation.accuracy for p in results])
    table.add_section()
    for stage in STAGES:
        row(f"seeds {stage.name}", [f"{p.entries[stage]:.2f}" for p in results])
    table.add_section()
    for op in Op:
        row(f"{op.name} legal, %", [f"{100 * p.legal[op]:.0f}" for p in results])
    console.print(table)
    console.print(
        "Gain is utility minus that of the never-grow twin, after the last step; its interval is "
        "over hosts.\n"
        "variance of the untrained policy's return: "
        f"{_share(diagnosis.by_init)} from init alone (host and data), "
        f"{_share(diagnosis.by_actions)} from actions alone, {_share(diagnosis.by_rest)} from both "
        "and from the seeds' initial weights\n"
        "signal-to-noise ratio of growing everything against never growing: "
        f"{diagnosis.step_signal:.2f} in the reward of a step, "
        f"{diagnosis.return_signal:.2f} in the return",
        highlight=False,
        soft_wrap=True,
    )


def _share(value: float) -> str:
    return "-" if value != value else f"{100 * value:.0f} %"
