"""``esper.grow``: train and grow a module of the user's own in one call."""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.leyline.errors import UsageError
from esper.simic.growth.collect import Actor
from esper.simic.own_models.attempts import Attempts, Callback, Recipe
from esper.simic.own_models.call_arguments import (
    check_batch,
    check_functions,
    check_loaders,
    check_precision,
    usable_device,
)
from esper.simic.own_models.growth_arguments import check_model
from esper.simic.own_models.growth_result import GrowthResult
from esper.tamiyo.policy.features import USUAL_PRICE
from esper.tolaria.own_model import samples
from esper.tolaria.own_model.objectives import Loss, objective
from esper.tolaria.own_model.samples import Unpack, first_batch, moved
from esper.tolaria.own_model.validation import Evaluator, Scale


def grow(
    model: nn.Module,
    train_loader: Iterable[Any],
    validation_loader: Iterable[Any],
    *,
    loss: str | Loss = "cross_entropy",
    epochs: int = 40,
    slots: Sequence[str] | None = None,
    policy: str | Actor = "rule",
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    metric: Any = None,
    higher_is_better: bool = True,
    test_loader: Iterable[Any] | None = None,
    price: float = USUAL_PRICE,
    max_parameters: int | None = None,
    tries: int = 1,
    twin: bool = False,
    checkpoint: str | Path | None = None,
    device: torch.device | str | None = None,
    amp_dtype: torch.dtype | None = None,
    clip: float | None = None,
    callbacks: Sequence[Callback] = (),
    unpack: Unpack = samples.unpack,
    seed: int = 0,
    progress: bool = True,
) -> GrowthResult:
    """Train ``model`` and grow it while it trains.

    The loop is the usual one: forward, loss, backward, clip, update, and a step of the scheduler
    after each epoch (``OneCycleLR`` and ``CyclicLR``: after each minibatch). Measuring draws no
    random number, so with ``policy="never"`` this is exactly that loop.

    Args:
        model: trained and grown in place. Parameters that require no gradient stay as they are, and
            so do parts in evaluation mode if the module is in training mode.
        train_loader: minibatches, see ``samples.unpack``; read once per epoch.
        validation_loader: batches on which seeds are measured.
        loss: ``cross_entropy`` (labels, also of each position of a sequence),
            ``binary_cross_entropy`` (several labels; logits), ``mse``, ``l1``, ``huber``, ``model``
            (the output is a dict with a ``loss``), or a function of output and target.
        epochs: passes through ``train_loader``.
        slots: names of modules behind which seeds may grow; None to find them.
        policy: see ``Growth``.
        optimizer: makes the optimizer from the parameters that require a gradient; AdamW with
            ``attempts.LEARNING_RATE`` if None.
        scheduler: makes a scheduler from the optimizer; None for a constant rate.
        metric: see ``validation.Metric``; growth is then decided by it.
        higher_is_better: whether the metric is like an accuracy (1 is perfect) or like a loss.
        test_loader: batches for the final result alone.
        price: score that growth by a factor of e must gain to pay.
        max_parameters: most parameters of the module with all its seeds.
        tries: number of times to train from the same initial weights; the try with the best
            validation score minus price is kept.
        twin: whether to train a copy as well that never grows, with the same initial weights,
            minibatches and tries: ``result.twin``, see ``GrowthResult.comparison``.
        checkpoint: file to which everything is written after each epoch. If it exists, training
            resumes there, with bit-identical results, for the same arguments and module;
            a loader with a state of its own (not a generator) begins anew.
        device: where to train; that of the module if None.
        amp_dtype: dtype of autocast, such as ``torch.bfloat16``; None for none.
        clip: largest norm of the gradient of the module, and of each seed; None for none.
        callbacks: called with each ``EpochRecord``.
        unpack: splits a batch into inputs and target.
        seed: determines the initial weights of seeds; torch's own generator, which is not seeded
            here, determines everything else.
        progress: whether to print a line per epoch.

    Raises:
        UsageError: an argument is not valid; the text says which and what to do.
    """
    check_model(model)
    if not isinstance(tries, int) or tries < 1:
        raise UsageError(f"tries: got {tries!r}; give a whole number from 1")
    loaders = {"train_loader": train_loader, "validation_loader": validation_loader}
    if test_loader is not None:
        loaders["test_loader"] = test_loader
    check_loaders(loaders)
    policy = str(policy) if isinstance(policy, Path) else policy
    check_functions(optimizer, scheduler, metric, callbacks, policy)
    check_precision(amp_dtype)
    unpack = samples.unpack_for(loss, unpack)
    goal, report = objective(loss), _printed if progress else None
    where = _device(model, device)
    first = {name: first_batch(loader, name) for name, loader in loaders.items()}
    for name, batch in first.items():
        check_batch(name, model, batch, goal, unpack, where, amp_dtype)
    example = moved(unpack(first["train_loader"])[0], where)
    evaluator = partial(
        Evaluator,
        objective=goal,
        device=where,
        metric=metric,
        higher_is_better=higher_is_better,
        unpack=unpack,
        amp_dtype=amp_dtype,
        scale=Scale(),
    )
    recipe = Recipe(
        train_loader=train_loader,
        loaders=tuple(loaders.values()),
        objective=goal,
        device=where,
        example=example,
        optimizer=optimizer,
        scheduler=scheduler,
        clip=clip,
        unpack=unpack,
        amp_dtype=amp_dtype,
        epochs=epochs,
        slots=slots,
        higher_is_better=higher_is_better,
        price=price,
        max_parameters=max_parameters,
        seed=seed,
        callbacks=callbacks,
        report=report,
    )
    settings = {
        "model": [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters()],
        "loss": goal.name,
        "epochs": epochs,
        "slots": None if slots is None else list(slots),
        "policy": policy if isinstance(policy, str) else type(policy).__name__,
        "higher_is_better": higher_is_better,
        "price": price,
        "max_parameters": max_parameters,
        "tries": tries,
        "twin": twin,
        "amp_dtype": str(amp_dtype),
        "clip": clip,
        "seed": seed,
    }
    path = None if checkpoint is None else Path(checkpoint)
    other = copy.deepcopy(model) if twin else None
    attempts = Attempts(recipe, tries, model, settings, path)
    result = attempts.best("grown", model, policy, evaluator(model, validation_loader))
    if other is not None:
        if report is not None:
            report("the twin that never grows:")
        result.twin = attempts.best("twin", other, "never", evaluator(other, validation_loader))
    if test_loader is not None:
        for each in (result, result.twin):
            if each is not None:
                each.test = evaluator(each.model, test_loader)()
    return result


def _printed(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device to train on; moves the module there."""
    if device is not None:
        found = usable_device(device)
        model.to(found)
        return found
    example = next(model.parameters(), None)
    return torch.device("cpu") if example is None else example.device
