"""IMPALA: V-trace, its estimator for the update, and an actor older than the learner.

Espeholt et al., "IMPALA: Scalable distributed deep-RL with importance weighted actor-learner
architectures" (ICML 2018).
"""

import copy
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from esper.kasmina.transfer import moved
from esper.leyline.metrics import Metric
from esper.simic.actor import PolicyActor
from esper.simic.advantage import Estimates, generalised_advantages, step_errors
from esper.simic.loss import approximate_kl, weighted_mean
from esper.simic.normalise import ObservationMoments, RunningMoments
from esper.simic.rollout import Rollout, episode_pieces, padded
from esper.tamiyo.policy.interface import Evaluation, ObservationT, Policy, full_precision


@dataclass(frozen=True, slots=True)
class VTrace:
    """Result of ``vtrace``, each ``[T, N]``.

    Attributes:
        targets: value targets v.
        rho: the clipped importance ratios.
        errors: ``r + discount q_next - V``, not weighted by ``rho``.
    """

    targets: Tensor
    rho: Tensor
    errors: Tensor

    @property
    def advantages(self) -> Tensor:
        """Advantages of the policy gradient, ``rho`` times ``errors``."""
        return self.rho * self.errors


def vtrace(
    log_ratio: Tensor,
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    discount: float,
    truncated: Tensor | None = None,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    trace_decay: float = 1.0,
) -> VTrace:
    """V-trace targets of the critic and advantages of the actor.

    With the importance ratio ``w_t = exp(log_ratio_t)``, ``rho_t = min(rho_clip, w_t)`` and
    ``c_t = trace_decay min(c_clip, w_t)``, equation 1 and remark 1 of the paper:

    ``delta_t = rho_t (r_t + discount V(s_{t+1}) - V(s_t))``,
    ``v_t = V(s_t) + delta_t + discount c_t (v_{t+1} - V(s_{t+1}))``.

    The advantage is ``rho_t (r_t + discount q_{t+1} - V(s_t))``, where ``q = trace_decay v +
    (1 - trace_decay) V``. The paper has ``q = v``, to which this is equal with a ``trace_decay``
    of 1. With a smaller one, q makes the advantages of on-policy data those of
    ``generalised_advantages``, and the targets its returns. RLax defines q in the same way
    (``vtrace_td_error_and_advantage``).

    Ends of episodes have the meaning that they have in ``generalised_advantages``: nothing follows
    a terminated step, and only the value of the next state follows a truncated one.

    Args:
        log_ratio: log-probability of the action under the policy that learns minus that under the
            policy that acted, ``[T, N]``.
        rewards: ``[T, N]``.
        values: values of the states in which the actions were taken, ``[T, N]``.
        last_value: value of the state after the last step, ``[N]``; unused if that step terminated.
        terminated: bool ``[T, N]``.
        discount: gamma, in [0, 1].
        truncated: bool ``[T, N]``; where it is true at t, ``values`` at t + 1 must be the value of
            the state in which the episode was cut off.
        rho_clip: upper bound of rho. It determines whose value function the targets estimate: at
            infinity that of the policy that learns, near 0 that of the policy that acted.
        c_clip: upper bound of the ratios in a trace. It changes the speed of convergence and the
            variance of the targets, but not the fixed point.
        trace_decay: lambda, in [0, 1].
    """
    one_step, continues = step_errors(rewards, values, last_value, terminated, discount, truncated)
    ratio = log_ratio.exp()
    rho, trace = ratio.clamp(max=rho_clip), trace_decay * ratio.clamp(max=c_clip)
    corrections, errors = torch.empty_like(one_step), torch.empty_like(one_step)
    correction = torch.zeros_like(last_value)
    for t in reversed(range(len(rewards))):
        following = discount * continues[t] * correction
        errors[t] = one_step[t] + trace_decay * following
        correction = rho[t] * one_step[t] + trace[t] * following
        corrections[t] = correction
    return VTrace(values + corrections, rho, errors)


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
            hidden = rollout.hidden or policy.initial_hidden(rollout.actions.shape[1])
            observation = moments.normalise(rollout.observation)
            evaluation = policy.evaluate_actions(observation, rollout.actions, hidden)
            return evaluation.log_prob, evaluation.value, torch.zeros_like(rollout.last_value)
        # Without a memory the steps of an environment are one piece.
        valid = rollout.valid if rollout.hidden else torch.ones_like(rollout.valid)
        return _pieces_of_episodes(policy, moments, rollout, valid)


