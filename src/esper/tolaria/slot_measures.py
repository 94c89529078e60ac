"""What an epoch shows about seeds and about slots without a seed."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from esper.kasmina.hosts.host import Host
from esper.kasmina.newborns import gradient_norms, per_environment


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
        sources: what a seed reads in a slot that spans a layer.
    """

    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    sources: dict[int, Tensor] = field(default_factory=dict)

    def note(self, slot: int, x: Tensor, y: Tensor, source: Tensor | None) -> Tensor:
        """Keep the activation before and after a slot; returns ``y``."""
        self.inputs[slot] = x.detach()
        if source is not None:
            self.sources[slot] = source.detach()
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
        source = watch.sources[s][:count].to(parameters) if slot.span else None
        decreases = factor * gradient_norms(slot, x, gradient, source)
        rows.append(torch.cat([torch.stack(statistics, 1), decreases], 1))
    return torch.stack(rows, 1).masked_fill(seeds[..., None], float("nan"))


def _norm(rows: Tensor, columns: tuple[slice, ...]) -> Tensor:
    """Norm of each row over the given columns, ``[N]``."""
    if not columns:
        return rows.new_full((len(rows),), float("nan"))
    squares = [rows[:, part].square().sum(1) for part in columns]
    return torch.stack(squares).sum(0).sqrt()
