"""What an epoch measures, and what that says about the health of seeds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from esper.kasmina.blueprints import LastLayer
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.kasmina.slots import SlotSpec
from esper.kasmina.transfer import cached_tensor

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
        results = (self, *more)
        parts = {
            name: function(*(getattr(result, name) for result in results)) for name in _MEASUREMENTS
        }
        tensors = zip(*(result.seed_tensor_norms for result in results), strict=True)
        return EpochResult(**parts, seed_tensor_norms=[function(*norms) for norms in tensors])

    def forget(self, rows: Tensor) -> None:
        """Set measurements of ``rows``, bool ``[N]``, to NaN because they are no longer valid."""
        valid = self.map(lambda x: x.masked_fill(rows.view(-1, *[1] * (x.ndim - 1)), float("nan")))
        self.seed_tensor_norms = valid.seed_tensor_norms
        for name in _MEASUREMENTS:
            setattr(self, name, getattr(valid, name))


_MEASUREMENTS = "loss", "accuracy", "host_gradient_norm", "seed_gradient_norm", "slots"
"""Tensors of an ``EpochResult`` that are always there."""


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


VANISHING_NORM = 1e-7
EXPLODING_NORM = 10.0
VELOCITY_KEPT = 0.7
RATIO_KEPT = 0.9
VANISHING_WEIGHT = 0.5
EXPLODING_WEIGHT = 0.8
RATIO_FLOOR = 1e-8
"""Added to the root-mean-square gradient of the host, the denominator of the ratio."""


def gradient_health(tensor_norms: Tensor, tensor_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Health ``1 - 0.5 f_v - 0.8 f_e`` in [0, 1], and whether any gradient explodes.

    f_v is the fraction of parameter tensors with a gradient norm below 1e-7, f_e the fraction with
    a norm above 10 or not finite. Health is 0 when any norm is not finite.

    Args:
        tensor_norms: ``[..., tensors]``; only the first ``tensor_counts`` of each row are used.
        tensor_counts: int64 ``[...]``.

    Returns:
        health ``[...]``, exploding bool ``[...]``.
    """
    indices = torch.arange(tensor_norms.shape[-1], device=tensor_norms.device)
    counts = indices < tensor_counts[..., None]
    infinite = counts & ~tensor_norms.isfinite()
    vanishing = (counts & (tensor_norms < VANISHING_NORM)).sum(-1) / tensor_counts
    exploding = (infinite | (counts & (tensor_norms > EXPLODING_NORM))).sum(-1) / tensor_counts
    health = (1.0 - VANISHING_WEIGHT * vanishing - EXPLODING_WEIGHT * exploding).clamp(min=0.0)
    return health.masked_fill(infinite.any(-1), 0.0), exploding > 0


def updated_signals(
    previous: SeedSignals,
    state: SeedState,
    slots: tuple[SlotSpec, ...],
    epoch: EpochResult,
    contribution: Tensor,
    accuracy: Tensor,
    seed_parameters: Tensor,
    host_parameters: int,
) -> SeedSignals:
    """The signals after an epoch; NaN where nothing was measured.

    Args:
        previous: signals of the previous step.
        state: the seeds during the epoch.
        slots: the host's slots.
        epoch: training results.
        contribution: ``[N, S]``, NaN where not measured.
        accuracy: validation accuracy, ``[N]``.
        seed_parameters: parameter counts of the seeds alive before or after the step, ``[N, S]``.
        host_parameters: parameter count of the host without seeds.
    """
    health, exploding = gradient_health(
        _side_by_side(epoch.seed_tensor_norms), _tensor_counts(slots, state.blueprint)
    )
    # Measurements of an epoch that was rolled back are no longer valid.
    valid = state.computing & ~epoch.loss.isnan()[:, None]
    if epoch.unmeasured is not None:
        valid &= ~epoch.unmeasured[:, None]
    change = contribution - previous.contribution
    velocity = VELOCITY_KEPT * previous.contribution_velocity + (1.0 - VELOCITY_KEPT) * change
    return SeedSignals(
        contribution=contribution,
        contribution_velocity=velocity.nan_to_num(0.0, 0.0, 0.0),
        health=health.float().masked_fill(~valid, float("nan")),
        previous_health=previous.health,
        gradient_norm=epoch.seed_gradient_norm.float(),
        exploding=valid & exploding,
        gradient_ratio=_smoothed_ratio(previous, epoch, seed_parameters, host_parameters),
        baseline=previous.baseline,
        improvement=accuracy.float()[:, None] - previous.baseline,
        birth_accuracy=previous.birth_accuracy,
    )


def _side_by_side(norms: list[Tensor]) -> Tensor:
    """Norms ``[N, tensors]`` per slot as ``[N, S, tensors]``, zero-padded to the widest slot."""
    widest = max(part.shape[1] for part in norms)
    return torch.stack(
        [
            part if part.shape[1] == widest else pad(part, (0, widest - part.shape[1]))
            for part in norms
        ],
        1,
    )


def _tensor_counts(slots: tuple[SlotSpec, ...], blueprint: Tensor) -> Tensor:
    """Number of parameter tensors of each ``blueprint [N, S]``."""
    # Not cached per slot: equal slots of two hosts may accept different blueprints.
    table = cached_tensor(tuple(slot.tensor_counts for slot in slots), blueprint.device)
    return table[torch.arange(len(slots), device=blueprint.device), blueprint]


def _smoothed_ratio(
    previous: SeedSignals, epoch: EpochResult, seed_parameters: Tensor, host_parameters: int
) -> Tensor:
    """Root-mean-square gradient of a seed over that of its host, smoothed, ``[N, S]``."""
    # Computed in float64: on some processors MKL rounds the root of a float32 differently.
    root = seed_parameters.clamp(min=1).double().sqrt().to(epoch.seed_gradient_norm.dtype)
    seed = epoch.seed_gradient_norm / root
    host = epoch.host_gradient_norm[:, None] / host_parameters**0.5
    ratio = (seed / (host + RATIO_FLOOR)).float()
    average = RATIO_KEPT * previous.gradient_ratio + (1.0 - RATIO_KEPT) * ratio
    return torch.where(average.isfinite(), average, ratio)
