"""Losses by name, and the score of a module: one number that growth is decided by.

A score is at most 1, and 1 is perfect. For classes it is the expected accuracy, as in the engine;
for regression it is the explained variance R²; for any other loss it is the share of the first
validation loss that is gone. Where that first loss is not above 0, as the negative log-likelihood
of a density may be, each nat below it leaves 1/e of the rest; see ``Scale``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, isfinite, nan
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from esper.kasmina.nested import rebuilt
from esper.kasmina.transfer import CPU
from esper.leyline.errors import UsageError, first_line
from esper.own_models.samples import (
    OUTPUTS,
    Unpack,
    call,
    evaluating,
    prediction,
    sample_count,
    to_device,
    unpack,
)

Loss = Callable[[Any, Any], Tensor]
"""Maps output and target of a batch to a scalar, the mean loss of the batch."""

Unit = Literal["accuracy", "R²", "loss", "metric", "score"]
"""What the figure of a validation is, see ``Validation``."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss and what the score needs.

    Attributes:
        name: name of the loss.
        loss: see ``Loss``.
        unit: unit of the figure that a user looks at where there is no metric.
        terms: maps output and target to float64 ``[B]``, whose mean over the samples is the
            accuracy, or of which the variance of the targets makes R²; None without either.
        sums: maps output and target to float64 sums that add up over batches; None if the score
            comes from the loss.
        scores: maps these sums to accuracy (None where there is none) and score.
    """

    name: str
    loss: Loss
    unit: Unit = "loss"
    terms: Callable[[Any, Any], Tensor] | None = None
    sums: Callable[[Any, Any], Tensor] | None = None
    scores: Callable[[Tensor], tuple[float | None, float]] | None = None

    @property
    def classes(self) -> bool:
        """Whether the task has classes, between which a model can guess."""
        return self.name == "cross_entropy"


def objective(loss: str | Loss) -> Objective:
    """The objective of a loss: a name in ``OBJECTIVES``, a module of torch's, or a callable.

    Raises:
        UsageError: there is no loss of that name, or it is a class.
    """
    if isinstance(loss, type):
        raise UsageError(f"loss: got the class {loss.__name__}; give an instance of it")
    if not isinstance(loss, str):
        if not callable(loss):
            raise UsageError(f"loss: got a {type(loss).__name__}; give a name or a function")
        if type(loss) in OF_MODULES:
            return _of_module(loss)
        return Objective(getattr(loss, "__name__", type(loss).__name__), loss)
    if loss not in OBJECTIVES:
        names = ", ".join(OBJECTIVES)
        raise UsageError(f"loss: {loss!r} is not one of {names}; give one or a function")
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
    logits, labels = class_logits(output, target)
    try:
        return F.cross_entropy(logits, labels)
    except IndexError as error:
        raise UsageError(
            f"loss: a label is outside the {logits.shape[-1]} classes of the output "
            f"({first_line(error)}); count labels from 0, or give the model more outputs"
        ) from error


def _class_sums(output: Any, target: Tensor) -> Tensor:
    logits = prediction(output)
    if logits.shape == target.shape:
        target = target.argmax(1)
    logits, labels = class_logits(output, target)
    mask = labels >= 0
    logits, labels = logits[mask].float(), labels[mask]
    probability = logits.softmax(-1).gather(1, labels[:, None])
    hits = logits.argmax(-1) == labels
    return torch.stack([hits.double().sum(), probability.double().sum(), mask.double().sum()])


def _hits_of_samples(output: Any, target: Tensor) -> Tensor:
    logits = prediction(output)
    samples = len(target)
    if logits.shape == target.shape:
        target = target.argmax(1)
    logits, labels = class_logits(output, target)
    hits = (logits.argmax(-1) == labels).double().masked_fill(labels < 0, float("nan"))
    return hits.view(samples, -1).nanmean(1)


def _share(sums: Tensor) -> tuple[float | None, float]:
    hits, probability, count = sums.tolist()
    return hits / max(count, 1.0), probability / max(count, 1.0)


def _reshape(target: Tensor, values: Tensor, name: str) -> Tensor:
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
    truth = _reshape(target.to(logits.dtype), logits, "binary_cross_entropy")
    return F.binary_cross_entropy_with_logits(logits, truth)


def _binary_sums(output: Any, target: Tensor) -> Tensor:
    logits = prediction(output).float()
    truth = _reshape(target, logits, "binary_cross_entropy") > 0.5
    right = torch.where(truth, logits, -logits)
    count = torch.tensor(float(right.numel()), dtype=torch.float64, device=logits.device)
    return torch.stack([(right > 0).double().sum(), right.sigmoid().double().sum(), count])


def _binary_hits(output: Any, target: Tensor) -> Tensor:
    logits = prediction(output).float()
    truth = _reshape(target, logits, "binary_cross_entropy") > 0.5
    return ((logits > 0) == truth).double().reshape(len(logits), -1).mean(1)


def _regression(function: Callable[[Tensor, Tensor], Tensor], name: str) -> Loss:
    def loss(output: Any, target: Tensor) -> Tensor:
        values = prediction(output)
        return function(values, _reshape(target.to(values.dtype), values, name))

    return loss


def square_sums(output: Any, target: Tensor) -> Tensor:
    """Squared errors, squares and sums of the targets, and their number, per output: ``[4, D]``."""
    values = prediction(output).double()
    truth = _reshape(target.double(), values, "the score")
    values, truth = (x.reshape(len(x), -1) for x in (values, truth))
    ones = torch.ones_like(truth)
    parts = (values - truth).square(), truth.square(), truth, ones
    return torch.stack([part.sum(0) for part in parts])


def _square_errors(output: Any, target: Tensor) -> Tensor:
    values = prediction(output).double()
    truth = _reshape(target.double(), values, "the score")
    return (values - truth).square().reshape(len(values), -1).sum(1)


def _r_squared(sums: Tensor) -> tuple[float | None, float]:
    errors, squares, total, count = sums
    deviations = squares - total.square() / count
    return None, float(1.0 - errors.sum() / deviations.sum().clamp(min=1e-12))


def _own_loss(output: Any, target: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UsageError(
            "loss: 'model' needs an output with a 'loss', as a key or an attribute; give another"
        )
    return loss


_hits = partial(Objective, unit="accuracy", scores=_share)
_errors = partial(Objective, unit="R²", scores=_r_squared, terms=_square_errors, sums=square_sums)
OBJECTIVES = {
    each.name: each
    for each in (
        _hits("cross_entropy", _cross_entropy, terms=_hits_of_samples, sums=_class_sums),
        _hits("binary_cross_entropy", _binary, terms=_binary_hits, sums=_binary_sums),
        _errors("mse", _regression(F.mse_loss, "mse")),
        _errors("l1", _regression(F.l1_loss, "l1")),
        _errors("huber", _regression(F.huber_loss, "huber")),
        Objective("model", _own_loss),
    )
}
"""Losses by name. ``model`` is the loss that a dict output contains."""

OF_MODULES: dict[Any, str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy",
    nn.MSELoss: "mse",
    nn.L1Loss: "l1",
    nn.SmoothL1Loss: "huber",
    nn.HuberLoss: "huber",
}
"""The losses of torch that have accuracy or R² as those with a name have."""


def _of_module(module: Any) -> Objective:
    """The objective of a loss module of torch, with its weights, smoothing and label label."""
    base = OBJECTIVES[OF_MODULES[type(module)]]
    if not base.classes:

        def loss(output: Any, target: Tensor) -> Tensor:
            values = prediction(output)
            result: Tensor = module(values, _reshape(target.to(values.dtype), values, base.name))
            return result

        return replace(base, loss=loss)

    def labels(target: Tensor) -> Tensor:
        # What the module ignores counts neither as right nor as wrong.
        return target if target.is_floating_point() else _masked(target, module.ignore_index)

    def cross_entropy(output: Any, target: Tensor) -> Tensor:
        logits = prediction(output)
        pair = (logits, target) if logits.shape == target.shape else class_logits(output, target)
        result: Tensor = module(*pair)
        return result

    terms, sums = base.terms, base.sums
    assert terms is not None
    assert sums is not None
    return replace(
        base, loss=cross_entropy, terms=lambda output, target: terms(output, labels(target)),
        sums=lambda output, target: sums(output, labels(target)),
    )  # fmt: skip


def _masked(target: Tensor, label: int) -> Tensor:
    return target.masked_fill(target == label, -100)


MAX_NATS = 50.0
"""Nats above the first value beyond which a score falls no further, lest it overflow."""


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of a validation.

    Attributes:
        loss: mean loss over the samples.
        score: at most 1, higher is better; see ``objectives``.
        accuracy: fraction of right classes; None without classes.
        metric: value of the user's metric; None without one.
        unit: what ``figure`` is: the metric, else the accuracy, else R² of a named loss of
            numbers, else the loss; ``score`` if nothing but a score is known.
    """

    loss: float
    score: float
    accuracy: float | None = None
    metric: float | None = None
    unit: Unit = "score"

    @property
    def figure(self) -> float:
        """What the user looks at, see ``unit``."""
        values = {"accuracy": self.accuracy, "metric": self.metric, "loss": self.loss}
        value = values.get(self.unit)
        return self.score if value is None else value

    @property
    def net(self) -> float:
        """The figure where higher is better and 1 is perfect; NaN if the training diverged."""
        if self.unit == "accuracy":
            return self.figure if isfinite(self.loss) else nan
        return self.score

    def shown(self) -> str:
        """The figure with its unit."""
        if self.unit == "accuracy":
            return f"accuracy {100 * self.figure:.1f} %"
        return f"{self.unit} {self.figure:.4g}"


