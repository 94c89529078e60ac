"""``esper tasks --describe``: print the figures of ``diagnosis`` as tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from esper.karn.intervals import group_means, interval
from esper.leyline.actions import Op
from esper.leyline.config.groups import Reward
from esper.leyline.errors import UsageError
from esper.runtime.tasks import Task
from esper.simic.growth.step import GrowthConfig
from esper_lab.diagnosis import STAGES, Diagnosis, diagnose

SEED = 42
MAX_ENVIRONMENTS = 2048


@dataclass(frozen=True, slots=True)
class Trial:
    """What is measured: a number of hosts, the environments of each, and their reward."""

    groups: int
    group_size: int
    reward: Reward


def describe(console: Console, tasks: Sequence[Task], trial: Trial) -> int:
    """Play the tasks with policies that do not learn, and print the diagnosis.

    Raises:
        UsageError: there would be too many environments.
    """
    if trial.groups * trial.group_size > MAX_ENVIRONMENTS:
        raise UsageError(
            f"groups: {trial.groups} groups of {trial.group_size} are more than "
            f"{MAX_ENVIRONMENTS} environments; take fewer"
        )
    config = GrowthConfig(seed=SEED, group_size=trial.group_size, reward=trial.reward)
    for task in tasks:
        with console.status("") as status:
            diagnosis = diagnose(
                task,
                trial.groups,
                config,
                lambda policy, name=task.name: status.update(f"{name}: {policy}"),  # type: ignore[misc]
            )
        _show(console, task, diagnosis, trial)
    return 0


def _show(console: Console, task: Task, diagnosis: Diagnosis, trial: Trial) -> None:
    table = Table(
        title=f"{task.name}: an episode of {task.episode_length} steps, "
        f"{trial.groups} hosts x {trial.group_size} environments, reward {trial.reward}",
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
    estimate = interval(group_means(100.0 * gains.numpy(), trial.group_size))
    means("gain, points", [p.test.gain for p in results], "+.1f")
    ends = zip(estimate.low, estimate.high, strict=True)
    row("95 % interval", [f"{low:+.1f}, {high:+.1f}" for low, high in ends])
    means("validation difference", [p.validation.gain for p in results], "+.1f")
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
    init, actions, remainder = map(
        _share, (diagnosis.by_init, diagnosis.by_actions, diagnosis.by_rest)
    )
    console.print(
        "Gain is test utility minus that of the never-grow twin, after the last step; its interval "
        "is over hosts.\n"
        f"variance of the untrained policy's return: {init} from init alone (host and data), "
        f"{actions} from actions alone, {remainder} from both and from the seeds' initial weights\n"
        "signal-to-noise ratio of growing everything against never growing: "
        f"{diagnosis.step_signal:.2f} in the reward of a step, "
        f"{diagnosis.return_signal:.2f} in the return",
        highlight=False,
        soft_wrap=True,
    )


def _share(value: float) -> str:
    return "-" if value != value else f"{100 * value:.0f} %"
