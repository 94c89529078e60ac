"""Attempts at training a module from the same initial weights, of which the best is kept.

An attempt that was interrupted resumes after its last whole epoch; results are bit-identical.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from esper.kasmina.wider_layers import layer_sizes, parameter_count
from esper.leyline.errors import UsageError
from esper.leyline.phases import current_phase, phase
from esper.own_models.attachment import (
    SEED_GROUP,
    copied_state,
    grown_seeds,
    optimizer_of,
    strip,
    updates,
)
from esper.own_models.best_epoch import BestEpoch
from esper.own_models.controller import Growth
from esper.own_models.figure_intervals import interval, sample_values
from esper.own_models.growth_result import EpochRecord, GrowthResult, comparable
from esper.own_models.objectives import Evaluator, Objective, Scale, Validation, autocast
from esper.own_models.options import GrowOptions, to_resume
from esper.own_models.samples import (
    Unpack,
    call,
    check_finite,
    length,
    random_state,
    sample_count,
    set_random_state,
    to_device,
    unpack,
)
from esper.tamiyo.baselines import SEARCHES, Actor

if TYPE_CHECKING:
    from esper.own_models.run_log import RunLog
    from esper.own_models.width_search import WidthSearch

PER_BATCH = (OneCycleLR, CyclicLR)
"""Schedulers that step after every minibatch; others step after every epoch."""


@dataclass
class Training:
    """Trains a module on a loader.

    Attributes:
        model: the module.
        loader: minibatches; read once per epoch.
        objective: the loss.
        optimizer: updates the parameters.
        device: device of the module.
        scheduler: see ``PER_BATCH``; for ``ReduceLROnPlateau`` see ``end_epoch``.
        clip: clips the gradients before an update; None for none.
        unpack: splits a batch.
        amp_dtype: dtype of autocast; float16 on CUDA also scales the loss.
        higher_is_better: whether a higher metric is better.
    """

    model: nn.Module
    loader: Iterable[Any]
    objective: Objective
    optimizer: Optimizer
    device: torch.device
    scheduler: LRScheduler | None = None
    clip: Callable[[], None] | None = None
    unpack: Unpack = unpack
    amp_dtype: torch.dtype | None = None
    higher_is_better: bool = True
    _eval_modules: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        needs_scale = self.amp_dtype == torch.float16 and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=needs_scale)
        self._is_frozen = not any(p.requires_grad for p in self.model.parameters())
        if self.model.training:
            # Parts that the user put in evaluation mode, as a pretrained BatchNorm, stay there.
            self._eval_modules = [module for module in self.model.modules() if not module.training]

    def epoch(self) -> float:
        """Train one epoch.

        Returns:
            the mean loss over the samples.

        Raises:
            UsageError: the loader yields nothing.
        """
        # Of a model that is frozen as a whole, nothing changes but its seeds.
        self.model.train(not self._is_frozen)
        for module in self._eval_modules:
            module.training = False
        # Schedule-free optimizers train other weights than those that are validated.
        train, end = (getattr(self.optimizer, name, lambda: None) for name in ("train", "eval"))
        train()
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        current, batches = current_phase(), length(self.loader)
        for batch in self.loader:
            inputs, target = to_device(self.unpack(batch), self.device)
            self.optimizer.zero_grad()
            with autocast(self.device, self.amp_dtype):
                loss = self.objective.loss(call(self.model, inputs), target)
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
                if self.clip is not None:
                    self.scaler.unscale_(self.optimizer)
                    self.clip()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if isinstance(self.scheduler, PER_BATCH):
                self.scheduler.step()
            samples = sample_count(inputs)
            total, count = total + loss.detach() * samples, count + samples
            if current and batches:
                current.advance(1 / batches)
        end()
        if count == 0:
            raise UsageError("train_loader: it yields no batch; give one that does")
        return float(total) / count

    def end_epoch(self, validation: Validation) -> None:
        """Step a scheduler of epochs.

        ``ReduceLROnPlateau`` gets the metric if its mode is that of the metric: ``max`` where
        higher is better, else ``min``. Otherwise it gets the score in mode ``max``, and the loss
        in mode ``min``.
        """
        if isinstance(self.scheduler, ReduceLROnPlateau):
            rises = self.scheduler.mode == "max"
            value = validation.score if rises else validation.loss
            if validation.metric is not None and rises == self.higher_is_better:
                value = validation.metric
            self.scheduler.step(value)
        elif self.scheduler is not None and not isinstance(self.scheduler, PER_BATCH):
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of optimizer, scheduler and loss scaler."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else _state_of(self.scheduler),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.optimizer.load_state_dict(content["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])
        self.scaler.load_state_dict(content["scaler"])


def _state_of(scheduler: LRScheduler) -> dict[str, Any]:
    """The state of a scheduler without what only its factory knows."""
    return {k: v for k, v in scheduler.state_dict().items() if not callable(v)}


LEARNING_RATE = 1e-3
"""Learning rate of AdamW, the optimizer if none is given."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How every attempt trains.

    Attributes:
        options: see ``grow``; ``unpack`` is the one that fits the loss.
        train_loader: the training data.
        loaders: everything that may hold a generator.
        objective: the loss.
        device: device of the module.
        example: inputs by which the slots are found.
        log: where every epoch is written; None for nowhere.
    """

    options: GrowOptions
    train_loader: Iterable[Any]
    loaders: tuple[object, ...]
    objective: Objective
    device: torch.device
    example: Any
    log: "RunLog | None" = None

    def report(self, line: str) -> None:
        """Print at once, also into a pipe."""
        if self.options.progress:
            print(line, flush=True)

    def optimizer(self, model: nn.Module, initial: nn.Module) -> Optimizer:
        """The optimizer for ``model``: that of ``initial``, if it was made of its parameters."""
        make = self.options.optimizer or partial(AdamW, lr=LEARNING_RATE)
        parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        optimizer = make(parameters or [{"params": [], "name": SEED_GROUP}])
        if model is not initial and not updates(optimizer, model):
            # It was made from the parameters of the module that was passed, not from its arguments.
            optimizer = optimizer_of(optimizer, initial, model)
        return optimizer

    def training(self, model: nn.Module, growth: Growth) -> Training:
        """The training of ``model`` with the optimizer of its growth."""
        options, optimizer = self.options, growth.optimizer
        return Training(
            model, self.train_loader, optimizer=optimizer,
            scheduler=options.scheduler(optimizer) if options.scheduler else None,
            clip=None if options.clip is None else partial(growth.clip, options.clip),
            **self._shared(),
        )  # fmt: skip

    def evaluator(self, model: nn.Module, loader: Iterable[Any], scale: Scale) -> Evaluator:
        """The validation of ``model`` on a loader."""
        return Evaluator(model, loader, metric=self.options.metric, scale=scale, **self._shared())

    def retain(self, model: nn.Module) -> Evaluator | None:
        """The validation of ``model`` on data that it knew before; None without such data."""
        loader = self.options.retain_loader
        return None if loader is None else self.evaluator(model, loader, Scale())

    def _shared(self) -> dict[str, Any]:
        options = {x: getattr(self.options, x) for x in ("unpack", "amp_dtype", "higher_is_better")}
        return {"objective": self.objective, "device": self.device, **options}


@dataclass
class _Parts:
    """What an attempt consists of; ``seconds`` have passed in it."""

    growth: Growth
    search: "WidthSearch | None"
    best: BestEpoch | None
    training: Training
    validate: Evaluator
    observe: Callable[[EpochRecord], None] | None
    seconds: float

    @property
    def copies(self) -> list[tuple[str, int]]:
        """See ``GrowthResult.copies``."""
        return self.search.copies if self.search else []

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs to go on."""
        return {
            "growth": self.growth.state_dict(),
            "search": None if self.search is None else self.search.state_dict(),
            "best": None if self.best is None else self.best.state_dict(),
            "model": self.training.model.state_dict(),
            "training": self.training.state_dict(),
            "seconds": self.seconds,
        }


