"""An algorithm of one's own in one file: PPO that learns from the ranks of the advantages.

A rank does not depend on how far away an outlier lies. Installed as an entry point of the group
``esper.algorithms`` (see docs/extending.md), it is a command:

    esper train ranks --gym CartPole-v1 --spread 0.5
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from esper.leyline.config import LearnerConfig
from esper.leyline.config.algorithm import Algorithm, AlgorithmConfig, register
from esper.leyline.config.setting import POSITIVE, setting
from esper.simic.advantage import Estimates, GeneralisedEstimator


@dataclass(frozen=True)
class RankEstimator:
    """Generalised advantages replaced by the normal quantiles of their ranks."""

    plain: GeneralisedEstimator
    spread: float

    def estimate(self, *arguments: Any) -> Estimates:
        """See ``esper.simic.advantage.Estimator``."""
        estimates = self.plain.estimate(*arguments)
        values = estimates.advantages.flatten()
        ranks = values.argsort().argsort().double()
        quantiles = torch.special.ndtri((ranks + 0.5) / len(ranks))
        advantages = self.spread * quantiles.view_as(estimates.advantages).float()
        return replace(estimates, advantages=advantages)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankConfig(AlgorithmConfig):
    """How esper train ranks learns; each field becomes a flag."""

    spread: float = setting(1.0, POSITIVE)
    """Standard deviation of the advantages."""

    def learner_arguments(self, learner: LearnerConfig) -> dict[str, Any]:
        """See ``AlgorithmConfig.learner_arguments``."""
        return {"estimator": RankEstimator(GeneralisedEstimator.of(learner), self.spread)}


register(
    Algorithm(
        name="ranks",
        title="PPO on ranks",
        summary="Train a policy on the ranks of its advantages.",
        description="Train a policy with PPO, from the ranks of the advantages.",
        settings=RankConfig,
    )
)
