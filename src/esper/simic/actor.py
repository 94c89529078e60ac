"""A policy that acts: weights, moments of observations, and the recurrent state of environments."""

from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from esper.simic.normalise import ObservationMoments
from esper.tamiyo.policy.interface import ObservationT, Policy, RecurrentState
from esper.tamiyo.policy.noise import EpisodeNoise


class PolicyActor(Generic[ObservationT]):
    """Samples actions from a policy, or takes its mode.

    Args:
        policy: chooses the actions.
        moments: normalise the policy's observations.
        seed: seed of the random draws of actions.
        device: device of the policy.

    Attributes:
        greedy: whether to take the most probable action instead of drawing one.
        hidden: the recurrent state, after ``begin``.
        least_options: fewest options per head for which noise is drawn; it is keyed by them.
    """

    def __init__(
        self,
        policy: Policy[ObservationT],
        moments: ObservationMoments[ObservationT],
        seed: int,
        device: torch.device,
    ):
        self.policy, self.moments, self.seed, self.device = policy, moments, seed, device
        self.greedy, self.least_options = False, 0

    def acting_with(
        self, policy: Policy[ObservationT], moments: ObservationMoments[ObservationT]
    ) -> "PolicyActor[ObservationT]":
        """An actor with another policy and other moments, the same random draws, and no state."""
        return PolicyActor(policy, moments, self.seed, self.device)

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``Actor.begin``."""
        self.hidden: RecurrentState = self.policy.initial_hidden(len(environments))
        self.continue_rollout(environments, episode)

    def continue_rollout(self, environments: Tensor, episode: int, steps: int = 2**16) -> None:
        """Begin a rollout of ``steps`` where the last one ended, with the recurrent state."""
        self._key, self._steps = (self.seed, environments, episode), steps
        self._noise: EpisodeNoise | None = None

    def act(self, observation: ObservationT, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Actor.act``. Sample from the policy, or take its mode if ``greedy``."""
        noise = None if self.greedy else self._draw_noise(observation, step)
        actions, log_prob, value, self.hidden = self._act(observation, self.hidden, noise)
        return actions, log_prob, value

    def _act(
        self, observation: ObservationT, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        return self.policy.act(self.moments.normalise(observation), hidden, noise)

    def value(self, observation: ObservationT) -> Tensor:
        """The critic's normalised value, ``[N]``; does not change the recurrent state."""
        return self._act(observation, self.hidden, None)[2]

    def reset_state(self, rows: Tensor) -> None:
        """Reset the recurrent state of the environments ``rows``, bool ``[N]``."""
        self.hidden = tuple(torch.where(rows[:, None], 0.0, state) for state in self.hidden)

    def _draw_noise(self, observation: ObservationT, step: int) -> Tensor:
        heads, widest = self.policy.noise_shape(observation)
        widest = max(widest, self.least_options)
        if self._noise is None or self._noise.shape[-1] != widest:
            self._noise = EpisodeNoise(*self._key, widest, heads, self._steps)
        return self._noise.at(step)


class OlderActor(Protocol[ObservationT]):
    """Acts in the place of a learner, with weights and moments of an earlier update."""

    @property
    def actor(self) -> PolicyActor[ObservationT]:
        """The actor; the same object after every update."""
        ...

    def note_update(self) -> None:
        """Called after every update of the learner, even if it was refused."""
        ...

    def state(self) -> dict[str, Any]:
        """Nested dictionaries of tensors, for the checkpoint."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``.

        Raises:
            RuntimeError, ValueError, KeyError: the state is that of another network.
        """
        ...
