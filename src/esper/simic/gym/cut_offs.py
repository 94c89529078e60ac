"""Truncated episodes: from which values they are bootstrapped, and what the critic learns.

What would follow a truncated episode is never observed, and a memory that counts the steps has
never been trained on what it holds at its end. So the value of a final observation is that of a
window of the episode: the memory starts empty at a step drawn at random, and sees the rest. At such
lengths it is trained: on the windows of all truncated episodes, with the targets of their steps,
and on the beginnings of all episodes. The value with the whole memory learns it as its target.
"""

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.rng import Purpose, random_bits
from esper.kasmina.transfer import moved
from esper.simic.advantage import GeneralisedEstimator, generalised_advantages
from esper.simic.impala import evaluate_pieces, reevaluate
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import CutOffs, Rollout, segments
from esper.tamiyo.policy.interface import full_precision


def bootstrap(rollout: Rollout[Any], agent: PPOAgent[Any], again: bool) -> Rollout[Any]:
    """See ``simic.ppo.Bootstrap``; in an update the windows stay the same."""
    if again:
        # A copy: a refused update is repeated from what was collected.
        rollout = copy(rollout)
        if isinstance(agent.estimator, GeneralisedEstimator):  # V-trace evaluates by itself
            evaluation = reevaluate(agent.policy, agent.moments, rollout)
            _, rollout.values, rollout.last_value = evaluation
    elif agent.updates == 0 and not agent.return_moments.count:
        measure_units(rollout, agent)
    cut = rollout.cut_offs or windows(rollout, agent.seed, agent.updates)
    rollout.cut_offs = cut and replace(cut, values=values_of(rollout, cut, agent))
    return rollout


def windows(rollout: Rollout[Any], seed: int, update: int) -> CutOffs | None:
    """The truncated episodes of a rollout, without values; None if there are none.

    Args:
        rollout: of a Gymnasium task.
        seed: seed of the run, from which the beginnings of windows are drawn.
        update: number of the update.
    """
    assert rollout.valid is not None
    first, environment, lengths = segments(rollout.valid)
    end = first + lengths
    cut = rollout.truncated.cpu()[end - 1, environment]
    if not cut.any():
        return None
    first, environment, end = first[cut], environment[cut], end[cut]
    final = torch.zeros(len(rollout.valid) + 1, rollout.valid.shape[1], dtype=torch.bool)
    final[end, environment] = True
    values = torch.full(final.shape, float("nan"), device=rollout.actions.device)
    begin = end
    if rollout.hidden:
        draws = random_bits(seed, torch.arange(1), Purpose.CUT_OFF, update, 0, len(end))[0]
        begin = first + 1 + draws % (end - first)
    return CutOffs(begin, environment, end - begin, final[:-1], values)


def measure_units(rollout: Rollout[Any], agent: PPOAgent[Any]) -> None:
    """Begin the moments with the first rollout, and evaluate it with them.

    It was acted without observations, as nothing is known of their units before. The policy that
    acted and the one that is to learn from it are therefore both nearly uniform.
    """
    assert rollout.valid is not None
    agent.moments.update(rollout.observation, rollout.valid)
    zeros = torch.zeros_like(rollout.values)
    ends = rollout.terminated, agent.config.discount, 1.0, rollout.truncated
    _, returns = generalised_advantages(rollout.rewards, zeros, zeros[0], *ends)
    agent.return_moments.update(agent.without_resets(returns, rollout))
    evaluation = reevaluate(agent.policy, agent.moments, rollout)
    rollout.log_prob, rollout.values, rollout.last_value = evaluation


@torch.no_grad()
def values_of(rollout: Rollout[Any], cut: CutOffs, agent: PPOAgent[Any]) -> Tensor:
    """``CutOffs.values`` by the policy of ``agent``."""
    pieces = cut.first, cut.environment, cut.lengths + 1
    device = rollout.actions.device
    with full_precision(device):
        normals = evaluate_pieces(agent.policy, agent.moments, rollout, *pieces).value
    end, environment = moved(cut.first + cut.lengths, device), moved(cut.environment, device)
    last = normals.gather(0, moved(cut.lengths, device)[None])[0]
    values = torch.full_like(cut.values, float("nan"))
    values[end, environment] = agent.return_moments.restore(last)
    return values
