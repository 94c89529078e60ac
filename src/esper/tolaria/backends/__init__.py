"""Backends do the arithmetic of N hosts: an epoch of training, a pass of validation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from esper.kasmina.stack import Stack
from esper.tolaria.plan import Plan


@dataclass(frozen=True, slots=True)
class Optimisation:
    """How hosts and seeds are updated.

    Attributes:
        host_learning_rate: ``[N]``.
        seed_learning_rate: ``[N, S]``.
        weight_decay: of the hosts; seeds have none.
        max_gradient_norm: of each host, and of each seed, by itself.
    """

    host_learning_rate: Tensor
    seed_learning_rate: Tensor
    weight_decay: float
    max_gradient_norm: float


@dataclass(slots=True)
class EpochResult:
    """What an epoch of training measured.

    Attributes:
        loss: mean cross-entropy, nats, ``[N]``.
        accuracy: fraction of correct training predictions, ``[N]``.
        host_gradient_norm: of the last minibatch before clipping, ``[N]``.
        seed_gradient_norm: likewise ``[N, S]``, NaN where no seed was computed.
        seed_tensor_norms: by parameter tensor, ``S`` tensors ``[N, tensors]``, NaN likewise.
    """

    loss: Tensor
    accuracy: Tensor
    host_gradient_norm: Tensor
    seed_gradient_norm: Tensor
    seed_tensor_norms: list[Tensor]

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
        rows: environments, int64 ``[R]``, possibly repeated.
        blueprint, style, alpha: of every slot of these rows, ``[R, S]``.
    """

    start: int
    rows: Tensor
    blueprint: Tensor
    style: Tensor
    alpha: Tensor


class Backend(Protocol):
    """The arithmetic of N hosts. No result of one environment depends on another's numbers."""

    def train_epoch(
        self,
        stack: Stack,
        plan: Plan,
        frozen: Tensor,
        batches: Iterable[tuple[Tensor, Tensor]],
        optimisation: Optimisation,
    ) -> EpochResult:
        """Train every host and every seed of the plan, in place.

        Args:
            stack: parameters and optimizer state.
            plan: the seeds to compute.
            frozen: bool ``[N, S]``, seeds that are computed but not updated.
            batches: images ``[B, H, W, N, C]`` and labels ``[N, B]``, at least one pair.
            optimisation: rates and clipping.
        """
        ...

    def evaluate(
        self,
        stack: Stack,
        plan: Plan,
        images: Tensor,
        labels: Tensor,
        variants: list[Variant],
        rows: Tensor | None = None,
    ) -> tuple[Scores, list[Scores]]:
        """Score hosts, and variants of them.

        Args:
            stack: parameters.
            plan: the seeds that act in each row.
            images: ``[V, H, W, R, C]``, or ``[V, H, W, 1, C]`` when all rows share them.
            labels: ``[R, V]`` or ``[1, V]`` likewise.
            variants: their rows and the plan's index ``rows``.
            rows: environments to score, int64 ``[R]``; all when None.
        """
        ...
