"""The interface by which a learner normalises the observations of its policy."""

from typing import Protocol

from torch import Tensor

from esper.simic.normalise import RunningMoments
from esper.tamiyo.policy.interface import ObservationT


class ObservationMoments(Protocol[ObservationT]):
    """Running moments of observations, constant between updates."""

    def normalise(self, observation: ObservationT) -> ObservationT:
        """The normalised observation, which the network receives."""
        ...

    def update(self, observation: ObservationT, valid: Tensor | None) -> None:
        """Include the observations of a rollout, ``[T, N]``; only ``valid`` ones if given."""
        ...

    def parts(self) -> dict[str, RunningMoments]:
        """The moments by name, for the checkpoint."""
        ...
