"""Gradient health of seeds, and the signals kept per seed from step to step."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from esper.kasmina.cached_tensors import cached_tensor
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.kasmina.slots import SlotSpec
from esper.tolaria.results import EpochResult

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
