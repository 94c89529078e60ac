"""What ``grow`` accepts: every refusal is one line that says what to do."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from esper.leyline.errors import UsageError, first_line
from esper.own_models.objectives import Objective
from esper.own_models.samples import (
    Unpack,
    buffers_kept,
    call,
    evaluating,
    modes_kept,
    moved,
    undisturbed,
)
from esper.own_models.validation import autocast


class FailingBatch(UsageError):
    """Module or loss fails on the first batch of a loader.

    Args:
        name: name of the loader's argument.
        cause: what was raised.
        reason: describes it; by default its first line.
    """

    def __init__(self, name: str, cause: Exception, reason: str | None = None):
        self.name, self.cause = name, cause
        reason = first_line(cause) if reason is None else reason
        super().__init__(f"{name}: model or loss fails on its first batch ({reason})")


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


def check_functions(
    optimizer: object,
    scheduler: object,
    metric: object,
    callbacks: object,
    policy: object,
) -> None:
    """Refuse what ``grow`` could not call; see there for the arguments.

    Raises:
        UsageError: the text says which and what to do.
    """
    for name, given, kind, source in (
        ("optimizer", optimizer, Optimizer, "parameters"),
        ("scheduler", scheduler, LRScheduler, "optimizer"),
    ):
        if isinstance(given, kind) or (given is not None and not callable(given)):
            raise UsageError(
                f"{name}: got a {type(given).__name__}; give a function that makes one, "
                f"as in {name}=lambda {source}: ..."
            )
    updated = all(hasattr(metric, name) for name in ("update", "compute", "reset"))
    if isinstance(metric, type):
        raise UsageError(f"metric: got the class {metric.__name__}; give an instance of it")
    if metric is not None and not callable(metric) and not updated:
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


def check_precision(amp_dtype: object) -> None:
    """Refuse what is not a dtype.

    Raises:
        UsageError: it is not.
    """
    if amp_dtype is not None and not isinstance(amp_dtype, torch.dtype):
        raise UsageError(f"amp_dtype: got {amp_dtype!r}; give a dtype, such as torch.bfloat16")


def usable_device(device: torch.device | str) -> torch.device:
    """The device of that name.

    Raises:
        UsageError: there is none.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device: {device} is not usable ({first_line(error)})") from error
    return found


def check_batch(
    name: str,
    model: nn.Module,
    batch: Any,
    goal: Objective,
    unpack: Unpack,
    device: torch.device,
    amp_dtype: torch.dtype | None,
) -> None:
    """Compute the loss of a batch, before epochs are spent on it.

    Args:
        name: name of the loader's argument.
        model: the module, on ``device``; it stays as it is.
        batch: the batch.
        goal: the loss.
        unpack: splits the batch.
        device: where to compute.
        amp_dtype: dtype of autocast; None for none.

    Raises:
        UsageError: module or loss fails, or the loss is no scalar.
    """
    mode = modes_kept if name == "train_loader" else evaluating
    with (
        undisturbed(),
        buffers_kept(model),
        mode(model),
        torch.no_grad(),
        autocast(device, amp_dtype),
    ):
        if name == "train_loader" and not model.training:
            model.train()  # else parts in evaluation mode stay there, as in training
        inputs, target = moved(unpack(batch), device)
        try:
            loss = goal.loss(call(model, inputs), target)
        except UsageError:
            raise
        except Exception as error:
            raise FailingBatch(name, error) from error
    if problem := loss_problem(loss):
        raise UsageError(problem)


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
