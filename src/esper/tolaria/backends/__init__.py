"""Backends do the arithmetic of N hosts: an epoch of training, a pass of validation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from esper.kasmina.stack import Stack
from esper.tolaria.loss_scales import LossScales
from esper.tolaria.minibatches import Minibatches
from esper.tolaria.plan import Seeds


@dataclass(frozen=True, slots=True)
class Optimisation:
    """How hosts and seeds are updated.

    Attributes:
        host_learning_rate: ``[N]``.
        seed_learning_rate: ``[N, S]``.
        weight_decay: of the hosts; seeds have none.
        max_gradient_norm: of each host, and of each seed, by itself.
        momentum: of SGD, in which weight decay is a part of the gradient; AdamW when None.
        scales: of the losses, brought up to date after every minibatch; losses are not scaled
            when None.
    """

    host_learning_rate: Tensor
    seed_learning_rate: Tensor
    weight_decay: float
    max_gradient_norm: float
    momentum: float | None = None
    scales: LossScales | None = None


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Data sets to score on.

    Attributes:
        images: of D data sets, ``[D, V, H, W, C]``.
        labels: int64 ``[D, V]``.
        dataset: which of them each row is scored on, int64 ``[R]``.
    """

    images: Tensor
    labels: Tensor
    dataset: Tensor

    def by_row(self) -> tuple[Tensor, Tensor]:
        """Images ``[V, H, W, R, C]`` and labels ``[R, V]``.

        R is 1, shared by all rows, while there is a single data set.
        """
        if len(self.images) == 1:
            return self.images[0][:, :, :, None], self.labels
        return self.images[self.dataset].permute(1, 2, 3, 0, 4), self.labels[self.dataset]


@dataclass(slots=True)
class EpochResult:
    """What an epoch of training measured.

    Attributes:
        loss: mean cross-entropy, nats, ``[N]``.
        accuracy: fraction of correct training predictions, ``[N]``.
        host_gradient_norm: of the last minibatch before clipping, ``[N]``. Where losses are scaled,
            of the last one that did not overflow; NaN where all did.
        seed_gradient_norm: likewise ``[N, S]``, NaN where no seed was computed.
        seed_tensor_norms: by parameter tensor, ``S`` tensors ``[N, tensors]``, NaN likewise.
        unmeasured: where a gradient is unknown because the loss scale was too high all epoch and
            has come down since, bool ``[N]``: nothing diverged. None where losses are not scaled.
    """

    loss: Tensor
    accuracy: Tensor
    host_gradient_norm: Tensor
    seed_gradient_norm: Tensor
    seed_tensor_norms: list[Tensor]
    unmeasured: Tensor | None = None

    def forget(self, rows: Tensor) -> None:
        """Put NaN where ``rows``, bool ``[N]``, is true: what was measured there holds no more."""
        nan = float("nan")
        self.loss, self.accuracy, self.host_gradient_norm = (
            part.masked_fill(rows, nan)
            for part in (self.loss, self.accuracy, self.host_gradient_norm)
        )
        self.seed_gradient_norm = self.seed_gradient_norm.masked_fill(rows[:, None], nan)
        self.seed_tensor_norms = [
            norms.masked_fill(rows[:, None], nan) for norms in self.seed_tensor_norms
        ]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a validation pass measured of each row ``[R]``.

    Attributes:
        loss: mean cross-entropy, nats.
        accuracy: fraction of images whose most probable class is the true one.
        expected: expected accuracy, the mean probability of the true class.
    """

    loss: Tensor
    accuracy: Tensor
    expected: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Scores":
        """The scores with ``function`` applied to each."""
        return Scores(function(self.loss), function(self.accuracy), function(self.expected))

    def put(self, rows: Tensor, other: "Scores") -> None:
        """Overwrite ``rows``, int64 ``[R]``, in place with ``other [R]``."""
        self.loss[rows] = other.loss
        self.accuracy[rows] = other.accuracy
        self.expected[rows] = other.expected


@dataclass(frozen=True, slots=True)
class Variant:
    """Hosts to be validated again with other alphas.

    Attributes:
        start: index of the first slot whose alpha differs.
        rows: environments, int64 ``[M]``, possibly repeated.
        alpha: of every slot of these rows, ``[M, S]``.
    """

    start: int
    rows: Tensor
    alpha: Tensor


class Backend(Protocol):
    """The arithmetic of N hosts. No result of one environment depends on another's numbers.

    Attributes:
        name: of the backend, as the settings spell it.
        threaded: whether a call uses all threads by itself; otherwise the caller deals environments
            over threads.
    """

    name: str
    threaded: bool

    def train_epoch(
        self,
        stack: Stack,
        seeds: Seeds,
        minibatches: Minibatches,
        optimisation: Optimisation,
    ) -> EpochResult:
        """Train every host and every computed seed, in place.

        Args:
            stack: parameters and optimizer state.
            seeds: of all N rows.
            minibatches: at least one.
            optimisation: rates and clipping.
        """
        ...

    def evaluate(
        self,
        stack: Stack,
        seeds: Seeds,
        held_back: HeldBack,
        variants: list[Variant],
        rows: Tensor | None = None,
    ) -> tuple[Scores, list[Scores]]:
        """Score hosts, and variants of them.

        Args:
            stack: parameters.
            seeds: those that act in each of the R rows.
            held_back: what to score on.
            variants: their rows and those of ``seeds`` index ``rows``.
            rows: environments to score, int64 ``[R]``; all when None.
        """
        ...
