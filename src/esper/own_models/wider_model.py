"""``esper.widen`` and ``esper.deepen``: a larger model in a training loop of the user's own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from esper.kasmina import model_config
from esper.kasmina.wider_layers import parameter_count
from esper.leyline.errors import UsageError
from esper.own_models.layer_growth import LayerGrowth, first_batches
from esper.own_models.objectives import Loss, objective
from esper.own_models.options import (
    PRICE,
    GrowOptions,
    check_arguments,
    check_batch,
    check_loaders,
    process_count,
)
from esper.own_models.samples import Unpack, first_batch, output_of, unpack, unpack_for
from esper.own_models.training_loop import Training


@dataclass(frozen=True)
class Enlargement:
    """What ``widen`` or ``deepen`` did; ``str`` of it has a line for each change.

    Attributes:
        lines: what became larger, and what did not and why.
        parameters: their number before and after.
    """

    lines: tuple[str, ...]
    parameters: tuple[int, int]
    _changes: Sequence[Any]

    def __str__(self) -> str:
        before, after = self.parameters
        return "\n".join((*self.lines, f"{before:,} -> {after:,} parameters"))

    def undo(self) -> None:
        """Take it back: what was there before has the weights and the optimizer's state of then.

        What other layers have learned since stays: after further training, load a checkpoint.
        """
        for change in reversed(self._changes):
            change.undo()


def widen(
    model: nn.Module,
    train_loader: Iterable[Any],
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loss: str | Loss = "cross_entropy",
    factor: float | None = None,
    slots: Sequence[str] | None = None,
    price: float = PRICE,
    max_parameters: int | None = None,
    averages: Sequence[nn.Module] | nn.Module = (),
    unpack: Unpack = unpack,
) -> Enlargement:
    """Make narrow layers of ``model`` wider, in place; it computes the same as before.

    For loops of your own, once, after about a tenth of the training, or when a trained model turns
    out too small. ``grow`` does the same and also tries whether the wider layers should stay.
    Behind norms of all channels the new units begin as copies, and the next steps of an optimizer
    make random ones of them. Where several processes train (``torch.distributed``), all call it,
    and get the units of the first.

    Args:
        model: the module; its layers stay what they are, with larger sizes.
        train_loader: its first minibatches choose the new units; no random number is drawn.
        optimizer: gets the new parameters, and keeps the state of what was there; a list where
            there are several. Without one, make it afterwards.
        loss: see ``grow``.
        factor: how many times as wide each layer becomes, above 1; by default layers become 1.5 to
            8 times as wide, where that gained more than ``price`` on the mean of other models.
        slots: names of the modules whose layers may become wider; all by default.
        price, max_parameters: see ``grow``.
        averages: averages of the model's weights, such as ``ema.module``: they become wider alike.
        unpack: splits a batch into inputs and target.

    Raises:
        UsageError: an argument is not valid; the text says which and what to do.
    """
    if factor is not None and not (isinstance(factor, int | float) and factor > 1.0):
        raise UsageError(f"factor: got {factor!r}; give a number above 1")
    options = GrowOptions(
        loss=loss, slots=slots, price=price, max_parameters=max_parameters,
        unpack=unpack_for(loss, unpack),
    )  # fmt: skip
    return _enlarged(model, train_loader, optimizer, averages, options, factor)


def deepen(
    model: nn.Module,
    train_loader: Iterable[Any],
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loss: str | Loss = "cross_entropy",
    max_parameters: int | None = None,
    averages: Sequence[nn.Module] | nn.Module = (),
    unpack: Unpack = unpack,
) -> Enlargement:
    """Copy the blocks of each stack of ``model``, in place; the copies add nothing at first.

    Args:
        model: the module, such as a residual network or a pre-norm transformer.
        train_loader: its first minibatch shows which blocks pass on their input.
        optimizer: see ``widen``.
        loss: see ``grow``.
        max_parameters: see ``grow``.
        averages: see ``widen``.
        unpack: splits a batch into inputs and target.

    Raises:
        UsageError: an argument is not valid; the text says which and what to do.
    """
    options = GrowOptions(
        policy="deepen", loss=loss, max_parameters=max_parameters, unpack=unpack_for(loss, unpack)
    )
    return _enlarged(model, train_loader, optimizer, averages, options)


def _enlarged(
    model: nn.Module, loader: Iterable[Any], optimizer: Optimizer | Sequence[Optimizer] | None,
    averages: Sequence[nn.Module] | nn.Module, options: GrowOptions, factor: float | None = None,
) -> Enlargement:  # fmt: skip
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for one in optimizers:
        check_arguments(model, one, options)
    check_loaders({"train_loader": loader})
    shapes = model_config.parameter_shapes(model)
    averages = [averages] if isinstance(averages, nn.Module) else averages
    for each in averages:
        is_module = isinstance(each, nn.Module)
        if not is_module or shapes != model_config.parameter_shapes(each):
            raise UsageError(
                f"averages: got a {type(each).__name__} with other parameters than the model; give "
                "a copy of it, such as the module of an AveragedModel"
            )
    device, goal = next(model.parameters()).device, objective(options.loss)
    batch = first_batch(loader, "train_loader")
    check_batch("train_loader", model, batch, goal, device, options)
    # Nothing is trained here: without an optimizer, one that is dropped stands in.
    trains = optimizers[0] or torch.optim.SGD(model.parameters(), lr=0.0)
    training = Training(model, loader, goal, trains, device, unpack=options.unpack)
    deepens = options.policy == "deepen"
    growth = LayerGrowth(model, options, 0, deepens, averages, factor, _of_first_process)
    growth.optimizers = [one for one in optimizers[1:] if one is not None]
    batches, size = first_batches(training), parameter_count(model)
    plan = growth.plan(batches)
    changes: Sequence[Any] = growth.apply(plan, batches, training) if plan else ()
    if hasattr(model, "config") and changes:
        config = model_config.follow(model, shapes, lambda x: output_of(x, batches[0][0]))
        hint = "" if factor or deepens else "; factor=2 makes all layers wider alike"
        growth.lines += model_config.lines(config, hint)
        changes = [*changes, *([config] if config else [])]
    ids = {id(p) for one in optimizers if one for g in one.param_groups for p in g["params"]}
    orphans = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in ids]
    if changes and ids and orphans:
        growth.lines.append(f"no optimizer has {orphans[0]}; if another trains it, give a list")
    if changes and process_count() > 1:
        growth.lines.append("make DistributedDataParallel anew, which does not see new parameters")
    return Enlargement(tuple(growth.lines), (size, parameter_count(model)), changes)


def _of_first_process(value: Any) -> Any:
    """The value of the first process: each chooses new units by minibatches of its own."""
    values = [value]
    if process_count() > 1:
        distributed.broadcast_object_list(values)
    return values[0]
