"""The policies ``widen`` and ``deepen``: larger layers, or more blocks, while a module trains.

How much a layer is widened comes from a prior, ``width_prior``; a stack of up to ``MOST_BLOCKS``
blocks becomes twice as deep. Whether the larger network stays comes from a counterfactual: some
epochs are trained from the same state with and without, on the same minibatches with the same
random numbers, and both are validated. Of layers the prior counts as much as the trial: early gains
understate late ones. Blocks may cost half of what the trial gains. What is refused is taken back,
to the bit.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import nn

from esper.kasmina.channel_groups import ChannelGroup, below, channel_groups
from esper.kasmina.deeper_stacks import Deepening, Repeat, deepen, repeats
from esper.kasmina.nested import tensors
from esper.kasmina.wider_layers import Widening, parameter_count, resize, widen
from esper.kasmina.width_prior import expected_gain, planned_counts, wider_size
from esper.leyline.errors import UsageError, first_line, suggestion
from esper.own_models.figure_intervals import interval, sample_values
from esper.own_models.grafted_model import copied_state
from esper.own_models.growth_result import price_of
from esper.own_models.new_units import BATCHES, Proposal, propose
from esper.own_models.objectives import Evaluator, Validation, autocast
from esper.own_models.options import GrowOptions
from esper.own_models.samples import (
    as_arguments,
    buffers_kept,
    call,
    evaluating,
    first_samples,
    half_or_all,
    random_state,
    random_state_kept,
    sample_count,
    set_random_state,
    to_device,
)
from esper.own_models.training_loop import Training

MOST_BLOCKS = 6
"""Blocks up to which a stack becomes twice as deep."""
BEGIN = 0.1
"""Share of the epochs after which layers are widened; a late widening gains less."""
TRIAL, BLOCK_TRIAL, LONGER = 0.2, 0.05, 12
"""Share of the epochs that try layers or blocks, at least two of ``LONGER``: the first disturbs."""
AHEAD = 10_000_000
"""Parameters up to which what a trial learned is kept; a larger network learns it again."""
SAMPLES = 4
"""Samples of the recorded forward pass, whose activations stay in memory."""
EXACT = 1e-5
"""Largest difference of outputs, relative to their size, that a widening may make."""


Structure = TypeVar("Structure")


class WidthSearch:
    """Widens or deepens a module while ``Training`` trains it.

    Args:
        model: the module.
        options: see ``grow``; its ``slots`` are the modules whose layers may become wider.
        seed: determines the candidates.
        deepens: whether blocks are copied, instead of layers made wider.

    Attributes:
        lines: what was decided in the last epoch.
        copies: stack and place of each block behind which a copy stays, in order.

    Raises:
        UsageError: a slot is no module of ``model``.
    """

    def __init__(self, model: nn.Module, options: GrowOptions, seed: int, deepens: bool = False):
        self.model, self.options, self.seed, self.epochs = model, options, seed, options.epochs
        self.lines, self.copies, self.deepens = list[str](), list[tuple[str, int]](), deepens
        self.number, self.ahead = 0, list[tuple["_Snapshot", float]]()
        # A trial takes at most half of the time of training.
        share, least = BLOCK_TRIAL if deepens else TRIAL, 2 if self.epochs >= LONGER else 1
        self.trial = max(least, round(share * self.epochs))
        names = [name for name, _ in model.named_modules() if name]
        for slot in options.slots or ():
            if slot not in names:
                hint = suggestion(slot, names, "`print(model)` shows the names")
                raise UsageError(f"slots: {type(model).__name__} has no module {slot!r}; {hint}")

    def state_dict(self) -> dict[str, Any]:
        """Where the search stands; the sizes of the layers are those of the module's state."""
        return {"number": self.number, "copies": self.copies}

    def load_state_dict(
        self, content: dict[str, Any], state: dict[str, Any], training: Training
    ) -> None:
        """The inverse of ``state_dict``; gives the module the sizes that ``state`` has."""
        self.number, self.copies = content["number"], content["copies"]
        for container, index in self.copies:
            deepen(self.model, container, index, optimizer=training.optimizer)
        resize(self.model, state, training.optimizer)

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
        before, batches = _Snapshot(training, loaders), _batches(training)
        plan: Any = self._repeats(batches) if self.deepens else self._counts(batches)
        if not plan:
            return training.epoch()
        size, earlier, loss = parameter_count(self.model), validate(), training.epoch()
        ending = _Snapshot(training, loaders)
        for _ in range(1, self.trial):
            training.epoch()
        without, values = validate(), sample_values(validate)
        before.restore()
        grow: Callable[..., Sequence[Widening | Deepening]]
        grow = self._deepen if self.deepens else self._widen
        changes = grow(plan, batches, training)
        if not changes:
            ending.restore()
            return loss
        endings: list[tuple[_Snapshot, float]] = []
        for _ in range(self.trial):
            wide_loss = training.epoch()
            if not endings or parameter_count(self.model) <= AHEAD:  # else learned again
                endings.append((_Snapshot(training, loaders), wide_loss))
        wide, bounds = validate(), interval(sample_values(validate), values)
        best, prior = wide.net - without.net, None
        if not self.deepens:
            cost = price_of(self.options.price, size, parameter_count(self.model))
            prior = expected_gain(plan) - cost
            best += prior - cost
        else:
            if bounds is not None and without.unit != "metric":
                best = bounds[1]
            elif bounds is not None and bounds[0] <= 0.0 <= bounds[1]:
                best = 0.0
            # A deeper network that learns half as fast for an epoch has often won by the end.
            best += max((without.net - earlier.net) / 2.0, 0.0)
        stays = best >= 0.0 and isfinite(wide.loss)
        self.lines.append(_report(without, wide, bounds, stays, self.trial, prior))
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

    def _say_nothing(self, reasons: Mapping[str, str], otherwise: str) -> None:
        """Say that nothing grows and why, by the name of a layer or stack if there are reasons."""
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        verb = "deepened" if self.deepens else "widened"
        self.lines.append(f"nothing is {verb} ({text or otherwise})")

    def _repeats(self, batches: list[tuple[Any, Any]]) -> list[Repeat]:
        """The blocks that are copied: all of a stack that has at most ``MOST_BLOCKS``."""
        copyable, reasons = self._structure(batches, repeats)
        depths = Counter(repeat.container for repeat in copyable)
        reasons |= {
            name: f"it has {depth} blocks" for name, depth in depths.items() if depth > MOST_BLOCKS
        }
        plan = [each for each in copyable if depths[each.container] <= MOST_BLOCKS]
        total, most = parameter_count(self.model), self.options.max_parameters
        for repeat in list(plan):
            size = parameter_count(self.model.get_submodule(f"{repeat.container}.{repeat.index}"))
            if most is not None and total + size > most:
                plan.remove(repeat)
            else:
                total += size
        if not plan:
            self._say_nothing(reasons, "no block is repeated")
        return plan

    def _deepen(
        self, plan: list[Repeat], batches: list[tuple[Any, Any]], training: Training
    ) -> list[Deepening]:
        """Insert a copy behind each block of the plan; none if that would change the outputs."""
        inputs = batches[0][0]
        with evaluating(self.model):
            before = call(self.model, inputs)
            changes = []
            # From the end, so that the places before stay what they are.
            for each in sorted(plan, key=lambda repeat: -repeat.index):
                place = each.container, each.index
                changes.append(deepen(self.model, *place, each.zeros, training.optimizer))
                self.copies.append(place)
            after = call(self.model, inputs)
        if not _equal(before, after):
            for change in reversed(changes):
                change.undo()
            self.copies = []
            self._say_nothing({}, "its output would change")
            return []
        for name, count in Counter(each.container for each in plan).items():
            depth = len(self.model.get_submodule(name))  # type: ignore[arg-type]
            self.lines.append(
                f"{name}: {depth - count} -> {depth} blocks, the new ones add nothing yet"
            )
        return changes

    def _structure(
        self,
        batches: list[tuple[Any, Any]],
        search: Callable[..., Structure],
    ) -> Structure:
        """What a search finds in the module by its forward pass on a few samples."""
        inputs = batches[0][0]
        args, kwargs = as_arguments(first_samples(inputs, SAMPLES, sample_count(inputs)))
        with evaluating(self.model), buffers_kept(self.model):
            run = half_or_all(self.model, args, kwargs)
            return search(self.model, lambda: run(False))

    def _widen(
        self, counts: dict[ChannelGroup, int], batches: list[tuple[Any, Any]], training: Training
    ) -> list[Widening]:
        """Widen group by group, as later ones read the new channels; drop what is refused."""

        def backward(model: nn.Module, batch: Any) -> None:
            inputs, target = batch
            with autocast(training.device, training.amp_dtype):
                loss = training.objective.loss(call(model, inputs), target)
            loss.backward()

        changes = list[Widening]()
        generator = torch.Generator().manual_seed(self.seed * 1009 + self.number - 1)
        for group, count in list(counts.items()):
            proposal = propose(self.model, group, count, batches, backward, generator)
            if reason := self._problem(proposal, batches[0][0]):
                self.lines.append(f"{group.name} is not widened ({reason})")
                del counts[group]
                continue
            changes.append(widen(self.model, group, proposal.new, training.optimizer))
            wide = group.channels + proposal.new.count
            self.lines.append(
                f"{group.name}: {group.channels} -> {wide} channels, which "
                f"explain {100 * proposal.share:.0f} % of the gradient that the others leave"
            )
        return changes

    def _counts(self, batches: list[tuple[Any, Any]]) -> dict[ChannelGroup, int]:
        """How many channels each group gets by the prior, within the limit of parameters."""
        groups, reasons = self._structure(batches, channel_groups)
        slots, price, most = self.options.slots, self.options.price, self.options.max_parameters
        if slots is not None:
            groups = [
                each for each in groups if any(below(n, s) for n in each.writers for s in slots)
            ]
        counts = planned_counts(self.model, groups, price)
        while most is not None and counts and wider_size(self.model, counts) > most:
            counts = {group: count // 2 for group, count in counts.items() if count > 1}
        if not counts:
            self._say_nothing(reasons, "the layers are wide enough")
        return counts

    def _problem(self, proposal: Proposal, inputs: Any) -> str:
        """Why a widening would change what the module computes; empty if it does not."""
        trial = copy.deepcopy(self.model)
        try:
            with evaluating(trial):
                before = call(trial, inputs)
                widen(trial, proposal.group, proposal.new)
                after = call(trial, inputs)
        except Exception as error:
            return f"its forward pass fails then: {first_line(error)}"
        return "" if _equal(before, after) else "its output would change"


class _Snapshot:
    """Weights, states of the optimizer and its kin, and random numbers, to which one can return."""

    def __init__(self, training: Training, loaders: tuple[object, ...]):
        self.training, self.loaders = training, loaders
        self.model = copied_state(training.model)
        self.training_state = copy.deepcopy(training.state_dict())
        self.random = random_state(loaders)

    def restore(self) -> None:
        """Return; the module has the sizes that it had."""
        self.training.model.load_state_dict(self.model)
        self.training.load_state_dict(self.training_state)
        set_random_state(self.random, self.loaders)


def _batches(training: Training) -> list[tuple[Any, Any]]:
    """The first minibatches of the coming epoch."""
    with random_state_kept(training.loader):
        batches = [training.unpack(batch) for batch in islice(training.loader, BATCHES)]
    return [to_device(batch, training.device) for batch in batches]


def _equal(before: object, after: object) -> bool:
    return all(
        torch.allclose(x.float(), y.float(), rtol=EXACT, atol=EXACT * float(x.abs().max()))
        for x, y in zip(tensors(before), tensors(after), strict=True)
    )


def _report(
    without: Validation,
    wide: Validation,
    bounds: tuple[float, float] | None,
    stays: bool,
    epochs: int,
    prior: float | None,
) -> str:
    """Why the larger network stays or not."""
    percent = without.unit == "accuracy"
    scale, unit, digits = (100.0, "points", 1) if percent else (1.0, without.unit, 3)
    ends = [f"{scale * bound:+.{digits}f}" for bound in bounds or ()]
    text = f" [{', '.join(ends)}]" if ends else ""
    difference = f"{scale * (wide.figure - without.figure):+.{digits}f}{text} {unit}"
    answer = "stays" if stays else "is taken back"
    time = "an epoch" if epochs == 1 else f"{epochs} epochs"
    if prior is not None:
        time += f", and {scale * prior:+.{digits}f} expected after the price"
    return f"{difference} with and without them after {time}: the larger network {answer}"
