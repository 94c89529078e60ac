"""The vine: learning from episodes that share host and data and part where their actions differ."""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.metrics import Metric
from esper.simic.loss import weighted_mean
from esper.simic.normalise import RunningMoments
from esper.simic.offline.method_metrics import method_metrics
from esper.simic.trainer import Batch
from esper.tamiyo.policy.interface import Evaluation


@dataclass(frozen=True, slots=True)
class Vine:
    """Expected return of the policy among the recorded episodes of a group.

    The episodes of a group have host and data in common, so those whose actions agree up to a step
    are in one state there, and their returns say what each of the actions that follow is worth. It
    is the vine of Schulman et al., "Trust region policy optimization" (2015), section 5.2, in which
    rollouts branch from common states; here they branch wherever the recorded policies did.

    Let ``p_i`` be the product over the steps of episode i of the probability of its action,
    normalised among the actions that were recorded in its state. The ``p_i`` of a group add up to
    1, and ``J = sum_i p_i G_i`` is the return that the policy expects if it stays among them. Its
    gradient is exact: no action is sampled, no importance ratio and no critic is needed. To
    ``-J / temperature`` is added the negative log-probability that the policy stays, per step;
    where all episodes of a state agree, that is behaviour cloning. And ``-mean_i log p_i`` keeps
    every branch possible: without it a branch that a new policy almost never takes, such as a
    prune, has a gradient of almost 0, and its worth is never learned.

    Attributes:
        value_weight: weight of the critic's error; the critic is fitted to the returns.
        return_moments: relate the critic's normalised values to the units of the rewards; J is in
            standard deviations of the returns.
        temperature: the lower, the more J counts and the less staying does.
        entropy: weight of keeping every branch possible.
    """

    value_weight: float
    return_moments: RunningMoments
    temperature: float
    entropy: float

    def __call__(self, evaluation: Evaluation, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Loss``."""
        stay, log_chosen = branches(evaluation.log_prob, batch)
        chosen = log_chosen.exp()
        returns = self.return_moments.scale(batch.returns)
        expected = (chosen * relative(returns[0], batch.group)).sum() / chosen.sum()
        stay_loss = weighted_mean(-stay, batch.weight)
        value_loss = 0.5 * weighted_mean((evaluation.value - returns).square(), batch.weight)
        policy_loss = stay_loss - expected / self.temperature - self.entropy * log_chosen.mean()
        loss = policy_loss + self.value_weight * value_loss
        metrics = method_metrics(evaluation, batch, loss, policy_loss, value_loss)
        return loss, metrics | {Metric.EXPECTED_GAIN: expected.detach()}


def branches(log_prob: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Where the episodes of a batch part, and how probable each of them is.

    Args:
        log_prob: of the recorded actions under the policy, ``[T, B]``.
        batch: episodes in whole groups.

    Returns:
        log-probability of each step that the action is one of those recorded in its state,
        ``[T, B]``; log-probability of each episode among those of its group, ``[B]``. Episodes with
        the same actions throughout share their probability equally.
    """
    actions, inside = batch.actions, batch.weight > 0
    equal = (actions[:, :, None] == actions[:, None]).all(-1)
    # Steps after the end of an episode pad it, and no action is chosen there.
    together = inside[:, :, None] == inside[:, None]
    group = batch.group[:, None] == batch.group
    before = torch.cat([torch.ones_like(equal[:1]), equal[:-1]]).cumprod(0).bool()
    state = before & group & together
    taken = state & equal
    # Each action counts once, however many episodes took it.
    share = log_prob - taken.sum(-1).log()
    stay = share[:, None].expand(taken.shape).masked_fill(~state, -torch.inf).logsumexp(-1)
    followed = torch.where(inside, log_prob - stay, 0.0).sum(0)
    return stay, followed - taken[-1].sum(-1).log()


def relative(returns: Tensor, group: Tensor) -> Tensor:
    """``returns [B]`` minus their mean over the group of each, int64 ``[B]``."""
    same = (group[:, None] == group).to(returns.dtype)
    return returns - same @ returns / same.sum(-1)
