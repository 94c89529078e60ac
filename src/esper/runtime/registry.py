"""The registry of tasks, suites and families by name.

Import these names from ``esper.runtime.tasks``, which also registers Esper's own tasks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from esper.leyline.errors import UsageError, suggestion
from esper.leyline.laboratory import MISSING, find_part
from esper.runtime.task import Task


@dataclass(frozen=True)
class Family:
    """A population of tasks, whose hosts and circumstances are drawn.

    The task of a draw is called ``NAME:NUMBER`` and has the family's name as its ``family``.

    Attributes:
        name: name of the suite of its training draws; the suite of the others is called
            ``NAME_held_out``.
        summary: the population in a few words, for ``esper tasks``.
        draw: makes the task of a number; it depends on nothing else.
        training: number of training draws, numbered from 0.
        held_out: number of held-out draws, numbered from ``HELD_OUT_DRAWS``.

    Raises:
        UsageError: there are no draws of one kind, or too many training draws.
    """

    name: str
    summary: str
    draw: Callable[[int], Task]
    training: int = 128
    held_out: int = 256

    def __post_init__(self) -> None:
        for field in ("training", "held_out"):
            if not 1 <= getattr(self, field) <= HELD_OUT_DRAWS:
                raise UsageError(
                    f"{field}: must lie between 1 and {HELD_OUT_DRAWS}, got "
                    f"{getattr(self, field)} in the family {self.name!r}"
                )

    def names(self, held_out: bool) -> tuple[str, ...]:
        """Names of the training draws, or of the held-out draws."""
        first, count = (HELD_OUT_DRAWS, self.held_out) if held_out else (0, self.training)
        return tuple(f"{self.name}:{number}" for number in range(first, first + count))


HELD_OUT_DRAWS = 1_000_000
"""Number of the first held-out draw of a family; training draws have smaller numbers."""

TASKS: dict[str, Callable[[], Task]] = {}
"""The factories of all tasks, by name."""

SUITES: dict[str, tuple[str, ...]] = {}
"""Names of tasks by the name of their suite."""


FAMILIES: dict[str, Family] = {}
"""Families of tasks by name."""


def add_family(family: Family) -> None:
    """Register a family, and its training and held-out draws as suites.

    Raises:
        UsageError: a name is taken, or the task of a draw has another name or family.
    """
    suites = {
        family.name: family.names(held_out=False),
        f"{family.name}_held_out": family.names(held_out=True),
    }
    for name in suites:
        if name in TASKS or name in SUITES:
            raise UsageError(
                f"family: {name!r} is the name of a task or suite; give the family another name"
            )
    first = family.draw(0)
    if (first.name, first.family) != (f"{family.name}:0", family.name):
        raise UsageError(
            f"family: draw 0 of {family.name!r} is called {first.name!r} and has the family "
            f"{first.family!r}; give it the name '{family.name}:0' and the family {family.name!r}"
        )
    FAMILIES[family.name] = family
    SUITES.update(suites)


def task(factory: Callable[[], Task]) -> Callable[[], Task]:
    """Register a task under the name of its factory.

    Raises:
        UsageError: the name is taken, or differs from the name of the task.
    """
    name = factory.__name__
    if name in TASKS:
        raise UsageError(f"task: {name!r} is already registered; give the new one another name")
    if name in SUITES:
        raise UsageError(f"task: {name!r} is the name of a suite; give the task another name")
    first = factory()
    if first.name != name:
        raise UsageError(
            f"task: the factory {name!r} makes a task called {first.name!r}; "
            "give both the same name"
        )
    TASKS[name] = factory
    return factory


def find(name: str) -> Task:
    """The task called ``name``.

    Raises:
        UsageError: there is no such task, or it is a suite.
    """
    if name in TASKS:
        return TASKS[name]()
    family, _, number = name.partition(":")
    if family in FAMILIES and number.isdecimal() and len(number) < 10:
        return FAMILIES[family].draw(int(number))
    if family in FAMILIES and ":" in name:
        raise UsageError(
            f"task: {name!r} is no draw of the family {family!r}; give a number of at most nine "
            f"digits, such as {family}:17"
        )
    if name in SUITES:
        names = SUITES[name] if len(SUITES[name]) <= 20 else (*SUITES[name][:3], "...")
        raise UsageError(f"task: {name!r} is a suite; name one of {', '.join(names)}")
    every = [*TASKS, *SUITES]
    hint = suggestion(name, every, f"choose from {', '.join(sorted(every))}")
    if find_part("families") is None:
        hint += f". Families are not offered: {MISSING}"
    raise UsageError(f"task: there is no task {name!r}; {hint}")


def find_all(names: Sequence[str]) -> tuple[Task, ...]:
    """The tasks called ``names`` in order; the name of a suite stands for all its tasks.

    Raises:
        UsageError: there are no names, a name is unknown, or a task appears twice.
    """
    if not names:
        raise UsageError(
            f"task: no task is given; name at least one task or suite ({', '.join(SUITES)})"
        )
    tasks = tuple(find(member) for name in names for member in SUITES.get(name, (name,)))
    task_names = [task.name for task in tasks]
    for name in task_names:
        if task_names.count(name) > 1:
            raise UsageError(
                f"task: {name!r} is given twice, possibly as part of a suite; name it once"
            )
    return tasks


def agree(
    tasks: Sequence[Task],
    episode_length: int | None = None,
    max_batches: int | None = None,
    batch_size: int | None = None,
    max_seeds: int | None = None,
) -> tuple[int, int, int, int | None]:
    """Episode length, minibatches per step, their size and the limit of seeds of tasks together.

    A given value applies to all tasks; None means the value on which the tasks agree, which may be
    None for ``max_seeds`` alone: no limit.

    Args:
        tasks: at least one task.

    Raises:
        UsageError: a value is None, and the tasks differ in it.
    """
    return (
        _common(tasks, "episode_length", episode_length),
        _common(tasks, "max_batches", max_batches),
        _common(tasks, "batch_size", batch_size),
        _common(tasks, "max_seeds", max_seeds),
    )


def _common(tasks: Sequence[Task], field: str, setting: int | None) -> Any:
    if setting is not None:
        return setting
    owners: dict[int | None, list[str]] = {}
    for task in tasks:
        owners.setdefault(getattr(task, field), []).append(task.label)
    if len(owners) > 1:
        parts = " but ".join(
            f"{'no limit' if value is None else value} in {', '.join(dict.fromkeys(names))}"
            for value, names in owners.items()
        )
        raise UsageError(
            f"{field}: tasks that train together must agree (it is {parts}); "
            f"give --{field.replace('_', '-')}"
        )
    (value,) = owners
    return value
