"""Wider layers, or stacks with twice as many blocks, in a module that trains: where, and how many.

How much a layer is widened comes from a prior, ``width_prior``; a stack of up to ``MOST_BLOCKS``
blocks becomes twice as deep. What would change the outputs of the module is refused.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from esper.kasmina.channel_groups import ChannelGroup
from esper.kasmina.nested import below
from esper.kasmina.new_channels import NewChannels
from esper.kasmina.wider_groups import equal, wider_groups
from esper.kasmina.wider_layers import Widening, parameter_count, widen
from esper.kasmina.width_prior import planned_counts, wider_size
from esper.leyline.errors import UsageError, first_line, suggestion
from esper.own_models.growth_result import price_of
from esper.own_models.new_units import BATCHES, propose
from esper.own_models.objectives import autocast
from esper.own_models.options import GrowOptions
from esper.own_models.samples import (
    SAMPLES,
    as_arguments,
    buffers_kept,
    call,
    evaluating,
    first_samples,
    half_or_all,
    output_of,
    random_state_kept,
    separable_count,
    to_device,
)
from esper.own_models.training_loop import Training

if TYPE_CHECKING:
    from esper.kasmina.blending import Blend
    from esper.kasmina.deeper_stacks import Deepening, Repeat

MOST_BLOCKS = 6
"""Blocks up to which a stack becomes twice as deep."""

Structure = TypeVar("Structure")
Batches = list[tuple[Any, Any]]


class LayerGrowth:
    """Makes layers of a module wider, or copies its blocks, and says so.

    Args:
        model: the module.
        options: see ``grow``; its ``slots`` are the modules whose layers may become wider.
        seed: determines the candidates.
        deepens: whether blocks are copied, instead of layers made wider.
        averages: copies of the module with other weights, which become larger alike.
        factor: how many times as wide each layer becomes; None for what the prior says.
        agree: gives the value of the first of several processes that train the module.

    Attributes:
        lines: what was done.
        optimizers: those that train the module besides that of its training.
        copies: stack and place of each block behind which a copy stays, in order.
        number: of the epochs that have begun; the candidates depend on it.
        blend: makes random channels of copies; None where there are none.

    Raises:
        UsageError: a slot is no module of ``model``.
    """

    def __init__(
        self, model: nn.Module, options: GrowOptions, seed: int, deepens: bool = False,
        averages: Sequence[nn.Module] = (), factor: float | None = None,
        agree: Callable[[Any], Any] = lambda value: value,
    ):  # fmt: skip
        self.agree, self.optimizers = agree, list[Optimizer]()
        self.blend: Blend | None = None
        self.model, self.options, self.seed, self.number = model, options, seed, 0
        self.deepens, self.averages, self.factor = deepens, averages, factor
        self.lines, self.copies = list[str](), list[tuple[str, int]]()
        # A plan is how many channels each group gets, or which blocks are copied.
        self.plan: Callable[[Batches], Any] = self._repeats if deepens else self._counts
        self.apply: Callable[[Any, Batches, Training], Sequence[Widening | Deepening | Blend]]
        self.apply = self._deepen if deepens else self._widen
        names = [name for name, _ in model.named_modules() if name]
        for slot in options.slots or ():
            if slot not in names:
                hint = suggestion(slot, names, "`print(model)` shows the names")
                raise UsageError(f"slots: {type(model).__name__} has no module {slot!r}; {hint}")

    def _say_nothing(self, reasons: Mapping[str, str], otherwise: str) -> None:
        """Say that nothing grows and why, by the name of a layer or stack if there are reasons."""
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        verb = "deepened" if self.deepens else "widened"
        self.lines.append(f"nothing is {verb} ({text or otherwise})")

    def _repeats(self, batches: Batches) -> list["Repeat"]:
        """The blocks that are copied: all of a stack that has at most ``MOST_BLOCKS``."""
        from esper.kasmina.deeper_stacks import repeats  # who widens does not need it

        copyable, reasons = self._structure(batches, repeats)
        depths = Counter(repeat.container for repeat in copyable)
        deep = {name: f"it has {n} blocks" for name, n in depths.items() if n > MOST_BLOCKS}
        reasons |= deep
        plan = [each for each in copyable if each.container not in deep]
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
        self, plan: list["Repeat"], batches: Batches, training: Training
    ) -> list["Deepening"]:
        """Insert a copy behind each block of the plan; none if that would change the outputs."""
        from esper.kasmina.deeper_stacks import deepen  # who widens does not need it

        before = output_of(self.model, batches[0][0])
        changes, optimizers = [], (training.optimizer, *self.optimizers)
        # From the end, so that the places before stay what they are.
        for each in sorted(plan, key=lambda repeat: -repeat.index):
            place = each.container, each.index
            changes.append(deepen(self.model, *place, each.zeros, *optimizers))
            changes += [deepen(x, *place, each.zeros) for x in self.averages]
            self.copies.append(place)
        try:
            is_same = equal(before, output_of(self.model, batches[0][0]))
            reason = "" if is_same else "its output would change"
        except Exception as error:  # the forward pass is the user's
            reason = f"its forward pass fails then: {first_line(error)}"
        if reason := self.agree(reason):
            for change in reversed(changes):
                change.undo()
            self.copies = []
            self._say_nothing({}, reason)
            return []
        for name, count in Counter(each.container for each in plan).items():
            depth = len(self.model.get_submodule(name))  # type: ignore[arg-type]
            self.lines.append(f"{name}: {depth - count} -> {depth} blocks; copies add nothing yet")
        return changes

    def _structure(self, batches: Batches, search: Callable[..., Structure]) -> Structure:
        """What a search finds in the module by its forward pass on a few samples."""
        inputs = batches[0][0]
        count = separable_count(self.model, inputs)
        args, kwargs = as_arguments(first_samples(inputs, SAMPLES, count))
        with evaluating(self.model), buffers_kept(self.model):
            run = half_or_all(self.model, args, kwargs)
            return search(self.model, lambda: run(False))

    def _widen(
        self, counts: dict[ChannelGroup, int], batches: Batches, training: Training
    ) -> list["Widening | Blend"]:
        """Widen group by group, as later ones read the new channels; drop what is refused.

        Copies become random channels while training goes on, see ``blend``.
        """

        def backward(model: nn.Module, batch: Any) -> None:
            inputs, target = batch
            with autocast(training.device, training.amp_dtype):
                loss = training.objective.loss(call(model, inputs), target)
            if loss.requires_grad:  # it does not where stochastic depth skips the layer
                loss.backward()

        changes: list[Widening | Blend] = []
        goal = copy.deepcopy(self.model) if any(each.is_balanced for each in counts) else None
        if goal is not None:
            from esper.kasmina import blending  # most have no such norm
            from esper.kasmina import copied_channels as copies
        # One of its own, so that several processes draw alike what copies become.
        seed = self.seed * 1009 + self.number - 1
        generator, draws = (torch.Generator().manual_seed(x) for x in (seed, ~seed))
        for group, count in list(counts.items()):
            try:
                new, share = propose(self.model, group, count, batches, backward, generator)
                reason = self._problem(group, new, batches)
            except Exception as error:  # the forward pass is the user's
                new, share, reason = None, 0.0, f"its forward pass fails then: {first_line(error)}"
            new, share, reason = self.agree((new, share, reason))
            if reason:
                self.lines.append(f"{group.title} is not widened ({reason})")
                del counts[group]
                continue
            changes.append(widen(self.model, group, new, training.optimizer, *self.optimizers))
            for each in self.averages:
                like = copies.channel_copies(each, group, new.count) if group.is_balanced else new
                changes.append(widen(each, group, replace(new, entries=like.entries)))
            if goal is not None:
                like = copies.substitutes(goal, group, new, draws) if group.is_balanced else new
                widen(goal, group, like)
            kind = ", at first copies of these" if group.is_balanced else ""
            if share > (1e-4 if kind else 0.0):  # layers know copies of what they read as it is
                decimals = 0 if share >= 0.01 else 2
                text = f"{100 * share:.{decimals}f} % of the gradient that the others leave"
                kind += f", which explain {text}"
            self.lines.append(f"{group.title}: {group.change(new.count)}{kind}")
        if goal is not None and changes:
            self.blend = blending.Blend(self.model, blending.moves_to(self.model, goal))
            changes.append(self.blend)
        return changes

    def cost(self, growth: float) -> float:
        """What ``growth`` times the parameters cost, in the unit of a net score."""
        return price_of(self.options.price, growth)

    def _counts(self, batches: Batches) -> dict[ChannelGroup, int]:
        """How many channels each group gets by the prior, within the limit of parameters."""
        groups, reasons = self._structure(batches, wider_groups)
        slots, most = self.options.slots, self.options.max_parameters
        if slots is not None:
            groups = [g for g in groups if any(below(n, s) for n in g.writers for s in slots)]
        if self.factor is None:
            counts = planned_counts(self.model, groups, self.cost)
        else:
            counts = {group: group.new_count(self.factor - 1.0) for group in groups}
        counts = {group: count for group, count in counts.items() if count}
        while most is not None and counts and wider_size(self.model, counts) > most:
            halves = {group: group.half(count) for group, count in counts.items()}
            counts = {group: count for group, count in halves.items() if count}
        if not counts:
            enough = "the layers are wide enough" if groups else "no hidden layer of a known kind"
            self._say_nothing(reasons, enough)
        return counts

    def _problem(self, group: ChannelGroup, new: NewChannels, batches: Batches) -> str:
        """Why a widening would change what the module computes; empty if it does not."""
        trial = copy.deepcopy(self.model)
        before = output_of(trial, batches[0][0])
        widen(trial, group, new)
        return "" if equal(before, output_of(trial, batches[0][0])) else "its output would change"


def first_batches(training: Training) -> Batches:
    """The first minibatches of the coming epoch."""
    with random_state_kept(training.loader):
        batches = [training.unpack(batch) for batch in islice(training.loader, BATCHES)]
    return [to_device(batch, training.device) for batch in batches]
