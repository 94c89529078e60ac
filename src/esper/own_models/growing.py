"""``esper.grow``: train and grow a module of the user's own in one call."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from esper.leyline.errors import UsageError
from esper.own_models.figure_intervals import interval, sample_values
from esper.own_models.growth_result import GrowthResult
from esper.own_models.objectives import Scale, objective
from esper.own_models.options import (
    GrowOptions,
    check_batch,
    check_loaders,
    check_model,
    check_numbers,
    check_types,
    describe,
    usable_device,
)
from esper.own_models.samples import first_batch, output_of, to_device, unpack_for
from esper.own_models.training_loop import Attempts, Recipe

Options = ParamSpec("Options")
Result = TypeVar("Result")


def _taking(
    kind: Callable[Options, object],
) -> Callable[
    [Callable[..., Result]],
    Callable[Concatenate[nn.Module, Iterable[Any], Iterable[Any], Options], Result],
]:
    """Document the fields of a dataclass as keyword arguments of a function."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        describe(function, kind)
        return function

    return decorate


@_taking(GrowOptions)
def grow(
    model: nn.Module,
    train_loader: Iterable[Any],
    validation_loader: Iterable[Any],
    **arguments: Any,
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
        arguments: see ``options.GrowOptions``.

    Raises:
        UsageError: an argument is not valid; the text says which and what to do.
    """
    options = GrowOptions(**arguments)
    loaders = {"train_loader": train_loader, "validation_loader": validation_loader}
    more = {name: getattr(options, name) for name in ("test_loader", "retain_loader")}
    loaders |= {name: loader for name, loader in more.items() if loader is not None}
    recipe = _recipe(model, loaders, options)
    if options.run_directory is None:
        return _grown(model, loaders, recipe)
    from esper.own_models.run_log import run_log

    with run_log(Path(options.run_directory), model, options) as log:
        result = _grown(model, loaders, replace(recipe, log=log))
        log.finish(result)
    return result


def _grown(model: nn.Module, loaders: dict[str, Iterable[Any]], recipe: Recipe) -> GrowthResult:
    """The grown module beside its twin, measured on all splits."""
    options, validation_loader = recipe.options, loaders["validation_loader"]
    never_grown = copy.deepcopy(model) if options.twin else None
    shapes = {name: p.shape for name, p in model.named_parameters()}
    attempts = Attempts(recipe, model)
    scale = Scale()
    validate = recipe.evaluator(model, validation_loader, scale)
    result = attempts.best("grown", model, recipe.options.policy, validate)
    if hasattr(model, "config"):
        from esper.kasmina import model_config  # most models have none

        config = model_config.follow(model, shapes, lambda x: output_of(x, recipe.example))
        for line in model_config.lines(config):
            recipe.report(line)
    if never_grown is not None:
        recipe.report("the twin that never grows:")
        validate = recipe.evaluator(never_grown, validation_loader, scale)
        result.twin = attempts.best("twin", never_grown, "never", validate)
    if options.test_loader is not None:
        for each in (result, result.twin):
            if each is not None:
                each.test = recipe.evaluator(each.model, options.test_loader, scale)()
    if result.twin is not None:
        models = result.model, result.twin.model
        for split in ("validation", "test"):
            if (loader := loaders.get(f"{split}_loader")) is not None:
                values = [sample_values(recipe.evaluator(x, loader, scale)) for x in models]
                if (bounds := interval(*values)) is not None:
                    result.difference[split] = bounds
    return result


def _recipe(model: nn.Module, loaders: dict[str, Iterable[Any]], options: GrowOptions) -> Recipe:
    """How to train, after every argument was checked.

    Raises:
        UsageError: see ``grow``.
    """
    check_model(model, options.policy)
    check_numbers(options)
    trackers = [name for name in ("tensorboard", "wandb") if getattr(options, name)]
    if trackers and options.run_directory is None:
        raise UsageError(f"{trackers[0]}: give run_directory as well, where its files go")
    check_loaders(loaders)
    policy = str(options.policy) if isinstance(options.policy, Path) else options.policy
    options = replace(options, policy=policy, unpack=unpack_for(options.loss, options.unpack))
    check_types(options)
    if options.checkpoint is not None:
        # Before the run directory is made, which would bring back one that was removed meanwhile.
        from esper.own_models.resume_file import check_folder

        check_folder(Path(options.checkpoint))
    goal = objective(options.loss)
    device = _device(model, options.device)
    batches = {name: first_batch(loader, name) for name, loader in loaders.items()}
    for name, batch in batches.items():
        check_batch(name, model, batch, goal, device, options)
    return Recipe(
        options=options, train_loader=loaders["train_loader"], loaders=tuple(loaders.values()),
        objective=goal, device=device,
        example=to_device(options.unpack(batches["train_loader"])[0], device),
    )  # fmt: skip


def _device(model: nn.Module, name: torch.device | str | None) -> torch.device:
    """The device to train on; moves the module there."""
    if name is not None:
        model.to(usable_device(name))
    return next(model.parameters(), torch.empty(0, device=name)).device
