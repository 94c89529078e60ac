"""The options of ``esper.grow`` and ``esper.Growth``.

A field is an argument, a flag of ``esper grow``, an entry of the checkpoint and a row of
``docs/settings-reference.md``; all of them are derived from the fields.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from esper.kasmina.wider_layers import parameter_count
from esper.leyline.config.setting import (
    NOT_NEGATIVE,
    SEEDS,
    Range,
    about,
    meanings,
    options_of,
    setting,
    up_to,
)
from esper.leyline.errors import UsageError, first_line
from esper.own_models.attachment import grown_seeds, updates
from esper.own_models.growth_result import EpochRecord
from esper.own_models.objectives import Loss, Objective, autocast
from esper.own_models.samples import (
    Unpack,
    buffers_kept,
    call,
    modes_kept,
    random_state_kept,
    to_device,
    unpack,
)
from esper.tamiyo.baselines import SEARCHES, Actor

PRICE = 0.01
"""A module twice as large must gain 0.7 points."""

Callback = Callable[[EpochRecord], object]
"""Called after every epoch; training ends if it returns True."""


@dataclass(frozen=True, kw_only=True)
class GrowthOptions:
    """What ``Growth`` and ``grow`` have in common."""

    policy: str | Actor = "rule"
    """never, heuristic, rule, a trained policy of `esper policies`, the directory of a run, or an
    ``Actor``."""
    epochs: int = setting(40, within=up_to(1_000_000), flag=int)
    """Epochs of training; the ages of the lifecycle scale with them."""
    slots: Sequence[str] | None = setting(None, flag=tuple[str, ...], in_recipe=True)
    """Names of modules behind which seeds may grow; found by default."""
    higher_is_better: bool = setting(True, in_recipe=True)
    """Whether scores, or the metric, are like accuracies (1 is perfect) or like losses."""
    price: float = setting(PRICE, within=NOT_NEGATIVE, flag=float)
    """Validation score that growth by a factor of e must gain to pay."""
    max_parameters: int | None = setting(None, within=up_to(10**15), flag=int | None)
    """Most parameters of the network with all its seeds."""
    seed: int = setting(0, within=SEEDS)
    """Determines the initial weights of seeds and the draws of a learned policy; torch's own
    generator, which is not seeded here, determines everything else."""


@dataclass(frozen=True, kw_only=True)
class GrowOptions(GrowthOptions):
    """What ``grow`` takes besides the module and its data."""

    policy: str | Actor = "widen"
    """widen (makes narrow layers wider), deepen (copies repeated blocks), or never, heuristic,
    rule, a trained policy of `esper policies`, the directory of a run, or an ``Actor``, which plant
    residual seeds."""
    loss: str | Loss = setting("cross_entropy", flag=str | None, in_recipe=True)
    """Loss: cross_entropy (default), binary_cross_entropy, mse, l1, huber or model. From Python
    also a function of output and target."""
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = setting(
        None, in_recipe=True, on_resume=True
    )
    """Makes the optimizer from the parameters that require a gradient; AdamW with
    ``training_loop.LEARNING_RATE`` if None."""
    scheduler: Callable[[Optimizer], LRScheduler] | None = setting(
        None, in_recipe=True, on_resume=True
    )
    """Makes a scheduler from the optimizer; None for a constant rate."""
    metric: Any = setting(None, in_recipe=True, on_resume=True)
    """See ``objectives.Metric``; growth is then decided by it."""
    test_loader: Iterable[Any] | None = setting(None, on_resume=True)
    """Batches for the final result alone."""
    retain_loader: Iterable[Any] | None = setting(None, on_resume=True)
    """Batches that the module knew before: its figure on them is shown after each epoch, and at the
    end beside that before it was trained and that without its seeds."""
    training_price: float = setting(0.0, within=NOT_NEGATIVE, flag=float)
    """Validation score that a training of e times the operations, trial included, must gain for
    ``widen`` and ``deepen`` to grow it. They count in proportion to the parameters."""
    tries: int = setting(1, within=up_to(1000), flag=int)
    """Times to train from the same initial weights; the best on validation after the price is kept,
    of the twin as well."""
    best_epoch: bool | None = setting(None, flag=bool | None, in_recipe=True)
    """Whether the epoch that is best on validation after the price is handed back, of the twin as
    well, where it is better than the last one by more than the noise of the samples. By default
    with every policy but never, which is the plain loop."""
    twin: bool = False
    """Whether to train a copy as well that never grows, with the same initial weights, minibatches
    and tries: ``result.twin``, see ``GrowthResult.comparison``."""
    checkpoint: str | Path | None = setting(None, on_resume=True)
    """File to which everything is written after each epoch. If it exists, training resumes there,
    with bit-identical results, for the same options and module; a loader with a state of its own
    (not a generator) begins anew."""
    device: torch.device | str | None = setting(
        None, flag=str | None, in_recipe=True, on_resume=True
    )
    """Device, such as cuda; that of the model by default."""
    amp_dtype: torch.dtype | None = setting(None, in_recipe=True)
    """Dtype of autocast, such as ``torch.bfloat16``; None for none."""
    clip: float | None = setting(
        None, within=Range(0.0, 1e30, open=True), flag=float | None, in_recipe=True
    )
    """Largest norm of the gradient of the network, and of each seed."""
    callbacks: Sequence[Callback] = setting((), on_resume=True)
    """Called with each ``EpochRecord``; training ends if one returns True."""
    unpack: Unpack = setting(unpack, in_recipe=True, on_resume=True)
    """Splits a batch into inputs and target."""
    progress: bool = setting(True, on_resume=True)
    """Whether to print a line per epoch."""
    run_directory: str | Path | None = setting(None, on_resume=True)
    """Folder for what happens, epoch by epoch: `esper sanctum`, `esper report` and `esper query`
    show it, live and afterwards. `esper grow` writes it into its own folder."""
    tensorboard: bool = setting(False, flag=bool, on_resume=True)
    """Whether to write TensorBoard files too, into the run directory."""
    wandb: bool = setting(False, flag=bool, on_resume=True)
    """Whether to write an offline Weights & Biases run too, into the run directory."""

    @property
    def seeks_best_epoch(self) -> bool:
        """``best_epoch``, or its default for the policy."""
        return self.policy != "never" if self.best_epoch is None else self.best_epoch

    def of_growth(self) -> dict[str, Any]:
        """The options of ``Growth`` among these, by name."""
        return {f.name: getattr(self, f.name) for f in fields(GrowthOptions)}


def compared_names(kind: type) -> tuple[str, ...]:
    """The options of ``kind`` that must be the same when growth resumes."""
    return tuple(f.name for f in fields(kind) if not about(f).on_resume)


COMPARED_NAMES = compared_names(GrowOptions)


def to_resume(options: GrowOptions, names: Sequence[str] = COMPARED_NAMES) -> dict[str, Any]:
    """The options called ``names`` as plain values."""
    return {name: _plain(getattr(options, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def flags(kind: type) -> Mapping[str, Field[Any]]:
    """The options of ``kind`` that the command line has, by name."""
    return {f.name: f for f in fields(kind) if about(f).flag is not None}


def recipe_names(kind: type) -> tuple[str, ...]:
    """The options of ``kind`` that the function ``recipe`` of a user's file may give."""
    return tuple(f.name for f in fields(kind) if about(f).in_recipe)