class Scale:
    """Turns a number where lower is better into a score: what share of its first value is gone.

    A first value that is not above 0 has no share that could be gone. The number then counts as a
    logarithm, such as a negative log-likelihood of a density: each nat below the first value leaves
    1/e of the rest.

    Attributes:
        first: the first finite value; None before it.
    """

    def __init__(self) -> None:
        self.first: float | None = None

    def score(self, value: float) -> float:
        """``1 - value / first``; ``1 - exp(value - first)`` where first is not above 0.

        It is NaN until a value is finite.
        """
        if self.first is None:
            if not isfinite(value):
                return nan
            self.first = value
        if self.first > 0.0:
            return 1.0 - value / self.first
        return 1.0 - exp(min(value - self.first, MAX_NATS))


Metric = Callable[[Any, Any], float]
"""Maps all predictions and targets of a split, joined along the samples, to a number. One with
``update``, ``compute`` and ``reset``, as in torchmetrics, is updated batch by batch instead.

Where the loss is the user's own or the module's, a dict output without a key of
``samples.OUTPUTS`` is the prediction as it is. Dicts, tuples and lists are joined element by
element, None stays None, and of tensors without an axis there is one per batch."""


@dataclass
class Evaluator:
    """Validates a module on a loader, in evaluation mode and without drawing a random number.

    Attributes:
        model: the module.
        loader: batches; read once per validation.
        objective: loss and score.
        device: device of the module.
        metric: see ``Metric``; the score then comes from it.
        higher_is_better: whether a higher metric is better.
        unpack: splits a batch.
        amp_dtype: dtype of autocast; None for none.
        scale: turns a loss or metric into a score; scores of one scale can be compared.
    """

    model: nn.Module
    loader: Iterable[Any]
    objective: Objective
    device: torch.device
    metric: Any = None
    higher_is_better: bool = True
    unpack: Unpack = unpack
    amp_dtype: torch.dtype | None = None
    scale: Scale = field(default_factory=Scale)

    def __call__(self) -> Validation:
        """Validate once.

        Raises:
            UsageError: the loader yields nothing, the metric is above 1 and higher is better, or
                what it needs of several batches cannot be joined.
        """
        total, count, sums = 0.0, 0, None
        pairs: list[tuple[Any, Any]] = []
        gathers = self.metric is not None and not hasattr(self.metric, "update")
        with evaluating(self.model, self.loader):
            for inputs, target, output in self.outputs():
                with autocast(self.device, self.amp_dtype):
                    loss = self.objective.loss(output, target)
                samples = sample_count(inputs)
                total, count = total + float(loss) * samples, count + samples
                if self.objective.sums is not None:
                    batch_sums = self.objective.sums(output, target)
                    sums = batch_sums if sums is None else sums + batch_sums
                if gathers:
                    pairs.append(to_device((self.metric_input(output), target), CPU))
                elif self.metric is not None:
                    self.metric.update(self.metric_input(output), target)
        if count == 0:
            raise UsageError("validation_loader: it yields no batch; give one that does")
        return self._result(total / count, sums, self._metric_value(pairs))

    def outputs(self) -> Iterator[tuple[Any, Any, Any]]:
        """Inputs, target and output of each batch, on the device; call it in evaluation mode."""
        for batch in self.loader:
            inputs, target = to_device(self.unpack(batch), self.device)
            with autocast(self.device, self.amp_dtype):
                output = call(self.model, inputs)
            yield inputs, target, output

    def metric_input(self, output: Any) -> Any:
        """What the metric gets of an output: the prediction, or a whole dict that names none."""
        named_loss = self.objective.sums is not None
        unknown_keys = isinstance(output, Mapping) and not any(key in output for key in OUTPUTS)
        return output if unknown_keys and not named_loss else prediction(output)

    def _metric_value(self, pairs: list[tuple[Any, Any]]) -> float | None:
        if self.metric is None:
            return None
        if not pairs:
            value = float(self.metric.compute())
            self.metric.reset()
            return value
        predictions, targets = zip(*pairs, strict=True)
        return float(self.metric(joined(predictions), joined(targets)))

    def _result(self, loss: float, sums: Tensor | None, metric: float | None) -> Validation:
        accuracy = None
        if sums is not None and self.objective.scores is not None:
            accuracy, score = self.objective.scores(sums)
        if metric is not None:
            score = as_score(metric, self.higher_is_better, self.scale)
        elif sums is None:
            score = self.scale.score(loss)
        unit = self.objective.unit if metric is None else "metric"
        return Validation(loss, score, accuracy, metric, unit)


