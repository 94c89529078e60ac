"""V-trace: value targets and advantages from the experience of an older policy.

Espeholt et al., "IMPALA: Scalable distributed deep-RL with importance weighted actor-learner
architectures" (ICML 2018).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.simic.advantage import step_errors


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