def describe(function: Any, kind: Any) -> None:
    """Give a function that takes ``**options`` of ``kind`` their signature and documentation."""
    signature = inspect.signature(function)
    *parameters, _ = signature.parameters.values()
    parameters += inspect.signature(kind).parameters.values()
    function.__signature__ = signature.replace(parameters=parameters)
    lines = "\n".join(f"        {name}: {text}" for name, text in meanings(kind).items())
    function.__doc__ = f"{function.__doc__}\n    Options:\n{lines}\n"


class FailingBatch(UsageError):
    """Module or loss fails on the first batch of a loader.

    Args:
        name: name of the loader's argument.
        cause: what was raised.
        reason: describes it; by default its first line.
        hint: what else may help.
    """

    def __init__(self, name: str, cause: Exception, reason: str | None = None, hint: str = ""):
        self.name, self.cause, self.hint = name, cause, hint
        reason = first_line(cause) if reason is None else reason
        super().__init__(f"{name}: model or loss fails on its first batch ({reason}){hint}")


def check_loaders(loaders: Mapping[str, object]) -> None:
    """Refuse what yields no minibatches.

    Args:
        loaders: loaders by the name of their argument.

    Raises:
        UsageError: one is a dataset, or cannot be iterated over.
    """
    for name, loader in loaders.items():
        kind = type(loader).__name__
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise UsageError(f"{name}: got a {kind}; give a DataLoader of it or a list of batches")
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise UsageError(f"{name}: got a {kind}; give a DataLoader or a list of batches")


