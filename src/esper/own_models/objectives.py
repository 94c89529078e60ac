"""Losses by name, and the score of a module: one number that growth is decided by.

A score is at most 1, and 1 is perfect. For classes it is the expected accuracy, as in the engine;
for regression it is the explained variance R²; for any other loss it is the share of the first
validation loss that is gone. Where that first loss is not above 0, as the negative log-likelihood
of a density may be, each nat below it leaves 1/e of the rest; see ``validation.Scale``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.own_models.samples import prediction

Loss = Callable[[Any, Any], Tensor]
"""Maps output and target of a batch to a scalar, the mean loss of the batch."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss and what the score needs.

    Attributes:
        name: name of the loss.
        loss: see ``Loss``.
        sums: maps output and target to float64 sums that add up over batches; None if the score
            comes from the loss.
        scores: maps these sums to accuracy (None where there is none) and score.
        classes: whether the task has classes, between which a model can guess.
    """

    name: str
    loss: Loss
    sums: Callable[[Any, Any], Tensor] | None = None
    scores: Callable[[Tensor], tuple[float | None, float]] | None = None
    classes: bool = False


def objective(loss: str | Loss) -> Objective:
    """The objective of a loss, by its name in ``OBJECTIVES`` or a callable.

    Raises:
        UsageError: there is no loss of that name, or it is a class.
    """
    if isinstance(loss, type):
        raise UsageError(f"loss: got the class {loss.__name__}; give an instance of it")
    if not isinstance(loss, str):
        if not callable(loss):
            raise UsageError(f"loss: got a {type(loss).__name__}; give a name or a function")
        return Objective(getattr(loss, "__name__", type(loss).__name__), loss)
    if loss not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise UsageError(f"loss: {loss!r} is not one of {known}; give one or a function")
    return OBJECTIVES[loss]


def class_logits(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[n, K]`` and int64 labels ``[n]``.

    The classes are on the last axis or on axis 1. Where both fit, they are on axis 1 of images
    ``[B, K, H, W]``, and on the last axis of sequences ``[B, T, K]``.

    Raises:
        UsageError: the shapes do not fit, or the labels are no integers.
    """
    logits = prediction(output)
    if target.is_floating_point() or target.is_complex():
        raise UsageError(
            f"loss: cross_entropy got a target {tuple(target.shape)} of {_dtype(target)} for "
            f"logits {tuple(logits.shape)}; give integers (target.long()), or probabilities in the "
            "shape of the logits"
        )
    if logits.ndim == target.ndim + 1:
        first = (logits.shape[0], *logits.shape[2:]) == tuple(target.shape)
        if logits.shape[:-1] != target.shape or (first and logits.ndim == 4):
            logits = logits.movedim(1, -1)
    if logits.shape[:-1] != target.shape:
        raise UsageError(
            f"loss: cross_entropy got logits {tuple(logits.shape)} and target "
            f"{tuple(target.shape)}; labels have the shape of the logits without the classes"
        )
    return logits.flatten(0, -2), target.flatten().long()


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _cross_entropy(output: Any, target: Tensor) -> Tensor:
    logits = prediction(output)
    if logits.shape == target.shape:
        # Probabilities of the classes instead of labels.
        return F.cross_entropy(logits, target)
    return F.cross_entropy(*class_logits(output, target))


def _class_sums(output: Any, target: Tensor) -> Tensor:
    logits = prediction(output)
    if logits.shape == target.shape:
        target = target.argmax(1)
    logits, labels = class_logits(output, target)
    kept = labels >= 0
    logits, labels = logits[kept].float(), labels[kept]
    probability = logits.softmax(-1).gather(1, labels[:, None])
    hits = logits.argmax(-1) == labels
    return torch.stack([hits.double().sum(), probability.double().sum(), kept.double().sum()])


def _share(sums: Tensor) -> tuple[float | None, float]:
    hits, expected, count = sums.tolist()
    return hits / max(count, 1.0), expected / max(count, 1.0)


def _shaped(target: Tensor, values: Tensor, name: str) -> Tensor:
    """The target in the shape of ``values``, which may differ in axes of length 1 alone.

    Raises:
        UsageError: they differ in others; numbers would be compared that do not belong together.
    """
    one, two = ([n for n in x.shape if n != 1] for x in (values, target))
    if one != two:
        raise UsageError(
            f"loss: {name} got outputs {tuple(values.shape)} and a target {tuple(target.shape)}; "
            "give both the same axes in the same order"
        )
    return target.view_as(values)


def _binary(output: Any, target: Tensor) -> Tensor:
    logits = prediction(output)
    truth = _shaped(target.to(logits.dtype), logits, "binary_cross_entropy")
    return F.binary_cross_entropy_with_logits(logits, truth)


def _binary_sums(output: Any, target: Tensor) -> Tensor:
    logits = prediction(output).float()
    truth = _shaped(target, logits, "binary_cross_entropy") > 0.5
    right = torch.where(truth, logits, -logits)
    count = torch.tensor(float(right.numel()), dtype=torch.float64, device=logits.device)
    return torch.stack([(right > 0).double().sum(), right.sigmoid().double().sum(), count])


def _regression(function: Callable[[Tensor, Tensor], Tensor], name: str) -> Loss:
    def loss(output: Any, target: Tensor) -> Tensor:
        values = prediction(output)
        return function(values, _shaped(target.to(values.dtype), values, name))

    return loss


def _square_sums(output: Any, target: Tensor) -> Tensor:
    """Squared errors, squares and sums of the targets, and their number, per output: ``[4, D]``."""
    values = prediction(output).double()
    truth = _shaped(target.double(), values, "the score")
    values, truth = (x.reshape(len(x), -1) for x in (values, truth))
    ones = torch.ones_like(truth)
    parts = (values - truth).square(), truth.square(), truth, ones
    return torch.stack([part.sum(0) for part in parts])


def _explained(sums: Tensor) -> tuple[float | None, float]:
    errors, squares, total, count = sums
    spread = squares - total.square() / count
    return None, float(1.0 - errors.sum() / spread.sum().clamp(min=1e-12))


def _own_loss(output: Any, target: Any) -> Tensor:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise UsageError(
            "loss: 'model' needs an output with a 'loss', as a key or an attribute; give another"
        )
    return found


OBJECTIVES = {
    "cross_entropy": Objective("cross_entropy", _cross_entropy, _class_sums, _share, True),
    "binary_cross_entropy": Objective("binary_cross_entropy", _binary, _binary_sums, _share),
    "mse": Objective("mse", _regression(F.mse_loss, "mse"), _square_sums, _explained),
    "l1": Objective("l1", _regression(F.l1_loss, "l1"), _square_sums, _explained),
    "huber": Objective("huber", _regression(F.huber_loss, "huber"), _square_sums, _explained),
    "model": Objective("model", _own_loss),
}
"""Losses by name. ``model`` is the loss that a dict output contains."""
