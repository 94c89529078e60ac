"""The options of ``esper.grow`` and ``esper.Growth``.

A field is an argument, a flag of ``esper grow``, an entry of the checkpoint and a row of
``docs/settings-reference.md``; all of them are derived from the fields.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.leyline.config.setting import NOT_NEGATIVE, Range, about, meanings, setting, up_to
from esper.own_models.growth_result import EpochRecord
from esper.own_models.objectives import Loss
from esper.own_models.samples import Unpack, unpack
from esper.tamiyo.baselines import Actor
from esper.tamiyo.policy.features import USUAL_RENT

Callback = Callable[[EpochRecord], object]
"""Called after every epoch; training ends if it returns True."""


@dataclass(frozen=True, kw_only=True)
class GrowthOptions:
    """What ``Growth`` and ``grow`` have in common."""

    policy: str | Actor = "rule"
    """One of ``policies.POLICIES``, a trained policy of `esper policies`, the directory of a run,
    or an ``Actor``."""
    epochs: int = setting(40, within=up_to(1_000_000), flag=int)
    """Epochs of training; the ages of the lifecycle scale with them."""
    slots: Sequence[str] | None = setting(None, flag=tuple[str, ...], in_recipe=True)
    """Names of modules behind which seeds may grow; found by default."""
    higher_is_better: bool = setting(True, in_recipe=True)
    """Whether scores, or the metric, are like accuracies (1 is perfect) or like losses."""
    price: float = setting(USUAL_RENT, within=NOT_NEGATIVE, flag=float)
    """Validation score that growth by a factor of e must gain to pay."""
    max_parameters: int | None = setting(None, within=up_to(10**15), flag=int | None)
    """Most parameters of the network with all its seeds."""
    seed: int = 0
    """Determines the initial weights of seeds and the draws of a learned policy; torch's own
    generator, which is not seeded here, determines everything else."""


@dataclass(frozen=True, kw_only=True)
class GrowOptions(GrowthOptions):
    """What ``grow`` takes besides the module and its data."""

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
    tries: int = setting(1, within=up_to(1000), flag=int)
    """Times to train from the same initial weights; the best on validation after the price is kept,
    of the twin as well."""
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

    def of_growth(self) -> dict[str, Any]:
        """The options of ``Growth`` among these, by name."""
        return {f.name: getattr(self, f.name) for f in fields(GrowthOptions)}

    def to_resume(self) -> dict[str, Any]:
        """What must be the same when growth resumes, as plain values by name."""
        compared = [f.name for f in fields(self) if not about(f).on_resume]
        return {name: _plain(getattr(self, name)) for name in compared}


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
