"""Estimation of advantages and value targets with V-trace."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.transfer import moved
from esper.leyline.metrics import Metric
from esper.simic.advantage import Estimates, generalised_advantages
from esper.simic.impala.vtrace import vtrace
from esper.simic.loss import approximate_kl, weighted_mean
from esper.simic.normalise import ObservationMoments, RunningMoments
from esper.simic.rollout import Rollout, episode_pieces, padded
from esper.tamiyo.policy.interface import Evaluation, ObservationT, Policy, full_precision


@torch.no_grad()
def reevaluate(
    policy: Policy[ObservationT],
    moments: ObservationMoments[ObservationT],
    rollout: Rollout[ObservationT],
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and values of a rollout under the current weights and moments.

    The recurrent state at the start of the rollout is that of the policy that acted; the current
    policy computes all later ones. All sequences pass through the memory in one call.

    Args:
        policy: evaluates the rollout.
        moments: normalise its observations.
        rollout: may have been collected with other weights and moments.

    Returns:
        log-probs of the actions ``[T, N]``; normalised values ``[T, N]``, which in a step that only
        reset are those of the final observation of an episode; and the normalised value of the
        state after the last step ``[N]``, 0 if all episodes ended with that step.
    """
    with full_precision(rollout.actions.device):
        if rollout.valid is None:
            evaluation = _whole_episodes(policy, moments, rollout)
            return evaluation.log_prob, evaluation.value, torch.zeros_like(rollout.last_value)
        return _pieces_of_episodes(policy, moments, rollout, rollout.valid)


def _whole_episodes(
    policy: Policy[ObservationT],
    moments: ObservationMoments[ObservationT],
    rollout: Rollout[ObservationT],
) -> Evaluation:
    hidden = rollout.hidden or policy.initial_hidden(rollout.actions.shape[1])
    observation = moments.normalise(rollout.observation)
    return policy.evaluate_actions(observation, rollout.actions, hidden)


def _pieces_of_episodes(
    policy: Policy[ObservationT],
    moments: ObservationMoments[ObservationT],
    rollout: Rollout[ObservationT],
    valid: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    assert rollout.last_observation is not None, "the rollout ends within episodes"
    device = rollout.actions.device
    first, environment, lengths = episode_pieces(valid)
    index, _ = padded(first, lengths)
    # Row T of what follows is the state after the last step, in which no action was taken.
    last, observations = rollout.last_observation.tensors(), rollout.observation.tensors()
    time, column = moved(index, device), moved(environment, device)
    tensors = {
        name: torch.cat([x, last[name][None].to(x.device)])[time, column]
        for name, x in observations.items()
    }
    observation = type(rollout.observation).from_tensors(tensors)
    actions = torch.cat([rollout.actions, rollout.actions[-1:]])[time, column]
    continues = moved(first == 0, device)[:, None]
    hidden = tuple(torch.where(continues, state[:, column], 0.0) for state in rollout.hidden)
    evaluation = policy.evaluate_actions(moments.normalise(observation), actions, hidden)

    # The inverse of the gathering above: the piece that contains each step, and the place in it.
    begins = torch.cat([torch.ones_like(valid[:1]), ~valid])
    piece = (begins.T.flatten().cumsum(0) - 1).view(begins.shape[1], -1).T
    row = torch.arange(len(begins))[:, None] - first[piece]
    piece, row = moved(piece, device), moved(row, device)
    log_prob, value = evaluation.log_prob[row, piece], evaluation.value[row, piece]
    return log_prob[:-1], value[:-1], value[-1]


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
        correction: whether to correct the lag. If false, every importance ratio is taken to be 1,
            as in the control "No-correction" of Espeholt et al. (2018).
    """

    discount: float
    trace_decay: float
    rho_clip: float
    c_clip: float
    correction: bool

    def estimate(
        self,
        rollout: Rollout[Any],
        policy: Policy[Any],
        observation_moments: ObservationMoments[Any],
        return_moments: RunningMoments,
    ) -> Estimates:
        """See ``Estimator.estimate``."""
        log_prob, normals, last = reevaluate(policy, observation_moments, rollout)
        values, last_value = return_moments.restore(normals), return_moments.restore(last)
        log_ratio = log_prob - rollout.log_prob
        weight = None
        if rollout.valid is not None:
            valid = moved(rollout.valid, values.device)
            weight = valid.to(values.dtype)
            # Log-probs of steps that only reset are arbitrary, and their ratio may overflow.
            log_ratio = torch.where(valid, log_ratio, 0.0)
        # Without a lag, rounding puts ratios on both sides of 1.
        excess = log_ratio.exp() > self.rho_clip * (1.0 + _ROUNDING)
        metrics = {
            Metric.LAG_KL: approximate_kl(log_ratio, weight),
            Metric.RHO_CLIP_FRACTION: weighted_mean(excess.float(), weight),
        }
        if rollout.lag is not None:
            metrics[Metric.VERSION_LAG] = torch.full_like(metrics[Metric.LAG_KL], rollout.lag)
        if not self.correction:
            log_ratio = torch.zeros_like(log_ratio)
        rewards, ends = rollout.rewards, rollout.terminated
        inputs = rewards, values, last_value, ends, self.discount
        clips = self.rho_clip, self.c_clip, self.trace_decay
        trace = vtrace(log_ratio, *inputs, rollout.cut_off, *clips)
        _, returns = generalised_advantages(*inputs, 1.0, rollout.cut_off)
        return Estimates(values, trace.errors, trace.targets, returns, log_prob, trace.rho, metrics)
