"""The tasks one can train on: a host, its data and the budget of an episode."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.leyline.errors import UsageError
from esper.runtime import data


@dataclass(frozen=True)
class Task:
    """What an environment trains.

    Attributes:
        name: as the user writes it.
        summary: one line for ``esper tasks``.
        host: the network that is there from the start.
        data: makes the data set; called once when an environment is built.
        episode_length: environment steps of an episode.
        max_batches: minibatches of one environment step.
        batch_size: images of a minibatch.
        learning_rate: of hosts and seeds, AdamW.
        weight_decay: of the hosts; seeds have none.
    """

    name: str
    summary: str
    host: Host
    data: Callable[[], data.Dataset]
    episode_length: int = 40
    max_batches: int = 8
    batch_size: int = 64
    learning_rate: float = 5e-3
    weight_decay: float = 0.0


TASKS: dict[str, Callable[[], Task]] = {}


def task(factory: Callable[[], Task]) -> Callable[[], Task]:
    """Register a task under the name of its factory."""
    TASKS[factory.__name__] = factory
    return factory


def find(name: str) -> Task:
    """The task called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in TASKS:
        near = get_close_matches(name, TASKS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(sorted(TASKS))}"
        raise UsageError(f"task: there is no task {name!r}; {hint}")
    return TASKS[name]()


@task
def digits_shift() -> Task:
    """Digits anywhere within two pixels: a host too small for it, where growing pays."""
    return Task(
        name="digits_shift",
        summary="8x8 digits shifted by up to two pixels with noise 0.1, host of 4 and 8 channels",
        host=CnnHost(channels=(4, 8), classes=10, image=(8, 8, 1)),
        data=lambda: data.digits(shift=2, noise=0.1),
    )


@task
def digits() -> Task:
    """Digits as they are: an ample host, where nothing that grows is worth its rent."""
    return Task(
        name="digits",
        summary="8x8 digits as they are, host of 8 and 16 channels",
        host=CnnHost(channels=(8, 16), classes=10, image=(8, 8, 1)),
        data=data.digits,
    )
