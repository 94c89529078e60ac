"""Attempts at training a module from the same initial weights, of which the best is kept.

An attempt that was interrupted resumes after its last whole epoch; results are bit-identical.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.own_models import resume_file
from esper.own_models.attachment import load_grown, strip
from esper.own_models.controller import Growth
from esper.own_models.grafted_model import copied_state, parameter_count
from esper.own_models.growth_result import GrowthResult, comparable
from esper.own_models.history import EpochRecord
from esper.own_models.objectives import Objective
from esper.own_models.optimizer_watch import optimizer_of, updates
from esper.own_models.samples import Unpack
from esper.own_models.training_loop import Training
from esper.own_models.validation import Evaluator
from esper.tamiyo.baselines import Actor

LEARNING_RATE = 1e-3
"""Learning rate of AdamW, the optimizer if none is given."""

Callback = Callable[[EpochRecord], object]
"""Called after every epoch; training ends if it returns True."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How every attempt trains; see ``grow`` for what is not described here.

    Attributes:
        objective: the loss.
        example: inputs by which the slots are found.
        loaders: everything that may hold a generator.
    """

    train_loader: Iterable[Any]
    loaders: tuple[object, ...]
    objective: Objective
    device: torch.device
    example: Any
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None
    scheduler: Callable[[Optimizer], LRScheduler] | None
    clip: float | None
    unpack: Unpack
    amp_dtype: torch.dtype | None
    epochs: int
    slots: Sequence[str] | None
    higher_is_better: bool
    price: float
    max_parameters: int | None
    seed: int
    callbacks: Sequence[Callback]
    report: Callable[[str], None] | None


class Attempts:
    """Trains variants of a module, each ``tries`` times, with a checkpoint for a later process.

    Args:
        recipe: how to train.
        tries: attempts of each variant.
        initial: the module with its initial weights.
        settings: what a later call must have in common with this one, by name.
        path: file of the checkpoint; None for none.

    Raises:
        UsageError: the file belongs to other settings, or cannot be read or written.
    """

    def __init__(
        self,
        recipe: Recipe,
        tries: int,
        initial: nn.Module,
        settings: dict[str, Any],
        path: Path | None,
    ):
        self.recipe, self.tries, self.path = recipe, tries, path
        self._passed = initial
        self._keeps = tries > 1 or path is not None
        found = None
        if path is not None:
            resume_file.check_folder(path)
            found = resume_file.read(path, settings)
        begun = resume_file.random_state(recipe.loaders)
        self._checkpoint: dict[str, Any] = found or {
            "settings": settings,
            "initial": copied_state(initial) if self._keeps else None,
            "begun": begun,
            "now": None,
            "scale": None,
            "random": begun,
            "variants": {},
        }
        if found is not None:
            resume_file.set_random_state(found["random"], recipe.loaders)

    def best(
        self, name: str, model: nn.Module, policy: str | Actor, validate: Evaluator
    ) -> GrowthResult:
        """The best attempt of a variant, by validation score minus price.

        Its weights are loaded into ``model``.

        Args:
            name: name of the variant. Each begins with the same weights and random numbers.
            model: the module, with its initial weights.
            policy: see ``Growth``.
            validate: validates the module; its scale is shared by all variants.
        """
        report, checkpoint = self.recipe.report or _silent, self._checkpoint
        entry = checkpoint["variants"].setdefault(name, {"worths": [], "best": None, "state": None})
        validate.scale.first = checkpoint["scale"]
        for number in range(len(entry["worths"]), self.tries):
            saved = checkpoint["now"]
            if saved is None:
                if self._keeps:
                    strip(model).load_state_dict(checkpoint["initial"])
                if number == 0:
                    resume_file.set_random_state(checkpoint["begun"], self.recipe.loaders)
            else:
                epoch = len(saved["growth"]["history"])
                report(f"resuming after epoch {epoch} from {self.path}")
            result = self._attempt(model, policy, validate, number, saved)
            net_score = result.worth
            if all(comparable(net_score) > comparable(each) for each in entry["worths"]):
                entry["best"] = result.plain()
                entry["state"] = copied_state(model) if self._keeps else None
            entry["worths"].append(net_score)
            checkpoint["now"] = None
            if self.tries > 1:
                report(
                    f"try {number + 1}/{self.tries}: {net_score:.4f} on validation after the price"
                )
            self._write(validate)
        if self._keeps:
            load_grown(strip(model), entry["state"])
        kept = GrowthResult.from_plain(model, entry["best"])
        kept.tries = list(entry["worths"])
        if self.tries > 1:
            chosen = kept.tries.index(max(kept.tries, key=comparable)) + 1
            report(f"kept try {chosen} of {self.tries}, the best on validation")
        return kept

    def _attempt(
        self,
        model: nn.Module,
        policy: str | Actor,
        validate: Evaluator,
        number: int,
        saved: dict[str, Any] | None,
    ) -> GrowthResult:
        """Train and grow to the end, from the start or from what was saved."""
        recipe, host = self.recipe, parameter_count(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        make = recipe.optimizer or partial(AdamW, lr=LEARNING_RATE)
        made = make(trained)
        if model is not self._passed and not updates(made, model):
            # It was made from the parameters of the module that was passed, not from its arguments.
            made = optimizer_of(made, self._passed, model)
        growth = Growth(
            model,
            made,
            policy=policy,
            epochs=recipe.epochs,
            validate=validate,
            example=recipe.example,
            slots=recipe.slots,
            higher_is_better=recipe.higher_is_better,
            price=recipe.price,
            max_parameters=recipe.max_parameters,
            seed=recipe.seed + number,
            report=recipe.report,
        )
        training = Training(
            model,
            recipe.train_loader,
            recipe.objective,
            made,
            recipe.device,
            recipe.scheduler(made) if recipe.scheduler else None,
            None if recipe.clip is None else partial(growth.clip, recipe.clip),
            recipe.unpack,
            recipe.amp_dtype,
            recipe.higher_is_better,
        )
        before = 0.0
        if saved is None:
            growth.begin()
        else:
            before = saved["seconds"]
            growth.load_state_dict(saved["growth"])
            model.load_state_dict(saved["model"])
            training.load_state_dict(saved["training"])
            resume_file.set_random_state(self._checkpoint["random"], recipe.loaders)
        begun = monotonic()
        for _ in range(len(growth.history), recipe.epochs):
            loss = training.epoch()
            validation = validate()
            training.end_epoch(validation)
            record = growth.step(validation, train_loss=loss)
            if any([callback(record) is True for callback in recipe.callbacks]):
                break
            if self.path is not None and record.epoch < recipe.epochs:
                self._checkpoint["now"] = {
                    "growth": growth.state_dict(),
                    "model": model.state_dict(),
                    "training": training.state_dict(),
                    "seconds": before + monotonic() - begun,
                }
                self._write(validate)
        growth.finish()
        return GrowthResult(
            model,
            growth.history,
            validate(),
            None,
            parameter_count(model),
            host,
            before + monotonic() - begun,
            recipe.price,
        )

    def _write(self, validate: Evaluator) -> None:
        """Write the checkpoint."""
        self._checkpoint["scale"] = validate.scale.first
        if self.path is not None:
            self._checkpoint["random"] = resume_file.random_state(self.recipe.loaders)
            resume_file.write(self.path, self._checkpoint)


def _silent(_: str) -> None:
    pass
