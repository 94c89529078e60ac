"""How a learner normalises the observations of its policy."""

from typing import Protocol

from torch import Tensor

from esper.simic.normalise import RunningMoments
from esper.tamiyo.policy.interface import ObservationT


class ObservationMoments(Protocol[ObservationT]):
    """Running moments of observations, frozen from one update to the next."""

    def normalise(self, observation: ObservationT) -> ObservationT:
        """The observation as the network sees it."""
        ...

    def update(self, observation: ObservationT, valid: Tensor | None) -> None:
        """Take in a rollout's observations ``[T, N]``; only those that are ``valid``."""
        ...

    def parts(self) -> dict[str, RunningMoments]:
        """The moments by name, for the checkpoint."""
        ...