class Attempts:
    """Trains variants of a module, each ``tries`` times, with a checkpoint for a later process.

    Args:
        recipe: how to train.
        initial: the module with its initial weights.

    Raises:
        UsageError: the file belongs to other options, or cannot be read or written.
    """

    def __init__(self, recipe: Recipe, initial: nn.Module):
        self.recipe, self.tries, self.initial = recipe, recipe.options.tries, initial
        file = recipe.options.checkpoint
        self.path = None if file is None else Path(file)
        self._keeps = self.tries > 1 or self.path is not None
        parameters = [f"{name} {tuple(p.shape)}" for name, p in initial.named_parameters()]
        settings = {"model": parameters, **to_resume(recipe.options)}
        checkpoint = None
        if self.path is not None:
            from esper.own_models import resume_file  # only who resumes needs it

            checkpoint = resume_file.read(self.path, settings)
        random = random_state(recipe.loaders)
        self._checkpoint: dict[str, Any] = checkpoint or {
            "settings": settings, "initial": copied_state(initial) if self._keeps else None,
            "begun": random, "now": None, "scale": None, "random": random, "variants": {},
        }  # fmt: skip
        evaluator = recipe.retain(initial)
        self._old_data = {"before": evaluator()} if evaluator else {}
        if checkpoint is not None:
            set_random_state(checkpoint["random"], recipe.loaders)

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
        report, checkpoint = self.recipe.report, self._checkpoint
        entry = checkpoint["variants"].setdefault(name, {"worths": [], "best": None, "state": None})
        validate.scale.first = checkpoint["scale"]
        if self._keeps:
            from esper.own_models import loading  # who has one variant and one try needs it not
        for number in range(len(entry["worths"]), self.tries):
            state = checkpoint["now"]
            if state is None:
                if self._keeps:
                    loading.reset(model, checkpoint["initial"])
                    model.load_state_dict(checkpoint["initial"])
                if number == 0:
                    set_random_state(checkpoint["begun"], self.recipe.loaders)
            else:
                report(f"resuming after epoch {len(state['growth']['history'])} from {self.path}")
            log = self.recipe.log
            observe = None if log is None else partial(log.epoch, name, number + 1)
            result = self._attempt(model, policy, validate, number, state, observe)
            net_score = result.worth
            if all(comparable(net_score) > comparable(each) for each in entry["worths"]):
                entry["best"] = result.plain()
                entry["state"] = copied_state(model) if self._keeps else None
            entry["worths"].append(net_score)
            checkpoint["now"] = None
            if self.tries > 1:
                text = f"{net_score:.4f} on validation after the price"
                report(f"try {number + 1}/{self.tries}: {text}")
            self._write(validate)
        if self._keeps:
            loading.reset(model, checkpoint["initial"])
            loading.load_grown(model, entry["state"])
        result = GrowthResult.from_plain(model, entry["best"])
        result.tries = list(entry["worths"])
        if self.tries > 1:
            best = result.tries.index(max(result.tries, key=comparable)) + 1
            report(f"kept try {best} of {self.tries}, the best on validation")
        return result

    def _attempt(
        self, model: nn.Module, policy: str | Actor, validate: Evaluator, number: int,
        state: dict[str, Any] | None, observe: Callable[[EpochRecord], None] | None,
    ) -> GrowthResult:  # fmt: skip
        """Train and grow to the end, from the start or from the state of an earlier process."""
        recipe, options, host = self.recipe, self.recipe.options, parameter_count(model)
        seed, sizes = options.seed + number, layer_sizes(model)
        before, search = state["seconds"] if state else 0.0, None
        if policy in SEARCHES:
            from esper.own_models.width_search import WidthSearch

            search = WidthSearch(model, options, seed, deepens=policy == "deepen")
            policy = "never"
        growth = Growth(
            model, recipe.optimizer(model, self.initial), validate=validate, example=recipe.example,
            report=recipe.report if options.progress else None,
            **options.of_growth() | {"policy": policy, "seed": seed},
        )  # fmt: skip
        training = recipe.training(model, growth)
        best = BestEpoch(model, options.price) if options.seeks_best_epoch else None
        if state is None:
            growth.begin()
        else:
            growth.load_state_dict(state["growth"])
            if search is not None:
                search.load_state_dict(state["search"], state["model"], training)
            if best is not None:
                best.load_state_dict(state["best"])
            model.load_state_dict(state["model"])
            training.load_state_dict(state["training"])
            set_random_state(self._checkpoint["random"], recipe.loaders)
        parts = _Parts(growth, search, best, training, validate, observe, before)
        self._train(parts)
        growth.finish()
        validation, copies = validate(), parts.copies
        if best and best.worth > best.net_worth(validation, parameter_count(model)):
            last, values = validation, sample_values(validate)
            copies = best.exchange(model, copies)
            bounds = interval(sample_values(validate), values)
            if bounds is not None and bounds[0] <= 0.0 <= bounds[1]:
                copies = best.exchange(model, copies)
            else:
                validation = validate()
                growth.note_end(
                    f"epoch {best.epoch} is handed back, the best after the price: "
                    f"{validation.shown()} on validation instead of {last.shown()}"
                )
        return GrowthResult(
            model, growth.history, validation, None, parameter_count(model), host, parts.seconds,
            options.price, widths=_changes(sizes, layer_sizes(model)),
            old_data=self._retention(model), copies=copies,
        )  # fmt: skip

    def _train(self, parts: "_Parts") -> None:
        """Train the epochs that are left, with a checkpoint after each."""
        recipe, options, growth = self.recipe, self.recipe.options, parts.growth
        search, training, validate = parts.search, parts.training, parts.validate
        retain, first = recipe.retain(training.model), len(growth.history)
        begun = monotonic() - parts.seconds
        with phase("training", options.epochs - first, "epochs") as current:
            for epoch in range(first, options.epochs):
                current.done = float(epoch - first)
                if search is None:
                    loss = training.epoch()
                else:
                    loss = search.epoch(training, validate, recipe.loaders)
                    growth.notes += search.lines
                validation = validate()
                # What is not finite comes from the data or from the rate; only the data are wrong.
                if not isfinite(loss):
                    check_finite("train_loader", recipe.train_loader, options.unpack)
                if not isfinite(validation.loss):
                    check_finite("validation_loader", validate.loader, options.unpack)
                training.end_epoch(validation)
                old_data = retain() if retain else None
                record = growth.step(validation, train_loss=loss, old_data=old_data)
                parts.seconds = monotonic() - begun
                if parts.best is not None:
                    parts.best.offer(record, training.model, parts.copies)
                callbacks = (*options.callbacks, *([parts.observe] if parts.observe else []))
                if any([callback(record) is True for callback in callbacks]):
                    break
                if self.path is not None and record.epoch < options.epochs:
                    self._checkpoint["now"] = parts.state_dict()
                    self._write(validate)
        if search is not None and search.blend is not None:
            search.blend.undo()  # who trains on does so alone
        parts.seconds = monotonic() - begun

    def _retention(self, model: nn.Module) -> dict[str, Validation]:
        """See ``GrowthResult.old_data``."""
        models = {"after": model}
        if grown_seeds(model):
            models["stripped"] = strip(copy.deepcopy(model))
        evaluators = {name: self.recipe.retain(each) for name, each in models.items()}
        return self._old_data | {name: each() for name, each in evaluators.items() if each}

    def _write(self, validate: Evaluator) -> None:
        """Write the checkpoint."""
        self._checkpoint["scale"] = validate.scale.first
        if self.path is not None:
            from esper.own_models import resume_file

            self._checkpoint["random"] = random_state(self.recipe.loaders)
            resume_file.write(self.path, self._checkpoint)


def _changes(
    before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]
) -> dict[str, dict[str, tuple[int, int]]]:
    """The sizes of the layers that have others than before, see ``GrowthResult.widths``."""
    return {
        name: {key: (before[name].get(key, size), size) for key, size in later.items()}
        for name, later in after.items()
        if later != before.get(name, later)
    }