def joined(parts: list[Any] | tuple[Any, ...]) -> Any:
    """Predictions or targets of all batches as one, see ``Metric``.

    Raises:
        UsageError: they cannot be joined.
    """
    first = parts[0]
    try:
        if isinstance(first, Tensor):
            return torch.cat(parts) if first.ndim else torch.stack(parts)
        if isinstance(first, Mapping):
            if any(part.keys() != first.keys() for part in parts):
                raise _join_error("their keys differ")
            return {key: joined([part[key] for part in parts]) for key in first}
        if isinstance(first, tuple | list) and not isinstance(first, PackedSequence):
            return rebuilt(first, [joined(each) for each in zip(*parts, strict=True)])
    except UsageError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise _join_error(first_line(error)) from error
    if any(part is not None for part in parts):
        raise _join_error(f"one is a {type(first).__name__}")
    return None


def _join_error(reason: str) -> UsageError:
    return UsageError(
        f"metric: predictions or targets of the batches cannot be joined ({reason}); give an "
        "object with update and compute"
    )


def as_score(value: float, higher_is_better: bool, scale: Scale) -> float:
    """A metric as a score of at most 1.

    Raises:
        UsageError: it is above 1 though higher is better.
    """
    if not higher_is_better:
        return scale.score(value)
    if value > 1.0 + 1e-6:
        raise UsageError(
            f"metric: got {value:.4g}, but 1 is perfect; give a fraction instead of percent, or "
            "higher_is_better=False"
        )
    return value


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision in ``dtype``; none if it is None."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
