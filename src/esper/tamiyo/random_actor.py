"""The control that acts at random."""

import torch
from torch import Tensor

from esper.kasmina.rng import Purpose
from esper.leyline.actions import CANONICAL_CHOICE, HEAD_WIDTHS, Op
from esper.tamiyo.baselines import without_learning
from esper.tamiyo.policy.action_masks import MaskedCategorical, relevance
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.noise import action_noise


class RandomActor:
    """Draws every head uniformly from its legal options.

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self._environments, self._episode = environments, episode

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``."""
        masks = observation.masks
        widest = max(*HEAD_WIDTHS.values(), masks.slots.shape[-1])
        noise = action_noise(
            self.seed, self._environments, self._episode, step, widest, Purpose.RANDOM_POLICY
        )

        def draw(mask: Tensor, head: int) -> Tensor:
            uniform = noise[:, head, : mask.shape[-1]]
            return MaskedCategorical(torch.zeros_like(uniform), mask).sample(uniform)

        op = draw(masks.ops, 0)
        slots = masks.slots_of(op)
        slot = draw(slots, 1)
        slot = torch.where(op == Op.WAIT, CANONICAL_CHOICE["slot"], slot)
        options = masks.choices_of(op, slot)
        choices = [draw(options[:, i], 2 + i) for i in range(options.shape[1])]
        actions, _, value = without_learning(torch.stack([op, slot, *choices], -1))
        legal = torch.stack([mask.sum(-1) for mask in (masks.ops, slots, *options.unbind(1))], -1)
        log_prob = -torch.where(relevance(op), legal, 1).log().sum(-1)
        return actions, log_prob, value
