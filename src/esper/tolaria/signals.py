"""What an epoch shows about seeds and about slots without a seed."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from esper.kasmina.cached_tensors import cached_tensor
from esper.kasmina.hosts.host import Host
from esper.kasmina.newborns import gradient_norms, per_environment
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.kasmina.slots import SlotSpec
from esper.tolaria.backends import EpochResult


def measured_images(images: int) -> int:
    """Number of images of a minibatch, its first, from which the slots are measured.

    Half of them halve what measuring costs; they are as random as the minibatch.
    """
    return (images + 1) // 2


@dataclass(frozen=True, slots=True)
class Watch:
    """The activations at the slots in one forward pass.

    Attributes:
        inputs: activation before each slot, ``[B, H, W, N, C]``, by slot index.
        outputs: activation after it, part of the autograd graph.
    """

    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def note(self, slot: int, x: Tensor, y: Tensor) -> Tensor:
        """Keep the activation before and after a slot; returns ``y``."""
        self.inputs[slot] = x.detach()
        # A slot before the first parameter has no gradient to follow yet.
        self.outputs[slot] = y if y.requires_grad else y.detach().requires_grad_()
        return self.outputs[slot]


# Native twin: hosts/worker.h, measure_slot.
@torch.no_grad()
def slot_measures(
    host: Host,
    watch: Watch,
    gradients: dict[int, Tensor],
    parameters: Tensor,
    parameter_gradients: Tensor,
    predictions: int,
    seeds: Tensor,
) -> Tensor:
    """The ``SLOT_MEASURES`` of each slot in which no seed was computed.

    Args:
        host: the hosts.
        watch: the activations of the forward pass over B images.
        gradients: gradient of the loss with respect to each of ``watch.outputs``, by slot index.
        parameters: parameters of the hosts in that pass, ``[N, P]``.
        parameter_gradients: their gradient, ``[N, P]``.
        predictions: predictions per host in the minibatch; the loss is their mean.
        seeds: slots in which a seed was computed, bool ``[N, S]``.

    Returns:
        ``[N, S, len(SLOT_MEASURES)]``, NaN where a seed was computed, and for layers that
        no blueprint of the slot has.
    """
    rows = []
    for s, slot in enumerate(host.slots):
        images = len(watch.inputs[s])
        count = measured_images(images)
        # The loss of the measured images alone has this times their gradient.
        factor = images / count
        x = watch.inputs[s][:count].to(parameters)
        gradient = gradients[s][:count].to(parameters)
        columns, elements = host.feeding_columns[s], x[:, :, :, 0].numel()
        statistics = [
            per_environment(gradient.square()).sqrt() * (factor * predictions) ** 0.5,
            _norm(parameter_gradients, columns) / _norm(parameters, columns),
            (per_environment(x.square()) / elements).sqrt(),
            per_environment((x > 0).to(x.dtype)) / elements,
        ]
        decreases = factor * gradient_norms(slot, x, gradient)
        rows.append(torch.cat([torch.stack(statistics, 1), decreases], 1))
    return torch.stack(rows, 1).masked_fill(seeds[..., None], float("nan"))


def _norm(rows: Tensor, columns: tuple[slice, ...]) -> Tensor:
    """Norm of each row over the given columns, ``[N]``."""
    if not columns:
        return rows.new_full((len(rows),), float("nan"))
    squares = [rows[:, part].square().sum(1) for part in columns]
    return torch.stack(squares).sum(0).sqrt()


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
