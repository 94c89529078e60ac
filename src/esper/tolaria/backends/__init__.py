"""Interface of the backends, which train and validate N hosts."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from esper.kasmina.stack import Stack
from esper.tolaria.loss_scales import LossScales
from esper.tolaria.minibatches import Minibatches
from esper.tolaria.plan import Seeds, Variant
from esper.tolaria.results import EpochResult, Scores

__all__ = ["Backend", "EpochResult", "HeldBack", "Optimisation", "Scores", "Variant"]


@dataclass(frozen=True, slots=True)
class Optimisation:
    """How hosts and seeds are updated.

    Attributes:
        host_learning_rate: ``[N]``.
        seed_learning_rate: ``[N, S]``.
        weight_decay: weight decay of the hosts; seeds have none.
        max_gradient_norm: clipping norm, applied to each host and each seed separately.
        momentum: momentum of SGD, which adds weight decay to the gradient; None means AdamW.
        tuning: how each host is tuned, index in ``runtime.tasks.TUNINGS``, int64 ``[N]``; None
            means that all parameters are trained at the same rate.
        scales: loss scales, updated after every minibatch; None means losses are not scaled.
    """

    host_learning_rate: Tensor
    seed_learning_rate: Tensor
    weight_decay: float
    max_gradient_norm: float
    momentum: float | None = None
    scales: LossScales | None = None
    tuning: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Held-back data sets for scoring.

    Attributes:
        images: images of D data sets, ``[D, V, H, W, C]``.
        labels: int64 ``[D, V, *label_shape]``.
        dataset: index of the data set that each row is scored on, int64 ``[R]``.
    """

    images: Tensor
    labels: Tensor
    dataset: Tensor

    def by_row(self) -> tuple[Tensor, Tensor]:
        """Images ``[V, H, W, R, C]`` and labels ``[R, V, *label_shape]``.

        With a single data set the axis R has length 1, and all rows share it.
        """
        if len(self.images) == 1:
            return self.images[0][:, :, :, None], self.labels
        return self.images[self.dataset].permute(1, 2, 3, 0, 4), self.labels[self.dataset]


class Backend(Protocol):
    """Trains and validates N hosts. Results of one environment never depend on another's values.

    Attributes:
        name: name of the backend in messages and in the fingerprint of a run.
        uses_all_threads: whether a call uses all threads itself; otherwise the caller distributes
            environments over threads.
    """

    name: str
    uses_all_threads: bool

    def train_epoch(
        self,
        stack: Stack,
        seeds: Seeds,
        minibatches: Minibatches,
        optimisation: Optimisation,
    ) -> EpochResult:
        """Train every host and every computed seed for one epoch, in place.

        Args:
            stack: parameters and optimizer state.
            seeds: seeds of all N rows.
            minibatches: at least one.
            optimisation: learning rates and clipping.
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
        """Score hosts and variants of them.

        Args:
            stack: parameters.
            seeds: acting seeds of each of the R rows.
            held_back: data to score on.
            variants: hosts to score again; their ``rows`` index the R rows.
            rows: environments to score, int64 ``[R]``; all when None.

        Returns:
            Scores of the hosts ``[R]``, and of each variant ``[M]``.
        """
        ...
