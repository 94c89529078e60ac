"""What was known of a widening when it was tried, in a training by ``esper.grow``.

Nothing that the training computes changes. Two further predictions are taken of the wider layers:
by how much a step of gradient descent would lower the loss at birth, to first order (GradMax, Evci
and others, 2022; Firefly, Wu and others, 2020), and what the network loses at the end of the trial
without its new channels, which is ablation.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from esper.kasmina.channel_groups import ChannelGroup
from esper.kasmina.layer_kinds import reads_itself
from esper.own_models import width_search
from esper.own_models.figure_intervals import interval
from esper.own_models.objectives import Evaluator
from esper.own_models.samples import call
from esper.own_models.training_loop import Training
from esper.own_models.width_search import WidthSearch
from esper_lab.capacity.hosts import Host
from esper_lab.capacity.training import grown

Counts = Mapping[ChannelGroup, int]


def columns_of(model: nn.Module, counts: Counts) -> dict[str, int]:
    """By the name of each weight that reads new channels, how many last columns do."""
    columns: dict[str, int] = {}
    for group, count in counts.items():
        columns |= {f"{name}.weight": block * count for name, block in group.readers.items()}
        for name in group.writers:
            layer = model.get_submodule(name)
            for key, _ in layer.named_parameters(recurse=False):
                if reads_itself(layer, key):
                    columns[f"{name}.{key}"] = count
    return columns


def relative_decrease(
    model: nn.Module, counts: Counts, batches: list[tuple[Any, Any]], training: Training
) -> float:
    """Squared norm of the gradient of the new channels' outgoing weights, as a part of the loss."""
    trial = deepcopy(model).eval()
    losses = [training.objective.loss(call(trial, x), target) for x, target in batches]
    loss = torch.stack(losses).mean()
    loss.backward()
    names = {f"{name}.weight" for group in counts for name in group.readers}
    total = 0.0
    for name, count in columns_of(trial, counts).items():
        gradient = trial.get_parameter(name).grad
        if name in names and gradient is not None:
            total += float(gradient[:, -count:].square().sum())
    return total / float(loss.detach())


@torch.no_grad()
def ablation(model: nn.Module, counts: Counts, validate: Evaluator) -> float:
    """By how much the figure on validation is better with the new channels than without them."""
    with_channels = validate().figure
    before: dict[str, Tensor] = {}
    for name, count in columns_of(model, counts).items():
        weight = model.get_parameter(name)
        before[name] = weight.clone()
        weight[:, -count:] = 0.0
    without = validate().figure
    for name, values in before.items():
        model.get_parameter(name).copy_(values)
    return with_channels - without


class Watch:
    """Takes the predictions while it is entered.

    Attributes:
        predictions: ``first_order`` and ``ablation``, once layers were tried.
    """

    def __init__(self) -> None:
        self.predictions: dict[str, float] = {}
        self.patches = [
            patch.object(WidthSearch, "epoch", self._epoch(WidthSearch.epoch)),
            patch.object(WidthSearch, "_widen", self._widen(WidthSearch._widen)),
            patch.object(width_search, "interval", self._interval(interval)),
        ]

    def __enter__(self) -> "Watch":
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.patches:
            each.stop()

    def _epoch(self, original: Any) -> Any:
        def epoch(
            search: WidthSearch, training: Training, validate: Evaluator, loaders: Iterable[object]
        ) -> float:
            self.validate = validate
            return float(original(search, training, validate, loaders))

        return epoch

    def _widen(self, original: Any) -> Any:
        def widen(search: WidthSearch, counts: Counts, batches: Any, training: Training) -> Any:
            changes = original(search, counts, batches, training)
            if changes:
                self.model, self.counts = search.model, counts
                decrease = relative_decrease(search.model, counts, batches, training)
                self.predictions["first_order"] = decrease
            return changes

        return widen

    def _interval(self, original: Any) -> Any:
        def watched(*values: Any) -> Any:
            self.predictions["ablation"] = ablation(self.model, self.counts, self.validate)
            return original(*values)

        return watched


def watched_growth(policy: str, host: Host) -> dict[str, Any]:
    """A training: what it came to and cost, and the ``Watch.predictions``."""
    with Watch() as watch:
        entry = grown(policy, host)
    return {**watch.predictions, **entry}