def check_numbers(options: GrowthOptions) -> None:
    """Refuse what is no number, and numbers out of range.

    Raises:
        UsageError: the text says which and what to do.
    """
    for f in fields(options):
        within, value = about(f).within, getattr(options, f.name)
        if within is None or (value is None and f.default is None):
            continue
        is_integer = float not in options_of(about(f).flag)
        is_number = isinstance(value, Integral if is_integer else Real)
        if not is_number or value not in within:
            number = "whole number" if is_integer else "number"
            raise UsageError(f"{f.name}: got {value!r}; give a {number}, which must {within}")


def check_types(options: GrowOptions) -> None:
    """Refuse what ``grow`` could not call, and a dtype that is none.

    Raises:
        UsageError: the text says which and what to do.
    """
    for name, function, kind, source in (
        ("optimizer", options.optimizer, Optimizer, "parameters"),
        ("scheduler", options.scheduler, LRScheduler, "optimizer"),
    ):
        if isinstance(function, kind) or (function is not None and not callable(function)):
            raise UsageError(
                f"{name}: got a {type(function).__name__}; give a function that makes one, "
                f"as in {name}=lambda {source}: ..."
            )
    metric, callbacks, policy = options.metric, options.callbacks, options.policy
    accumulates = all(hasattr(metric, name) for name in ("update", "compute", "reset"))
    if isinstance(metric, type):
        raise UsageError(f"metric: got the class {metric.__name__}; give an instance of it")
    if metric is not None and not callable(metric) and not accumulates:
        raise UsageError(
            f"metric: got {metric!r}; give a function of predictions and targets, or an object "
            "with update, compute and reset"
        )
    if not isinstance(callbacks, Sequence):
        raise UsageError(f"callbacks: got a {type(callbacks).__name__}; give a list of functions")
    if (wrong := next((each for each in callbacks if not callable(each)), None)) is not None:
        raise UsageError(f"callbacks: {wrong!r} is no function; give a list of functions")
    if not isinstance(policy, str) and not hasattr(policy, "act"):
        raise UsageError(
            f"policy: got {policy!r}; give a name of `esper policies`, a run directory, or an "
            "object with begin and act"
        )
    if not isinstance(options.amp_dtype, torch.dtype | None):
        raise UsageError(f"amp_dtype: got {options.amp_dtype!r}; give a dtype, as torch.bfloat16")


def usable_device(device: torch.device | str) -> torch.device:
    """The device of that name.

    Raises:
        UsageError: there is none.
    """
    try:
        result = torch.device(device)
        torch.empty(0, device=result)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device: {device} is not usable ({first_line(error)})") from error
    return result


_OWN_LOSS = "; give loss='model' if the module computes its loss of the labels"


def check_batch(
    name: str, model: nn.Module, batch: Any, goal: Objective, device: torch.device,
    options: GrowOptions,
) -> None:  # fmt: skip
    """Compute the loss of a batch, before epochs are spent on it.

    Args:
        name: name of the loader's argument.
        model: the module, on ``device``; it stays as it is.
        batch: the batch.
        goal: the loss.
        device: where to compute.
        options: how the batch is split, and the dtype of autocast.

    Raises:
        UsageError: module or loss fails, the loss is no scalar, or the labels are inputs as they
            are, as of a language model that shifts them itself.
    """
    with (
        random_state_kept(),
        buffers_kept(model),
        modes_kept(model),
        torch.no_grad(),
        autocast(device, options.amp_dtype),
    ):
        if name != "train_loader":
            model.eval()
        elif not model.training:
            model.train()  # else parts in evaluation mode stay there, as in training
        inputs, target = to_device(options.unpack(batch), device)
        has_names = isinstance(inputs, Mapping) and options.loss != "model"
        for key in (key for key in inputs if _is_copy(target, inputs[key])) if has_names else ():
            raise UsageError(f"{name}: its labels are its {key}, which it would copy{_OWN_LOSS}")
        try:
            loss = goal.loss(call(model, inputs), target)
        except UsageError as error:
            # The other messages are about the loss itself.
            if isinstance(error.__cause__, IndexError):
                raise UsageError(f"{name}: {str(error).removeprefix('loss: ')}") from error
            raise
        except Exception as error:
            raise FailingBatch(name, error, hint=_OWN_LOSS if has_names else "") from error
    if problem := loss_problem(loss):
        raise UsageError(problem)


