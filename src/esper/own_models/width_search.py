"""The policies ``widen`` and ``deepen``: larger layers, or more blocks, while a module trains.

Whether a larger network stays comes from a counterfactual: some epochs are trained from the same
state with and without, on the same minibatches with the same random numbers, and both are
validated. Early gains understate late ones: of layers the prior counts as much as the trial, of
blocks half of what the trial gains without them. What does not pay is taken back, to the bit.
"""

import copy
from collections.abc import Iterable
from math import isfinite
from typing import Any

from torch import nn

from esper.kasmina.wider_layers import parameter_count
from esper.kasmina.width_prior import expected_gain
from esper.own_models.attachment import copied_state
from esper.own_models.figure_intervals import interval, sample_values
from esper.own_models.growth_result import price_of
from esper.own_models.layer_growth import LayerGrowth, first_batches
from esper.own_models.objectives import Evaluator, Validation
from esper.own_models.options import GrowOptions
from esper.own_models.samples import random_state, set_random_state
from esper.own_models.training_loop import Training

BEGIN = 0.1
"""Share of the epochs after which layers are widened; a late widening gains less."""
TRIAL, BLOCK_TRIAL, LONGER = 0.2, 0.05, 12
"""Share of the epochs that try layers or blocks, at least two of ``LONGER``: the first disturbs."""
AHEAD = 10_000_000
"""Parameters up to which what a trial learned is kept; a larger network learns it again."""


class WidthSearch(LayerGrowth):
    """Widens or deepens a module while ``Training`` trains it; see ``LayerGrowth``.

    Attributes:
        lines: what was decided in the last epoch.
    """

    def __init__(self, model: nn.Module, options: GrowOptions, seed: int, deepens: bool = False):
        super().__init__(model, options, seed, deepens)
        self.epochs, self.ahead = options.epochs, list[tuple["_Snapshot", float]]()
        # A trial takes at most half of the time of training.
        share, least = BLOCK_TRIAL if deepens else TRIAL, 2 if self.epochs >= LONGER else 1
        self.trial = max(least, round(share * self.epochs))

    def cost(self, growth: float) -> float:
        """What larger layers cost, with the longer training; it includes the trial."""
        begin = round(BEGIN * self.epochs)
        epochs = begin + self.trial + growth * (self.epochs - begin)
        return super().cost(growth) + price_of(self.options.training_price, epochs / self.epochs)

    def state_dict(self) -> dict[str, Any]:
        """Where the search stands; the sizes of the layers are those of the module's state."""
        blend = self.blend.state_dict(self.model) if self.blend else {}
        return {"number": self.number, "copies": self.copies, "blend": blend}

    def load_state_dict(
        self, content: dict[str, Any], state: dict[str, Any], training: Training
    ) -> None:
        """The inverse of ``state_dict``; gives the module the sizes that ``state`` has."""
        self.number, self.copies = content["number"], content["copies"]
        from esper.kasmina.blending import Blend  # only who resumes needs these
        from esper.kasmina.deeper_stacks import deepen
        from esper.kasmina.resizing import resize

        for container, index in self.copies:
            deepen(self.model, container, index, (), training.optimizer)
        resize(self.model, state, training.optimizer)
        if content["blend"]:
            self.blend = Blend(self.model, content["blend"])

    def epoch(self, training: Training, validate: Evaluator, loaders: Iterable[object]) -> float:
        """Train one epoch, and decide where a decision is due.

        Returns:
            the mean loss over the samples.
        """
        self.lines, number = [], self.number
        self.number += 1
        if self.ahead:
            return self._go_ahead()
        if self.epochs < 2:
            self._say_nothing({}, "a single epoch leaves no time for a trial")
        if self.epochs < 2 or number != round(BEGIN * self.epochs):
            return training.epoch()
        loaders = tuple(loaders)
        before, batches = _Snapshot(training, loaders), first_batches(training)
        plan = self.plan(batches)
        if not plan:
            return training.epoch()
        size, earlier, loss = parameter_count(self.model), validate(), training.epoch()
        ending = _Snapshot(training, loaders)
        for _ in range(1, self.trial):
            training.epoch()
        without, values = validate(), sample_values(validate)
        before.restore()
        changes = self.apply(plan, batches, training)
        if not changes:
            ending.restore()
            return loss
        endings: list[tuple[_Snapshot, float]] = []
        for _ in range(self.trial):
            wide_loss = training.epoch()
            if not endings or parameter_count(self.model) <= AHEAD:  # else learned again
                endings.append((_Snapshot(training, loaders, self.blend), wide_loss))
        wide, bounds = validate(), interval(sample_values(validate), values)
        best = wide.net - without.net
        growth = parameter_count(self.model) / size
        tried = 1.0 + growth * self.trial / self.epochs  # is paid either way
        cost = self.cost(growth) - price_of(self.options.training_price, tried)
        if not self.deepens:
            prior, why = expected_gain(plan) - cost, "expected after the price"
        else:
            if bounds is not None and without.unit != "metric":
                best = bounds[1]
            elif bounds is not None and bounds[0] <= 0.0 <= bounds[1]:
                best = 0.0
            # A deeper network that learns half as fast for an epoch has often won by the end.
            prior, why = max((without.net - earlier.net) / 2.0, 0.0), "for a slow start"
        stays = best + prior >= cost and isfinite(wide.loss)
        self.lines.append(_report(without, wide, bounds, stays, self.trial, prior, why))
        if stays:
            self.ahead = endings
            return self._go_ahead()
        for change in changes[::-1]:
            change.undo()
        self.copies = []
        ending.restore()
        return loss

    def _go_ahead(self) -> float:
        """To the end of the next epoch that was learned in the trial; the loss of that epoch."""
        ending, loss = self.ahead.pop(0)
        ending.restore()
        return loss


class _Snapshot:
    """Weights, states of the optimizer and its kin, and random numbers, to which one can return."""

    def __init__(self, training: Training, loaders: tuple[object, ...], blend: Any = None):
        self.training, self.loaders, self.blend = training, loaders, blend
        self.moves = blend.state_dict(training.model) if blend else {}
        self.model = copied_state(training.model)
        self.training_state = copy.deepcopy(training.state_dict())
        self.random = random_state(loaders)

    def restore(self) -> None:
        """Return; the module has the sizes that it had."""
        self.training.model.load_state_dict(self.model)
        self.training.load_state_dict(self.training_state)
        set_random_state(self.random, self.loaders)
        if self.blend:
            self.blend.load_state_dict(self.moves, self.training.model)


def _report(
    without: Validation, wide: Validation, bounds: tuple[float, float] | None, stays: bool,
    epochs: int, prior: float, why: str,
) -> str:  # fmt: skip
    """Why the larger network stays or not: by the trial, and by ``prior``, which counts as well."""
    percent = without.unit == "accuracy"
    scale, unit, digits = (100.0, "points", 1) if percent else (1.0, without.unit, 3)
    ends = [f"{scale * bound:+.{digits}f}" for bound in bounds or ()]
    text = f" [{', '.join(ends)}]" if ends else ""
    difference = f"{scale * (wide.figure - without.figure):+.{digits}f}{text} {unit}"
    answer = "stays" if stays else "is taken back"
    time = "an epoch" if epochs == 1 else f"{epochs} epochs"
    time += f", and {scale * prior:+.{digits}f} {why}"
    return f"{difference} with and without them after {time}: the larger network {answer}"
