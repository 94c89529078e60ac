"""What training and validation of N hosts measure."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from esper.kasmina.blueprints import LastLayer

SLOT_MEASURES = (
    "gradient",
    "gradient_ratio",
    "activation",
    "active_share",
    *(f"gain_{layer.name.lower()}" for layer in LastLayer),
)
"""Measurements of a slot without a seed, in order:

- ``gradient``: norm of the gradient of a prediction's loss with respect to the activation at the
  slot, as a root mean square over the predictions of the measured images.
- ``gradient_ratio``: gradient norm of the parameters of the block feeding the slot over their norm,
  the ratio of Auto-RGN (Lee et al., "Surgical fine-tuning improves adaptation to distribution
  shifts", ICLR 2023); also measured where the learning rate is 0.
- ``activation``: root mean square of the activation.
- ``active_share``: fraction of its elements that are above 0.
- ``gain_...``: see ``kasmina.newborns.gradient_norms``, of the mean loss of the measured images.

``slot_measures.measured_images`` of the minibatch are measured; ``gradient_ratio`` is that of all
its images.
"""


@dataclass(slots=True)
class EpochResult:
    """Measurements of an epoch of training.

    Attributes:
        loss: mean cross-entropy, nats, ``[N]``.
        accuracy: fraction of correct training predictions, ``[N]``.
        host_gradient_norm: gradient norm in the last minibatch before clipping, ``[N]``. With loss
            scaling, in the last minibatch without overflow; NaN where all overflowed.
        seed_gradient_norm: likewise ``[N, S]``, NaN where no seed was computed.
        seed_tensor_norms: norms per parameter tensor, ``S`` tensors ``[N, tensors]``, NaN likewise.
        slots: ``SLOT_MEASURES`` of the last minibatch in slots where no seed was computed, ``[N, S,
            len(SLOT_MEASURES)]``; NaN elsewhere. Not finite where that minibatch overflowed.
        unmeasured: where a gradient is unknown because every minibatch overflowed and the loss
            scale can still be reduced, bool ``[N]``; it does not count as divergence. None without
            scaling.
    """

    loss: Tensor
    accuracy: Tensor
    host_gradient_norm: Tensor
    seed_gradient_norm: Tensor
    seed_tensor_norms: list[Tensor]
    slots: Tensor
    unmeasured: Tensor | None = None

    def map(self, function: Callable[..., Tensor], *more: "EpochResult") -> "EpochResult":
        """Apply ``function`` to each measurement together with the same measurements of ``more``.

        The result has no ``unmeasured``.
        """
        parts = [
            (
                r.loss,
                r.accuracy,
                r.host_gradient_norm,
                r.seed_gradient_norm,
                r.slots,
                *r.seed_tensor_norms,
            )
            for r in (self, *more)
        ]
        results = (function(*x) for x in zip(*parts, strict=True))
        loss, accuracy, host, seed, slots, *tensors = results
        return EpochResult(loss, accuracy, host, seed, tensors, slots)

    def forget(self, rows: Tensor) -> None:
        """Set measurements of ``rows``, bool ``[N]``, to NaN because they are no longer valid."""
        nan = float("nan")
        self.loss, self.accuracy, self.host_gradient_norm = (
            part.masked_fill(rows, nan)
            for part in (self.loss, self.accuracy, self.host_gradient_norm)
        )
        self.seed_gradient_norm = self.seed_gradient_norm.masked_fill(rows[:, None], nan)
        self.seed_tensor_norms = [
            norms.masked_fill(rows[:, None], nan) for norms in self.seed_tensor_norms
        ]
        self.slots = self.slots.masked_fill(rows[:, None, None], nan)


@dataclass(frozen=True, slots=True)
class Scores:
    """Validation scores of each row, ``[R]``.

    Attributes:
        loss: mean cross-entropy, nats.
        accuracy: fraction of images whose most probable class is the true one.
        expected: expected accuracy, the mean probability of the true class.
    """

    loss: Tensor
    accuracy: Tensor
    expected: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Scores":
        """The scores with ``function`` applied to each tensor."""
        return Scores(function(self.loss), function(self.accuracy), function(self.expected))

    def put(self, rows: Tensor, scores: "Scores") -> None:
        """Overwrite ``rows``, int64 ``[M]``, in place with ``scores``, ``[M]``."""
        self.loss[rows] = scores.loss
        self.accuracy[rows] = scores.accuracy
        self.expected[rows] = scores.expected


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of a validation.

    Attributes:
        scores: scores of the hosts with all their acting seeds, ``[N]``.
        committed: scores with fossilised seeds only, ``[N]``; None when not requested.
        contribution: expected accuracy with the seed minus without it, ``[N, S]``, in [-1, 1],
            NaN where no seed acts.
    """

    scores: Scores
    committed: Scores | None
    contribution: Tensor
