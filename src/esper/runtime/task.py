"""The definition of a task: host, data and recipe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from esper.kasmina.hosts.host import Host, NormedHost, resolve_slots
from esper.leyline.errors import UsageError
from esper.runtime.data import Augmentation, Dataset, DrawnSplit, FromDirectory

Maker = Callable[[], Dataset]
"""Makes a data set; ``FromDirectory`` and ``DrawnSplit`` are makers that settings change."""


@dataclass(frozen=True)
class ChannelShift:
    """A shift at the feature level: the output channels of a block of the host change places.

    Accuracy falls, and neither the images, the labels nor the shape of the host tell why.

    Attributes:
        block: number of the block.
        share: share of the block's channels that move on cyclically, in (0, 1]; at least 2 move.
        seed: determines which.

    Raises:
        UsageError: the share is out of range, or the number of the block is negative.
    """

    block: int
    share: float
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise UsageError(f"drift: share must lie in (0, 1], got {self.share}")
        if self.block < 0:
            raise UsageError(f"drift: block must be 0 or more, got {self.block}")

    def order(self, channels: int) -> list[int]:
        """For each place, the channel that moves there."""
        draws = np.random.default_rng(self.seed)
        moving = draws.permutation(channels)[: max(2, round(self.share * channels))]
        order = np.arange(channels)
        order[moving] = np.roll(moving, 1)
        return [int(channel) for channel in order]


@dataclass(frozen=True)
class Drift:
    """A switch to other data during an episode, and a shift of the host's channels.

    Attributes:
        data: makes the second data set, with images and classes like the first.
        earliest: earliest time of the switch, as a fraction of the episode.
        latest: latest time of the switch, as a fraction of the episode; the step is drawn uniformly
            between the two.
        never: probability that an episode does not switch.
        channels: shift of the host's channels at the switch, if any.

    Raises:
        UsageError: a fraction or the probability is out of range, or the order is wrong.
    """

    data: Maker
    earliest: float
    latest: float
    never: float
    channels: ChannelShift | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.earliest <= self.latest <= 1.0:
            raise UsageError(
                f"drift: earliest {self.earliest} and latest {self.latest} must be fractions of "
                "the episode, in [0, 1] and in this order"
            )
        if not 0.0 <= self.never <= 1.0:
            raise UsageError(f"drift: never must be a probability in [0, 1], got {self.never}")


@dataclass(frozen=True)
class Pretraining:
    """Training of hosts before their episodes, on other data.

    The hosts are trained without seeds, with the budget of the task per step and a cosine decay.

    Attributes:
        data: makes the data set.
        steps: environment steps of training.
        learning_rate: initial learning rate.
        hosts: number of hosts; each group draws one of them per episode.
        seed: seed of the hosts' initial weights and minibatches.

    Raises:
        UsageError: a number is out of range.
    """

    data: Maker
    steps: int = 20
    learning_rate: float = 1e-2
    hosts: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for field, fits, rule in (
            ("steps", self.steps >= 1, "at least 1"),
            ("hosts", self.hosts >= 1, "at least 1"),
            ("learning_rate", self.learning_rate > 0.0, "above 0"),
        ):
            if not fits:
                number = getattr(self, field)
                raise UsageError(f"pretraining: {field} must be {rule}, got {number}")


DECAYS = ("constant", "cosine")
"""Learning rates over T steps of training: constant, or times ``(1 + cos(pi t / T)) / 2``
(Loshchilov and Hutter, "SGDR", 2017, without restarts), constant within a step."""

TUNINGS = ("all", "last", "auto_rgn")
"""Which parameters of a host are trained, and at which rate: all at the same, those of the last
block, or all at rates that follow their relative gradients (see ``tolaria.optim``)."""


@dataclass(frozen=True)
class Task:
    """A task: host, data and training budget of an environment.

    Attributes:
        name: name by which the user selects the task.
        summary: the data in a few words, for ``esper tasks``.
        host: the initial network.
        data: makes the data set; called once when an environment is built. A ``FromDirectory``
            reads files, a ``DrawnSplit`` draws its split.
        episode_length: environment steps per episode.
        max_batches: minibatches per environment step.
        batch_size: images per minibatch.
        max_seeds: limit of living seeds, the budget of growth; the number of slots if None.
        learning_rate: learning rate of hosts and seeds.
        decay: how the learning rate changes over the episode, one of ``DECAYS``.
        host_learning_rate: learning rate of the hosts if it differs from that of the seeds; 0
            freezes the hosts' parameters, but not their running statistics.
        tuning: which parameters of the hosts are trained, one of ``TUNINGS``.
        max_gradient_norm: norm to which the gradient of each host and of each seed is clipped.
        weight_decay: weight decay of hosts; seeds have none.
        momentum: momentum of SGD for hosts and seeds; AdamW is used if None.
        deadline: part of the episode after which nothing is trained any more, in (0, 1]; decay ends
            there too. The policy observes how much time is left.
        drift: switch to other data during an episode, if any.
        augmentation: augmentation of training images, if any.
        pretraining: training of the hosts before the episode; they start from initial weights if
            None.
        validation_part: validation images of a step, a part that changes from step to step; all of
            them if None. The last steps of an episode, which are scored, take all in any case.
        price: price of parameters, see ``tamiyo.policy.features.utility``.
        family: name of the family that the task was drawn from, if any.

    Raises:
        UsageError: a budget is too small, a number of the recipe is out of range, data are split
            with different seeds, or the host has no channels that could shift.
    """

    name: str
    summary: str
    host: Host
    data: Maker
    episode_length: int = 40
    max_batches: int = 8
    batch_size: int = 64
    max_seeds: int | None = None
    learning_rate: float = 5e-3
    decay: str = "constant"
    host_learning_rate: float | None = None
    tuning: str = "all"
    max_gradient_norm: float = 1.0
    weight_decay: float = 0.0
    momentum: float | None = None
    deadline: float = 1.0
    drift: Drift | None = None
    augmentation: Augmentation | None = None
    pretraining: Pretraining | None = None
    validation_part: int | None = None
    price: float = 0.05
    family: str | None = None

    def __post_init__(self) -> None:
        host_rate, part = self.host_learning_rate, self.validation_part
        for field, fits, rule in (
            ("episode_length", self.episode_length >= 1, "be at least 1"),
            ("max_batches", self.max_batches >= 1, "be at least 1"),
            ("batch_size", self.batch_size >= 2, "be at least 2"),
            ("max_seeds", self.max_seeds is None or self.max_seeds >= 1, "be at least 1"),
            ("decay", self.decay in DECAYS, f"be one of {', '.join(DECAYS)}"),
            ("tuning", self.tuning in TUNINGS, f"be one of {', '.join(TUNINGS)}"),
            ("max_gradient_norm", self.max_gradient_norm > 0.0, "be above 0"),
            ("host_learning_rate", host_rate is None or host_rate >= 0.0, "be 0 or more"),
            ("validation_part", part is None or part >= 1, "be at least 1"),
            ("deadline", 0.0 < self.deadline <= 1.0, "lie in (0, 1]"),
            ("price", self.price >= 0.0, "be 0 or more"),
        ):
            if not fits:
                raise UsageError(
                    f"{field}: must {rule}, got {getattr(self, field)!r} in the task {self.name!r}"
                )
        shift = self.drift and self.drift.channels
        blocks = len(self.host.weights) if isinstance(self.host, NormedHost) else 0
        if shift and shift.block >= blocks:
            raise UsageError(
                f"drift: block must be less than {blocks}, the number of blocks of the host whose "
                f"channels can shift, got {shift.block} in the task {self.name!r}"
            )
        seeds = self._split_seeds()
        if len(set(seeds)) > 1:
            raise UsageError(
                f"data: the task {self.name!r} splits its data with the seeds "
                f"{', '.join(map(str, seeds))}, so it would train on images of its test split; "
                "use one seed"
            )

    @property
    def label(self) -> str:
        """Name under which telemetry and evaluations group the task: its family, if any."""
        return self.family or self.name

    @property
    def horizon(self) -> tuple[int, int, int, int | None]:
        """Steps, minibatches per step, batch size and limit of seeds.

        Hosts in one evaluation must agree in it.
        """
        return self.episode_length, self.max_batches, self.batch_size, self.max_seeds

    def in_directory(self, directory: Path) -> "Task":
        """A copy of the task that reads its files, if any, from ``directory``."""
        return self._with_data(FromDirectory, directory=directory)

    def with_split(self, seed: int) -> "Task":
        """A copy of the task whose data are split with ``seed``, wherever the split is drawn.

        That holds for the data before and after a drift and for those of pretraining, so hosts are
        never trained on images of their task's test split. Data that are no ``DrawnSplit`` have a
        fixed split and stay as they are.
        """
        return self._with_data(DrawnSplit, seed=seed)

    def with_slots(self, names: Sequence[str]) -> "Task":
        """A copy of the task whose hosts grow in the slots ``names``; the task itself if empty.

        Raises:
            UsageError: the host has no such slot, see ``resolve_slots``.
        """
        if not names:
            return self
        slots = resolve_slots(self.host, tuple(names))
        return replace(self, host=replace(self.host, slot_names=slots))

    @property
    def split_seed(self) -> int | None:
        """Seed of the drawn splits of the task's data; None if no split is drawn."""
        return next(iter(self._split_seeds()), None)

    def _split_seeds(self) -> list[int]:
        parts = (self, self.drift, self.pretraining)
        makers = [part.data for part in parts if part is not None]
        return [data.seed for data in makers if isinstance(data, DrawnSplit)]

    def _with_data(self, kind: type[FromDirectory | DrawnSplit], **settings: Any) -> "Task":
        """A copy of the task in which the makers of one kind have other settings."""

        def change(data: Maker) -> Maker:
            return replace(data, **settings) if isinstance(data, kind) else data

        drift = self.drift and replace(self.drift, data=change(self.drift.data))
        before = self.pretraining and replace(self.pretraining, data=change(self.pretraining.data))
        return replace(self, data=change(self.data), drift=drift, pretraining=before)

    def datasets(self) -> tuple[Dataset, ...]:
        """The initial data set and, if the task has a drift, the second one.

        Raises:
            UsageError: the data cannot be made, or do not fit the host.
        """
        makers = {"data": self.data, **({"drift": self.drift.data} if self.drift else {})}
        sets = {field: self._dataset(field, maker) for field, maker in makers.items()}
        fit = (self.host.image, self.host.classes)
        for field, dataset in sets.items():
            if dataset.label_shape != self.host.label_shape:
                raise UsageError(
                    f"{field}: the task {self.name!r} has labels of shape {dataset.label_shape} "
                    f"per input and a host for {self.host.label_shape}; make them the same"
                )
            for images in (dataset.train_images, dataset.validation_images, dataset.test_images):
                shape = (tuple(images.shape[1:]), dataset.classes)
                if shape != fit:
                    raise UsageError(
                        f"{field}: the task {self.name!r} has images {shape[0]} of {shape[1]} "
                        f"classes and a host for images {fit[0]} of {fit[1]} classes; "
                        "make them the same"
                    )
        return tuple(sets.values())

    def _dataset(self, field: str, maker: Maker) -> Dataset:
        """The data set of ``maker``; errors in the user's code become a UsageError."""
        if isinstance(maker, FromDirectory):
            return maker()  # its errors already name the file and the fix
        try:
            return maker()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"{field}: the task {self.name!r} cannot make its data set ({reason})"
            ) from error


def data_digests(data: Sequence[tuple[Task, Sequence[Dataset]]]) -> dict[str, str]:
    """SHA-256 of the data by ``label`` of the tasks, each given with its ``datasets()``."""
    digests: dict[str, list[str]] = {}
    for task, sets in data:
        digests.setdefault(task.label, []).extend(dataset.digest for dataset in sets)
    return {label: sha256(" ".join(each).encode()).hexdigest() for label, each in digests.items()}


HELD_OUT_DRAWS = 1_000_000
"""Number of the first held-out draw of a family; training draws have smaller numbers."""


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
