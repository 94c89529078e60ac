"""Evaluation of a rollout's actions and states by the policy as it is now."""

import torch
from torch import Tensor

from esper.kasmina.transfer import moved
from esper.simic.observation_moments import ObservationMoments
from esper.simic.rollout import Rollout
from esper.simic.sequences import episode_pieces, padded
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
            found = _whole_episodes(policy, moments, rollout)
            return found.log_prob, found.value, torch.zeros_like(rollout.last_value)
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
    places, _ = padded(first, lengths)
    # Row T of what follows is the state after the last step, in which no action was taken.
    last, seen = rollout.last_observation.tensors(), rollout.observation.tensors()
    time, column = moved(places, device), moved(environment, device)
    tensors = {
        name: torch.cat([x, last[name][None].to(x.device)])[time, column]
        for name, x in seen.items()
    }
    observation = type(rollout.observation).from_tensors(tensors)
    actions = torch.cat([rollout.actions, rollout.actions[-1:]])[time, column]
    continues = moved(first == 0, device)[:, None]
    hidden = tuple(torch.where(continues, state[:, column], 0.0) for state in rollout.hidden)
    found = policy.evaluate_actions(moments.normalise(observation), actions, hidden)

    # The inverse of the gathering above: the piece that contains each step, and the place in it.
    begins = torch.cat([torch.ones_like(valid[:1]), ~valid])
    piece = (begins.T.flatten().cumsum(0) - 1).view(begins.shape[1], -1).T
    place = torch.arange(len(begins))[:, None] - first[piece]
    piece, place = moved(piece, device), moved(place, device)
    log_prob, value = found.log_prob[place, piece], found.value[place, piece]
    return log_prob[:-1], value[:-1], value[-1]
