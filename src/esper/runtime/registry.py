"""What a task is, and the register in which tasks and suites of tasks are found by name.

Import these names from ``esper.runtime.tasks``, which also registers the tasks of Esper itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from esper.kasmina.hosts.host import Host
from esper.leyline.errors import UsageError, suggestion
from esper.runtime.augmentation import Augmentation
from esper.runtime.data import Dataset, FromDirectory


@dataclass(frozen=True)
class Drift:
    """A switch to other data during an episode.

    Attributes:
        data: makes the data set that comes after; images and classes as before.
        earliest: fraction of the episode before which nothing switches.
        latest: fraction of the episode by which it has switched, if it does; the step is drawn
            uniformly between the two.
        never: probability that an episode does not switch.

    Raises:
        UsageError: fractions or probability out of range or order.
    """

    data: Callable[[], Dataset]
    earliest: float
    latest: float
    never: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.earliest <= self.latest <= 1.0:
            raise UsageError(
                f"drift: earliest {self.earliest} and latest {self.latest} must be fractions of "
                "the episode, in [0, 1] and in this order"
            )
        if not 0.0 <= self.never <= 1.0:
            raise UsageError(f"drift: never must be a probability in [0, 1], got {self.never}")


@dataclass(frozen=True)
class Task:
    """What an environment trains.

    Attributes:
        name: as the user writes it.
        summary: the data in a few words, for ``esper tasks``.
        host: the network that is there from the start.
        data: makes the data set; called once when an environment is built.
        episode_length: environment steps of an episode.
        max_batches: minibatches of one environment step.
        batch_size: images of a minibatch.
        learning_rate: of hosts and seeds.
        weight_decay: of the hosts; seeds have none.
        momentum: SGD with this momentum trains hosts and seeds; AdamW does when None.
        drift: how the data changes during an episode, if it does.
        augmentation: of training images, none when None.

    Raises:
        UsageError: a budget is too small.
    """

    name: str
    summary: str
    host: Host
    data: Callable[[], Dataset]
    episode_length: int = 40
    max_batches: int = 8
    batch_size: int = 64
    learning_rate: float = 5e-3
    weight_decay: float = 0.0
    momentum: float | None = None
    drift: Drift | None = None
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        for field, least in (("episode_length", 1), ("max_batches", 1), ("batch_size", 2)):
            if getattr(self, field) < least:
                raise UsageError(
                    f"{field}: must be at least {least}, got {getattr(self, field)} "
                    f"in the task {self.name!r}"
                )

    def in_directory(self, directory: Path) -> "Task":
        """The task with its files, if it reads any, in ``directory``."""

        def moved(data: Callable[[], Dataset]) -> Callable[[], Dataset]:
            return replace(data, directory=directory) if isinstance(data, FromDirectory) else data

        drift = self.drift and replace(self.drift, data=moved(self.drift.data))
        return replace(self, data=moved(self.data), drift=drift)

    def datasets(self) -> tuple[Dataset, ...]:
        """The data from the start and, where the task drifts, the data that comes after.

        Raises:
            UsageError: it cannot be made, or the host takes other images or classes.
        """
        makers = [self.data] if self.drift is None else [self.data, self.drift.data]
        places = ("data", "drift")
        sets = tuple(self._made(*pair) for pair in zip(places, makers, strict=False))
        wanted = (self.host.image, self.host.classes)
        for place, dataset in zip(places, sets, strict=False):
            if dataset.label_shape != self.host.label_shape:
                raise UsageError(
                    f"{place}: the task {self.name!r} has labels of shape {dataset.label_shape} an "
                    f"input and a host for {self.host.label_shape}; make them the same"
                )
            for images in (dataset.train_images, dataset.validation_images, dataset.test_images):
                found = (tuple(images.shape[1:]), dataset.classes)
                if found != wanted:
                    raise UsageError(
                        f"{place}: the task {self.name!r} has images {found[0]} of {found[1]} "
                        f"classes and a host for images {wanted[0]} of {wanted[1]} classes; "
                        "make them the same"
                    )
        return sets

    def _made(self, place: str, maker: Callable[[], Dataset]) -> Dataset:
        """What ``maker`` makes; what goes wrong in a user's code is the user's to mend."""
        if isinstance(maker, FromDirectory):
            return maker()  # it names file and fix by itself
        try:
            return maker()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"{place}: the task {self.name!r} cannot make it ({reason})"
            ) from error


TASKS: dict[str, Callable[[], Task]] = {}
"""The factory of every task, by name."""

SUITES: dict[str, tuple[str, ...]] = {}
"""Names that stand for several tasks."""


def task(factory: Callable[[], Task]) -> Callable[[], Task]:
    """Register a task under the name of its factory.

    Raises:
        UsageError: the name is taken, or the task bears another.
    """
    name = factory.__name__
    if name in TASKS:
        raise UsageError(f"task: {name!r} is already registered; give the new one another name")
    if name in SUITES:
        raise UsageError(f"task: {name!r} is the name of a suite; give the task another name")
    made = factory()
    if made.name != name:
        raise UsageError(
            f"task: the factory {name!r} makes a task called {made.name!r}; give both one name"
        )
    TASKS[name] = factory
    return factory


def find(name: str) -> Task:
    """The task called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name in TASKS:
        return TASKS[name]()
    if name in SUITES:
        raise UsageError(f"task: {name!r} is a suite; name one of {', '.join(SUITES[name])}")
    known = [*TASKS, *SUITES]
    hint = suggestion(name, known, f"choose from {', '.join(sorted(known))}")
    raise UsageError(f"task: there is no task {name!r}; {hint}")


def find_all(names: Sequence[str]) -> tuple[Task, ...]:
    """The tasks called ``names`` in their order, a suite's name standing for all of its tasks.

    Raises:
        UsageError: no name, one that is unknown, or a task that would be there twice.
    """
    if not names:
        raise UsageError(
            f"task: no task is given; name at least one task or suite ({', '.join(SUITES)})"
        )
    tasks = tuple(find(member) for name in names for member in SUITES.get(name, (name,)))
    found = [task.name for task in tasks]
    for name in found:
        if found.count(name) > 1:
            raise UsageError(
                f"task: {name!r} is there twice, suites counted with all of their tasks; "
                "name it once"
            )
    return tasks


def agree(
    tasks: Sequence[Task],
    episode_length: int | None = None,
    max_batches: int | None = None,
    batch_size: int | None = None,
) -> tuple[int, int, int]:
    """Episode length, minibatches a step and images a minibatch of tasks that train together.

    What is given holds for all of them; the rest is the tasks' own.

    Args:
        tasks: at least one.

    Raises:
        UsageError: the tasks differ in what is not given.
    """
    return (
        _agreed(tasks, "episode_length", episode_length),
        _agreed(tasks, "max_batches", max_batches),
        _agreed(tasks, "batch_size", batch_size),
    )


def _agreed(tasks: Sequence[Task], field: str, given: int | None) -> int:
    if given is not None:
        return given
    owners: dict[int, list[str]] = {}
    for task in tasks:
        owners.setdefault(getattr(task, field), []).append(task.name)
    if len(owners) > 1:
        parts = " but ".join(f"{value} in {', '.join(names)}" for value, names in owners.items())
        raise UsageError(
            f"{field}: tasks that train together must agree, and it is {parts}; "
            f"give --{field.replace('_', '-')}"
        )
    (value,) = owners
    return value
