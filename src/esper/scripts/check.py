"""``esper tasks check FILE``: try the user's own tasks, and measure their memory and time."""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.config import WorldConfig
from esper.leyline.config.setting import SEEDS, setting
from esper.leyline.errors import UsageError
from esper.runtime.plugins import load
from esper.runtime.tasks import TASKS, Task, find_all
from esper.scripts.flags import parse
from esper.simic.tools.task_check import TaskTrial, try_task


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckArguments:
    """Check whether the tasks in a Python file fit Esper, and measure their memory and time.

    Tries every blueprint in every slot, then grows the largest blueprint in every slot for
    some steps. If a task does not fit, one line gives the reason and the exit status is 2.
    """

    file: str = setting(positional=True)
    """The Python file that defines the tasks."""
    split_seed: int = setting(0, SEEDS)
    """Seed of the split into training, validation and test images, for tasks that draw it."""


def check(arguments: list[str]) -> int:
    """Check whether the tasks in a file fit, and measure their memory and time.

    Raises:
        UsageError: a task does not fit, or the file has none.
    """
    given = parse(CheckArguments, "esper tasks check", arguments)
    known = set(TASKS)
    load(given.file)
    names = [name for name in TASKS if name not in known]
    if not names:
        raise UsageError(f"plugin: {given.file} has no task; write one with @task")
    console = Console()
    for task in find_all(names):
        with console.status(f"trying {task.name}"):
            found = try_task(task.with_split(given.split_seed))
        console.print(Text(_lines(task, found)), soft_wrap=True)
    return 0


def _lines(task: Task, found: TaskTrial) -> str:
    data, world = found.data, WorldConfig()
    sizes = " / ".join(
        f"{len(labels):,}"
        for labels in (data.train_labels, data.validation_labels, data.test_labels)
    )
    steps = world.rounds * world.envs * task.episode_length
    memory = "not known on this system"
    if found.bytes is not None:
        mebibytes = found.bytes / 2**20
        total = f"{world.envs * mebibytes:.0f} MiB for {world.envs}"
        memory = f"{mebibytes:.1f} MiB per environment, {total}"
    lines = [
        ("host", f"{task.host.summary}, {task.host.parameter_count:,} parameters"),
        *(("slot", _slot(slot)) for slot in task.host.slots),
        ("data", f"{sizes} images {tuple(data.train_images.shape[1:])}, {data.classes} classes"),
        (
            "horizon",
            f"{task.episode_length} steps of {task.max_batches} minibatches of {task.batch_size}",
        ),
        ("tried", f"every blueprint in every slot and style; backend {found.backend}"),
        ("memory", f"{memory}, with the largest seed in every slot"),
        (
            "time",
            f"{1000 * found.seconds:.2f} ms per environment step on one thread, "
            f"{_duration(steps * found.seconds)} for {world.rounds} rounds of {world.envs} "
            "environments (without the policy)",
        ),
    ]
    return "\n".join([f"{task.name} fits", *(f"  {name:<9}{value}" for name, value in lines)])


def _slot(slot: SlotSpec) -> str:
    height, width = slot.size
    fitting = ", ".join(f"{BLUEPRINTS[kind]} {slot.layouts[kind].size:,}" for kind in slot.kinds)
    return f"{slot.name}: {slot.channels} channels of {height}x{width}; parameters of {fitting}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
