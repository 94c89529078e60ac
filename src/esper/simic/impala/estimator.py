"""Estimation of advantages and value targets with V-trace."""

from dataclasses import dataclass
from typing import Any

import torch

from esper.kasmina.transfer import moved
from esper.leyline.metrics import Metric
from esper.simic.advantage import generalised_advantages
from esper.simic.estimates import Estimates
from esper.simic.impala.reevaluation import reevaluate
from esper.simic.impala.vtrace import vtrace
from esper.simic.loss import approximate_kl, weighted_mean
from esper.simic.normalise import RunningMoments
from esper.simic.observation_moments import ObservationMoments
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.interface import Policy

_ROUNDING = 1e-4
"""Relative difference of importance ratios that is attributed to float32."""


@dataclass(frozen=True, slots=True)
class VTraceEstimator:
    """V-trace, from the values and log-probs of the policy that learns.

    The acting policy may be older than the one that learns: V-trace corrects this lag. Importance
    ratios in the loss are relative to the policy at the start of the update. In its first step they
    are therefore 1, and the clipped surrogate has the gradient of section 4.2 of Espeholt et al.
    (2018), ``rho_s (r_s + discount v_{s+1} - V(x_s)) d log pi(a_s|x_s)``. With one epoch and one
    minibatch an update is a step of IMPALA; with more it clips as RLlib's APPO does without its
    target network.

    Attributes:
        discount: gamma.
        trace_decay: lambda.
        rho_clip, c_clip: see ``vtrace``.
        corrected: whether to correct the lag. If false, every importance ratio is taken to be 1, as
            in the control "No-correction" of Espeholt et al. (2018).
    """

    discount: float
    trace_decay: float
    rho_clip: float
    c_clip: float
    corrected: bool

    def estimate(
        self,
        rollout: Rollout[Any],
        policy: Policy[Any],
        observation_moments: ObservationMoments[Any],
        return_moments: RunningMoments,
    ) -> Estimates:
        """See ``Estimator.estimate``."""
        log_prob, scaled, last = reevaluate(policy, observation_moments, rollout)
        values, last_value = return_moments.restore(scaled), return_moments.restore(last)
        log_ratio = log_prob - rollout.log_prob
        weight = None
        if rollout.valid is not None:
            valid = moved(rollout.valid, values.device)
            weight = valid.to(values.dtype)
            # Log-probs of steps that only reset are arbitrary, and their ratio may overflow.
            log_ratio = torch.where(valid, log_ratio, 0.0)
        # Without a lag, rounding puts ratios on both sides of 1.
        clipped = log_ratio.exp() > self.rho_clip * (1.0 + _ROUNDING)
        metrics = {
            Metric.LAG_KL: approximate_kl(log_ratio, weight),
            Metric.RHO_CLIP_FRACTION: weighted_mean(clipped.float(), weight),
        }
        if rollout.lag is not None:
            metrics[Metric.VERSION_LAG] = torch.full_like(metrics[Metric.LAG_KL], rollout.lag)
        if not self.corrected:
            log_ratio = torch.zeros_like(log_ratio)
        rewards, ends = rollout.rewards, rollout.terminated
        given = rewards, values, last_value, ends, self.discount
        clips = self.rho_clip, self.c_clip, self.trace_decay
        found = vtrace(log_ratio, *given, rollout.cut_off, *clips)
        _, returns = generalised_advantages(*given, 1.0, rollout.cut_off)
        return Estimates(values, found.errors, found.targets, returns, log_prob, found.rho, metrics)
