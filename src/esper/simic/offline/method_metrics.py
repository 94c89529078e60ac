"""The metrics that every method of offline learning reports."""

import torch
from torch import Tensor

from esper.leyline.metrics import Metric
from esper.simic.loss import weighted_mean
from esper.simic.trainer import Batch
from esper.tamiyo.policy.interface import Evaluation


def method_metrics(
    evaluation: Evaluation, batch: Batch, loss: Tensor, policy_loss: Tensor, value_loss: Tensor
) -> dict[str, Tensor]:
    """The metrics by name, detached; scalars, or ``[heads]``."""
    with torch.no_grad():
        weight = batch.weight[..., None]
        entropy, choice = evaluation.head_entropy * weight, evaluation.head_choice * weight
        chosen, steps = choice.sum((0, 1)), batch.weight.sum()
        metrics = {
            Metric.LOSS: loss,
            Metric.POLICY_LOSS: policy_loss,
            Metric.VALUE_LOSS: value_loss,
            Metric.NEGATIVE_LOG_LIKELIHOOD: weighted_mean(-evaluation.log_prob, batch.weight),
            Metric.ENTROPY: entropy.sum() / steps,
            Metric.HEAD_ENTROPY: entropy.sum((0, 1)) / chosen.clamp(min=1.0),
            Metric.HEAD_CHOICE: chosen / steps,
        }
    return {name: value.detach() for name, value in metrics.items()}
