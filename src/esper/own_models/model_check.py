"""``esper.check``: will a module and its data grow, and what will that cost?"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.slots import SlotSpec
from esper.kasmina.wider_groups import wider_groups
from esper.kasmina.wider_layers import parameter_count
from esper.kasmina.width_prior import planned_counts
from esper.leyline.errors import first_line
from esper.leyline.phases import duration
from esper.own_models import samples
from esper.own_models.attachment import attach, learn_behind, new_seed, set_hook, strip
from esper.own_models.growth_result import price_of
from esper.own_models.objectives import Loss, Objective, class_logits, objective
from esper.own_models.options import PRICE, check_loaders, check_model, loss_problem
from esper.own_models.samples import (
    SAMPLES,
    Unpack,
    as_arguments,
    buffers_kept,
    call,
    evaluating,
    first_batch,
    first_samples,
    float_tensors,
    half_or_all,
    length,
    modes_kept,
    random_state_kept,
    sample_count,
    separable_count,
)
from esper.own_models.slot_search import find_slots
from esper.own_models.step_cost import (
    Cost,
    PolicyPrice,
    parameter_bytes,
    policy_price,
    predicted_cost,
)
from esper.tamiyo.try_and_keep import OF_OWN_MODELS

MEBIBYTE = 2**20


@dataclass
class CheckReport:
    """What ``check`` found; ``print`` shows it.

    Attributes:
        slots: where seeds may grow.
        widths: by the name of a group of layers, its channels and how many ``widen`` makes of them.
        rigid: by the name of a group that cannot be widened, why not.
        parameters: parameters of the module.
        batch: samples in a minibatch.
        batches: minibatches in an epoch; those read if the loader has no length.
        step, step_with_seeds: predicted cost of a training step, without seeds and while the seed
            that ``rule`` plants learns in every slot.
        memory, memory_with_seeds: predicted bytes of a training step with AdamW.
        splits: samples in each split that was given, by its name; minibatches of a loader whose
            dataset has no length.
        target: dtype and shape of a target of one minibatch.
        epochs: epochs of growth that are priced.
        policy: what training a policy on this model would take.
        class_counts: samples read of each class, by label; empty without classes.
        problems: what will not work, one line each.
        remarks: what may surprise, one line each.
    """

    name: str
    slots: tuple[SlotSpec, ...] = ()
    widths: dict[str, tuple[int, int]] = field(default_factory=dict)
    rigid: dict[str, str] = field(default_factory=dict)
    parameters: int = 0
    batch: int = 0
    batches: int = 0
    step: Cost = field(default_factory=lambda: Cost(0.0, 0.0))
    step_with_seeds: Cost = field(default_factory=lambda: Cost(0.0, 0.0))
    memory: float = 0.0
    memory_with_seeds: float = 0.0
    splits: dict[str, str] = field(default_factory=dict)
    target: str = ""
    epochs: int = 40
    policy: "PolicyPrice | None" = None
    class_counts: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def __str__(self) -> str:
        lines = [
            f"{self.name} {'fits' if self.ok else 'does not fit'}",
            f"  model    {self.parameters:,} parameters",
            f"  data     {self.batches:,} minibatches of {self.batch}",
            *(
                f"  layers   {name}: {before} channels, {after} under the policy widen"
                for name, (before, after) in self.widths.items()
                if after > before
            ),
            *(f"  layers   {name} stay: {reason}" for name, reason in self.rigid.items()),
            *(f"  slot     {slot.summary}" for slot in self.slots),
        ]
        if self.step.seconds > 0.0:
            lines += self._costs()
        if self.policy is not None:
            lines.append(f"  policy   {self.policy}")
        if self.splits:
            sizes = ", ".join(f"{name} {size}" for name, size in self.splits.items())
            lines.append(f"  splits   {sizes}; target {self.target}")
        if self.class_counts:
            counts = sorted(self.class_counts.values())
            least, most = counts[0], counts[-1]
            lines.append(f"  classes  {len(counts)}, of {least:,} to {most:,} samples each")
        lines += [f"  remark   {remark}" for remark in self.remarks]
        return "\n".join([*lines, *(f"  problem  {problem}" for problem in self.problems)])

    def _costs(self) -> list[str]:
        """Lines about memory and time, which are known of a module that can be trained."""
        epoch, grown = (self.batches * cost.seconds for cost in (self.step, self.step_with_seeds))
        return [
            f"  memory   {self.memory / MEBIBYTE:,.1f} MiB a training step with AdamW, "
            f"{self.memory_with_seeds / MEBIBYTE:,.1f} MiB with a seed in every slot",
            f"  time     {1e3 * self.step.seconds:,.0f} ms a training step, "
            f"{1e3 * self.step_with_seeds.seconds:,.0f} ms with a seed in every slot; "
            f"an epoch {epoch:,.1f} to {grown:,.1f} s",
            f"  growing  {self.epochs} epochs of training: {duration(self.epochs * epoch)} without "
            f"seeds, {duration(self.epochs * grown)} with a seed in every slot; a twin takes the "
            "former again",
        ]


def check(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss: str | Loss = "cross_entropy",
    slots: Sequence[str] | None = None,
    unpack: Unpack = samples.unpack,
    epochs: int = 40,
    held_back: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> CheckReport:
    """Find out whether a module and its data can grow, and what it costs, without training.

    At most 4 samples pass through the module at a time, and its parameters, buffers and random
    numbers stay as they are; memory and time of a whole minibatch are predicted.

    Args:
        model: the module, without seeds, where it is to be trained.
        loader: the training data.
        loss: see ``grow``.
        slots: see ``grow``.
        unpack: see ``grow``.
        epochs: epochs of growth whose time is predicted.
        held_back: loaders of other splits by name, whose sizes are reported.
        progress: whether to print the report.

    Raises:
        UsageError: the module is one that ``grow`` refuses, or the loader or an argument is not
            valid; the text says which and what to do.
    """
    check_model(model, "never")
    check_loaders({"loader": loader})
    goal = objective(loss)
    unpack = samples.unpack_for(loss, unpack)
    example = next(model.parameters(), torch.zeros(()))
    inputs, target = samples.to_device(unpack(first_batch(loader, "loader")), example.device)
    count, batch_size = separable_count(model, inputs), sample_count(inputs)
    report = CheckReport(
        type(model).__name__, parameters=parameter_count(model), batch=batch_size, epochs=epochs
    )
    report.splits = {
        name: size(each) for name, each in {"train": loader, **(held_back or {})}.items()
    }
    report.target = kind(target)
    batch, some = first_samples(inputs, SAMPLES, count), first_samples(target, SAMPLES, count)
    with modes_kept(model), buffers_kept(model):
        _check_forward(model, batch, some, goal, report)
        if report.ok:
            with evaluating(model):
                run = half_or_all(model, *as_arguments(batch))
                report.slots = find_slots(model, run, slots)
                groups, report.rigid = wider_groups(model, lambda: run(False))
                counts = planned_counts(model, groups, partial(price_of, PRICE))
                report.widths = {
                    g.title: (g.width, g.width // g.channels * (g.channels + counts.get(g, 0)))
                    for g in groups
                }
        if report.ok:
            if not model.training:
                # Else parts that the user put in evaluation mode stay there, as in ``grow``.
                model.train()
            try:
                _measure(model, inputs, target, goal, count, report)
            except RuntimeError as error:
                # As of a reentrant checkpoint, which takes no gradients but those of `backward`.
                report.remarks.append(f"memory and time are not known: {first_line(error)}")
        classes = _class_count(model, batch, some) if goal.classes else None
        _read_data(loader, unpack, goal, classes, report)
    if report.ok and report.step_with_seeds.seconds > 0.0:
        report.policy = policy_price(
            report.step_with_seeds.seconds, report.memory_with_seeds, report.batches
        )
    if progress:
        print(report)
    return report


def _check_forward(
    model: nn.Module, inputs: Any, target: Any, goal: Objective, report: CheckReport
) -> None:
    """One loss of a few samples: is it a finite number, and the same twice?"""
    losses = []
    with evaluating(model):
        for _ in range(2):
            try:
                losses.append(goal.loss(call(model, inputs), target))
            except Exception as error:
                line = first_line(error)
                report.problems.append(f"model or loss fails on a batch: {line}")
                return
    if problem := loss_problem(losses[0]):
        report.problems.append(problem)
    elif not bool(losses[0].isfinite()):
        report.problems.append("loss: it is not finite before training")
    elif not torch.equal(*losses):
        report.remarks.append(
            "in evaluation mode two passes over one batch differ: contributions will be noisy"
        )


def _measure(
    model: nn.Module, inputs: Any, target: Any, goal: Objective, count: int, report: CheckReport
) -> None:
    """Cost of a step, without seeds and with one in every slot; of a whole batch."""
    report.step = predicted_cost(model, inputs, target, goal, count)
    report.memory = parameter_bytes(model) + report.step.activations
    try:
        for slot in report.slots:
            attach(model, slot.name, new_seed(slot, OF_OWN_MODELS.blueprint(slot), 0, 0))
            set_hook(model.get_submodule(slot.name), learn_behind)
        grown = predicted_cost(model, inputs, target, goal, count)
        # Seeds take time; a smaller figure is noise.
        seconds = max(grown.seconds, report.step.seconds)
        report.step_with_seeds = Cost(grown.activations, seconds)
        report.memory_with_seeds = parameter_bytes(model) + report.step_with_seeds.activations
    finally:
        strip(model)
    batch, some = (first_samples(x, SAMPLES, count) for x in (inputs, target))
    parameters = [p for p in model.parameters() if p.requires_grad]
    passes = []
    with random_state_kept(), buffers_kept(model):
        for _ in range(2):
            with random_state_kept():
                value = goal.loss(call(model, batch), some)
                passes.append(torch.autograd.grad(value, parameters, allow_unused=True))
    if not all(a is None or torch.equal(a, b) for a, b in zip(*passes, strict=True)):
        report.remarks.append(
            "two backward passes with the same random numbers differ: runs will not repeat exactly"
        )


def _class_count(model: nn.Module, inputs: Any, target: Any) -> int | None:
    """Classes that the module tells apart; None if it fails, which ``_check_forward`` reports."""
    if not isinstance(target, Tensor):
        return None
    with evaluating(model):
        try:
            return class_logits(call(model, inputs), target)[0].shape[1]
        except Exception:
            return None


DATA_SECONDS = 5.0
"""Time spent on reading the loader; what was not read by then is not in the figures."""
RARE = 0.1
"""A class with less than this part of the mean count is reported as rare."""
IGNORED_LABEL = -100
"""The label that cross_entropy leaves out."""


def _read_data(
    loader: Iterable[Any], unpack: Unpack, goal: Objective, classes: int | None, report: CheckReport
) -> None:
    """Read the training data for ``DATA_SECONDS``, and note what there is to say about it.

    ``classes`` is the number of classes that the module tells apart; None if that is unknown.
    """
    begun, read, bad, sizes = monotonic(), 0, 0, set()
    counts: dict[int, int] = {}
    with random_state_kept(loader):
        for batch in loader:
            inputs, target = unpack(batch)
            read += 1
            sizes.add(sample_count(inputs))
            fine = all(_finite(x) or _masks(x) for x in float_tensors(inputs))
            bad += not (fine and all(map(_finite, float_tensors(target))))
            if goal.classes and isinstance(target, Tensor) and not target.is_floating_point():
                labels, numbers = target.unique(return_counts=True)
                for label, number in zip(labels.tolist(), numbers.tolist(), strict=True):
                    counts[int(label)] = counts.get(int(label), 0) + number
            if monotonic() - begun > DATA_SECONDS:
                break
    batches = length(loader)
    report.batches = read if batches is None else batches
    if read < report.batches:
        report.remarks.append(f"only {read:,} of {report.batches:,} minibatches were read")
    if bad:
        report.problems.append(f"loader: {bad} of {read} minibatches hold NaN or infinite numbers")
    if 1 in sizes:
        report.remarks.append("a minibatch has one sample, which BatchNorm refuses: drop_last=True")
    if goal.classes:
        report.class_counts = {label: n for label, n in sorted(counts.items()) if label >= 0}
        negative = [label for label in counts if label < 0 and label != IGNORED_LABEL]
        if negative:
            report.problems.append(f"loader: a label is {max(negative)}; count from 0")
        _check_labels(report, classes)


def _check_labels(report: CheckReport, classes: int | None) -> None:
    counts = report.class_counts
    if not counts:
        report.remarks.append("the target holds no integer labels: class balance is unknown")
        return
    mean = sum(counts.values()) / len(counts)
    rare = [label for label, number in counts.items() if number < RARE * mean]
    if rare:
        examples = ", ".join(str(label) for label in islice(rare, 5))
        report.remarks.append(f"{len(rare)} of {len(counts)} classes are rare, such as {examples}")
    largest = max(counts)
    if classes is not None and largest >= classes:
        report.problems.append(
            f"loader: a label is {largest}, but the model has {classes} outputs; count from 0"
        )


def size(loader: Any) -> str:
    """Samples in a loader, its minibatches if the dataset has no length."""
    samples, batches = length(getattr(loader, "dataset", None)), length(loader)
    if samples is not None:
        return f"{samples:,}"
    return "of unknown size" if batches is None else f"{batches:,} minibatches"


def kind(target: Any) -> str:
    """Dtype and shape of a target."""
    if isinstance(target, Tensor):
        return f"{str(target.dtype).removeprefix('torch.')} {list(target.shape)}"
    return type(target).__name__


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _masks(x: Tensor) -> bool:
    """Whether it is an additive attention mask: 0, and -inf where nothing is attended to."""
    zero = x == 0
    return bool(zero.any()) and bool((zero | x.isneginf()).all())