def _is_copy(target: object, inputs: object) -> bool:
    """Whether integers are those of the inputs, but for -100, which no loss counts."""
    if not isinstance(target, Tensor) or not isinstance(inputs, Tensor):
        return False
    if inputs.dtype != torch.int64 or target.dtype != torch.int64 or inputs.shape != target.shape:
        return False
    is_counted = target != -100
    return bool(is_counted.any()) and torch.equal(inputs[is_counted], target[is_counted])


def loss_problem(loss: object) -> str | None:
    """Why a value is no loss of a batch, and what to do; None if it is one."""
    if not isinstance(loss, Tensor):
        return (
            f"loss: it returns a {type(loss).__name__}; give a function of output and target that "
            "returns their mean loss"
        )
    if loss.numel() != 1:
        return f"loss: it has the shape {tuple(loss.shape)}; return its mean"
    return None


def check_arguments(model: nn.Module, optimizer: Optimizer | None, options: GrowthOptions) -> None:
    """Refuse what cannot grow; see ``Growth`` for the arguments.

    Raises:
        UsageError: an argument is not valid; the text says which and what to do.
    """
    check_model(model, options.policy)
    if optimizer is not None and any(p.requires_grad for p in model.parameters()):
        check_optimizer(model, optimizer, options.policy)
    check_numbers(options)
    if isinstance(options.slots, str):
        raise UsageError(f"slots: got the string {options.slots!r}; give a list of names")
    most, count = options.max_parameters, parameter_count(model)
    if most is not None and most < count:
        raise UsageError(f"max_parameters: the module has {count:,} already; give more than that")


def process_count() -> int:
    """How many processes train together."""
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return 1 if is_alone else torch.distributed.get_world_size()


def check_model(model: nn.Module, policy: str | Actor = "rule") -> None:
    """Refuse a module that cannot grow by a policy, before anything touches it.

    Raises:
        UsageError: it has seeds or lazy layers, is compiled, scripted, wrapped or sharded, or has
            no values or nothing to train; the text says what to do.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: got a {type(model).__name__}; give an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("model: it is scripted; give the nn.Module itself")
    is_compiled = any(getattr(each, "_compiled_call_impl", None) for each in model.modules())
    if is_compiled or hasattr(model, "_orig_mod"):
        raise UsageError(
            "model: it is compiled, and compiled code does not see new seeds; give the module "
            "itself and compile the result"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UsageError(f"model: {type(model).__name__} misses new parameters; give model.module")
    is_flat = any("FullySharded" in type(each).__name__ for each in model.modules())
    if is_flat or any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise UsageError("model: its parameters are sharded; let it grow before you shard it")
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise UsageError("model: it has lazy layers; call it once with a batch before growing it")
    if grown_seeds(model):
        raise UsageError("model: it has seeds already; grow a copy without them (esper.strip)")
    if any(p.is_meta for p in model.parameters()):
        raise UsageError(
            "model: it is on the device meta, so its parameters have no values; call "
            "model.to_empty(device=...) and load a state first"
        )
    if policy in (*SEARCHES, "never") and not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            f"model: no parameter requires a gradient, so the policy {policy!r} has nothing to "
            "train; unfreeze some, or let seeds grow beside it with policy='rule'"
        )


def check_optimizer(model: nn.Module, optimizer: Optimizer, policy: str | Actor = "rule") -> None:
    """Refuse an optimizer that cannot train ``model`` when it grows by a policy.

    Raises:
        UsageError: it cannot; the text says why and what to do.
    """
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(f"optimizer: got a {type(optimizer).__name__}; give one of torch")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "optimizer: LBFGS keeps one state for all, so no seed can join; use another"
        )
    if policy not in SEARCHES and isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise UsageError("optimizer: Muon updates matrices alone, seeds have vectors; use another")
    if not updates(optimizer, model):
        raise UsageError("optimizer: it has no parameter of the model; build it from this model's")
