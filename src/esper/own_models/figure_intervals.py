"""Intervals of the difference of two networks on the same samples, in the user's own figure."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.own_models.objectives import Evaluator, joined, square_sums
from esper.own_models.samples import evaluating

Z = 1.96
"""Standard deviations of a normal distribution on either side of 95 %."""
RESAMPLES = 200
"""Draws of the samples by which the interval of a metric is estimated."""


@dataclass(frozen=True, slots=True)
class SampleValues:
    """What the samples of a split contribute to the figure of a network.

    Attributes:
        terms: float64 ``[n]``, whose mean is accuracy or R²; None where there is a metric.
        metric: the metric; None without one.
        prediction: predictions, ``[n, ...]``; None without a metric.
        target: targets, ``[n, ...]``; None without a metric.
    """

    terms: Tensor | None = None
    metric: Any = None
    prediction: Tensor | None = None
    target: Tensor | None = None


def sample_values(validate: Evaluator) -> SampleValues | None:
    """What the samples contribute to the figure of a module as it is.

    Returns:
        None where the figure is neither a mean over the samples nor a metric of tensors.
    """
    function, metric = validate.objective.terms, validate.metric
    if (metric is None and function is None) or hasattr(metric, "update"):
        return None
    parts: list[Any] = []
    sums = torch.zeros(())
    with evaluating(validate.model, validate.loader):
        for _, target, output in validate.outputs():
            if metric is not None:
                parts.append((validate.metric_input(output), target))
                continue
            assert function is not None
            parts.append(function(output, target).cpu())
            if validate.objective.unit == "R²":
                sums = sums + square_sums(output, target).cpu()
    if metric is not None:
        prediction, target = (joined(each) for each in zip(*parts, strict=True))
        tensors = isinstance(prediction, Tensor) and isinstance(target, Tensor)
        if not tensors or len(prediction) != len(target):
            return None
        return SampleValues(metric=metric, prediction=prediction, target=target)
    terms = torch.cat(parts)
    if validate.objective.unit == "R²":
        _, squares, total, count = sums
        deviations = (squares - total.square() / count).sum().clamp(min=1e-12)
        terms = 1.0 - terms * len(terms) / deviations
    return SampleValues(terms)


def interval(first: SampleValues | None, second: SampleValues | None) -> tuple[float, float] | None:
    """The 95 % interval of the figure of the first minus that of the second; None if unknown.

    Of a mean it is that of the normal law over paired samples, of a metric that of percentiles of
    the paired bootstrap (Efron and Tibshirani, 1993).
    """
    if first is None or second is None:
        return None
    if first.terms is not None and second.terms is not None:
        differences = first.terms - second.terms
        differences = differences[~differences.isnan()]
        error = Z * float(differences.std()) / max(len(differences), 1) ** 0.5
        return float(differences.mean()) - error, float(differences.mean()) + error
    assert first.prediction is not None
    assert second.prediction is not None
    assert first.target is not None
    generator = torch.Generator().manual_seed(0)
    count, values = len(first.prediction), []
    for _ in range(RESAMPLES):
        index = torch.randint(count, (count,), generator=generator).to(first.prediction.device)
        target = first.target[index]
        one = float(first.metric(first.prediction[index], target))
        values.append(one - float(second.metric(second.prediction[index], target)))
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
