"""``esper.grow``: train and grow a module of the user's own in one call."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.kasmina.grafts.attachment import grown_seeds, load_grown, strip
from esper.kasmina.grafts.written_code import rebuilding_code
from esper.leyline.errors import UsageError
from esper.simic.growth.collect import Actor
from esper.simic.growth.rewards import utility
from esper.simic.own_models.controller import Growth
from esper.simic.own_models.history import EpochRecord, draw
from esper.tamiyo.policy.features import USUAL_RENT
from esper.tolaria.own_model import samples
from esper.tolaria.own_model.grafted_model import copied_state, parameter_count
from esper.tolaria.own_model.objectives import Loss, objective
from esper.tolaria.own_model.samples import Unpack, first_batch, moved
from esper.tolaria.own_model.training_loop import Training
from esper.tolaria.own_model.validation import Evaluator, Validation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNING_RATE = 1e-3
"""Learning rate of AdamW, the optimizer if none is given."""

Callback = Callable[[EpochRecord], object]
"""Called after every epoch; training ends if it returns True."""


@dataclass
class GrowthResult:
    """A module that was trained and grown.

    Attributes:
        model: the module that was passed, grown in place: of the same class, trainable, with seeds
            as submodules called ``seed``.
        history: what happened, by epoch.
        validation: validation of the finished module.
        test: the same on the test split; None without one.
        parameters: parameters of the finished module.
        host_parameters: parameters of the module before it grew.
        seconds: wall time of the try that was kept.
        tries: validation score minus price of each try.
    """

    model: nn.Module
    history: list[EpochRecord]
    validation: Validation
    test: Validation | None
    parameters: int
    host_parameters: int
    seconds: float
    tries: list[float] = field(default_factory=list)

    @property
    def seeds(self) -> dict[str, str]:
        """Blueprint of each seed, by the name of the module behind which it hangs."""
        return {name: seed.blueprint for name, seed in grown_seeds(self.model).items()}

    def plot(self, path: str | Path | None = None) -> "Figure":
        """See ``history.draw``."""
        return draw(self.history, path)

    def save(self, folder: str | Path) -> Path:
        """Write ``state_dict.pt`` and ``rebuild.py``, which together need torch but not Esper.

        ``rebuild.rebuild(model, "state_dict.pt")`` turns a module built as before it grew into the
        grown one.

        Args:
            folder: made if it does not exist.

        Returns:
            the folder.
        """
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), where / "state_dict.pt")
        (where / "rebuild.py").write_text(rebuilding_code(self.model))
        return where


def grow(
    model: nn.Module,
    train_loader: Iterable[Any],
    validation_loader: Iterable[Any],
    *,
    loss: str | Loss = "cross_entropy",
    epochs: int = 40,
    slots: Sequence[str] | None = None,
    policy: str | Actor = "heuristic",
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    metric: Any = None,
    higher_is_better: bool = True,
    test_loader: Iterable[Any] | None = None,
    price: float = USUAL_RENT,
    max_parameters: int | None = None,
    tries: int = 1,
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
            ``LEARNING_RATE`` if None.
        scheduler: makes a scheduler from the optimizer; None for a constant rate.
        metric: see ``validation.Metric``; growth is then decided by it.
        higher_is_better: whether the metric is like an accuracy (1 is perfect) or like a loss.
        test_loader: batches for the final result alone.
        price: score that growth by a factor of e must gain to pay.
        max_parameters: most parameters of the module with all its seeds.
        tries: number of times to train from the same initial weights; the try with the best
            validation score minus price is kept.
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
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: got a {type(model).__name__}; give an nn.Module")
    if not isinstance(tries, int) or tries < 1:
        raise UsageError(f"tries: got {tries!r}; give a whole number from 1")
    unpack = samples.unpack_for(loss, unpack)
    where = _device(model, device)
    goal, report = objective(loss), print if progress else None
    examples = first_batch(train_loader, "train_loader")
    evaluator = partial(
        Evaluator,
        model,
        objective=goal,
        device=where,
        metric=metric,
        higher_is_better=higher_is_better,
        unpack=unpack,
        amp_dtype=amp_dtype,
    )
    validate = evaluator(validation_loader)
    first_batch(validation_loader, "validation_loader")

    def attempt(number: int) -> GrowthResult:
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise UsageError("model: no parameter requires a gradient; unfreeze some")
        made = optimizer(trained) if optimizer else AdamW(trained, lr=LEARNING_RATE)
        growth = Growth(
            model,
            made,
            policy=policy,
            epochs=epochs,
            validate=validate,
            example=moved(unpack(examples)[0], where),
            slots=slots,
            higher_is_better=higher_is_better,
            price=price,
            max_parameters=max_parameters,
            seed=seed + number,
            report=report,
        )
        training = Training(
            model,
            train_loader,
            goal,
            made,
            where,
            scheduler(made) if scheduler else None,
            None if clip is None else partial(growth.clip, clip),
            unpack,
            amp_dtype,
        )
        return _run(growth, training, validate, callbacks)

    initial = copied_state(model) if tries > 1 else {}
    best, kept, worths = None, initial, []
    for number in range(tries):
        if number:
            strip(model).load_state_dict(initial)
        result = attempt(number)
        worths.append(_worth(result, price))
        if report and tries > 1:
            report(f"try {number + 1}/{tries}: {worths[-1]:.4f} on validation after the price")
        if best is None or worths[-1] > max(worths[:-1]):
            best, kept = result, copied_state(model) if tries > 1 else kept
    assert best is not None
    if tries > 1:
        load_grown(strip(model), kept)
    best.tries = worths
    if test_loader is not None:
        best.test = evaluator(test_loader)()
    return best


def _run(
    growth: Growth, training: Training, validate: Evaluator, callbacks: Sequence[Callback]
) -> GrowthResult:
    """Train and grow to the end."""
    begun, host = monotonic(), parameter_count(growth.model)
    growth.begin()
    for _ in range(growth.epochs):
        loss = training.epoch()
        validation = validate()
        training.end_epoch(validation.loss)
        record = growth.step(validation, train_loss=loss)
        if any([callback(record) is True for callback in callbacks]):
            break
    growth.finish()
    return GrowthResult(
        growth.model,
        growth.history,
        validate(),
        None,
        parameter_count(growth.model),
        host,
        monotonic() - begun,
    )


def _worth(result: GrowthResult, price: float) -> float:
    added = torch.tensor([result.parameters - result.host_parameters])
    score = torch.tensor([result.validation.score])
    return float(utility(score, added, result.host_parameters, torch.tensor([price])))


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device to train on; moves the module there."""
    if device is not None:
        found = torch.device(device)
        model.to(found)
        return found
    example = next(model.parameters(), None)
    return torch.device("cpu") if example is None else example.device
