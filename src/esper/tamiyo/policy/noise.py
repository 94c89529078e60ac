"""Uniform numbers for sampling actions, keyed by environment."""

from torch import Tensor

from esper.kasmina.rng import Purpose, StepBits, to_uniform, uniform
from esper.leyline.actions import HEADS


def action_noise(
    seed: int,
    environments: Tensor,
    episode: int,
    step: int,
    widest: int,
    purpose: int = Purpose.ACTION,
) -> Tensor:
    """Uniform numbers for ``Policy.act``, keyed by environment, ``[N, heads, widest]``."""
    draws = uniform(seed, environments, purpose, episode, step, len(HEADS) * widest)
    return draws.view(len(environments), len(HEADS), widest)


class EpisodeNoise:
    """``action_noise`` for the steps of an episode, drawn for many steps at a time.

    Args:
        seed, environments, episode, widest: as for ``action_noise``.
        heads: number of heads.
        steps: number of steps that are likely to be drawn.
    """

    def __init__(
        self,
        seed: int,
        environments: Tensor,
        episode: int,
        widest: int,
        heads: int = len(HEADS),
        steps: int = 2**16,
    ):
        self.shape = len(environments), heads, widest
        self.bits = StepBits(seed, environments, Purpose.ACTION, episode, heads * widest, steps)
        self.words = self.noise = self.bits.bits

    def at(self, step: int) -> Tensor:
        """The noise of ``step``, ``[N, heads, widest]``."""
        self.bits.at(step)
        if self.words is not self.bits.bits:
            self.words = self.bits.bits
            self.noise = to_uniform(self.words).view(-1, *self.shape)
        return self.noise[step - self.bits.begin]