def _pieces_of_episodes(
    policy: Policy[ObservationT],
    moments: ObservationMoments[ObservationT],
    rollout: Rollout[ObservationT],
    valid: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    first, environment, lengths = episode_pieces(valid)
    evaluation = evaluate_pieces(policy, moments, rollout, first, environment, lengths)

    # The inverse of the gathering: the piece that contains each step, and the place in it.
    begins = torch.cat([torch.ones_like(valid[:1]), ~valid])
    piece = (begins.T.flatten().cumsum(0) - 1).view(begins.shape[1], -1).T
    row = torch.arange(len(begins))[:, None] - first[piece]
    device = rollout.actions.device
    piece, row = moved(piece, device), moved(row, device)
    log_prob, value = evaluation.log_prob[row, piece], evaluation.value[row, piece]
    return log_prob[:-1], value[:-1], value[-1]


def evaluate_pieces(
    policy: Policy[ObservationT],
    moments: ObservationMoments[ObservationT],
    rollout: Rollout[ObservationT],
    first: Tensor,
    environment: Tensor,
    lengths: Tensor,
) -> Evaluation:
    """Evaluate pieces of a rollout, as ``episode_pieces`` returns them, in one call, ``[L, M]``.

    A piece that begins at step 0 continues from the rollout's recurrent state, others from zeros.
    Row T is the state after the last step, in which no action was taken.
    """
    assert rollout.last_observation is not None, "the rollout ends within episodes"
    device = rollout.actions.device
    index, _ = padded(first, lengths)
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
    return policy.evaluate_actions(moments.normalise(observation), actions, hidden)


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
        log_prob, *normals = reevaluate(policy, observation_moments, rollout)
        values, last_value = rollout.with_cut_offs(*map(return_moments.restore, normals))
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


class LaggedActor(Generic[ObservationT]):
    """Copies of a policy and its moments as they were after each of the last updates.

    The lag is artificial: it reproduces in one process, deterministically, what actors in other
    processes see when their weights arrive late.

    Args:
        learner: the actor with the weights that the updates change.
        lag: number of updates L by which the actor is behind, at least 1. In the first L rounds it
            acts with the initial weights.

    Attributes:
        actor: acts with the weights and moments of L updates ago.
    """

    def __init__(self, learner: PolicyActor[ObservationT], lag: int):
        assert lag > 0, "without a lag the learner itself acts"
        self._learner, self._lag = learner, lag
        policy, moments = copy.deepcopy((learner.policy, learner.moments))
        self.actor = learner.acting_with(policy, moments)
        self._waiting: deque[dict[str, Any]] = deque()

    def note_update(self) -> None:
        """Store what an update left, and move the actor forward by one update if it is due."""
        self._waiting.append(snapshot(self._learner))
        if len(self._waiting) > self._lag:
            load_snapshot(self.actor, self._waiting.popleft())

    def state(self) -> dict[str, Any]:
        """The weights and moments of the actor and of those that wait, oldest first."""
        acting = snapshot(self.actor)
        return {str(i): parts for i, parts in enumerate([acting, *self._waiting])}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned.

        Raises:
            RuntimeError, ValueError, KeyError: the state is that of another network.
        """
        oldest, *waiting = (state[str(i)] for i in range(len(state)))
        load_snapshot(self.actor, oldest)
        self._waiting = deque(copy.deepcopy(waiting))


def snapshot(actor: PolicyActor[Any]) -> dict[str, Any]:
    """Copies of an actor's weights and moments, by part."""
    return {
        "policy": {name: x.detach().clone() for name, x in actor.policy.state_dict().items()},
        "moments": {name: part.state() for name, part in actor.moments.parts().items()},
    }


def load_snapshot(actor: PolicyActor[Any], parts: dict[str, Any]) -> None:
    """Give an actor the weights and moments of which ``snapshot`` made copies.

    Raises:
        RuntimeError, ValueError, KeyError: they are those of another network.
    """
    actor.policy.load_state_dict(parts["policy"])
    for name, moments in actor.moments.parts().items():
        moments.load(parts["moments"][name])
