"""Normalisation of the observations of a Gymnasium task.

Rewards are not normalised: the learner normalises returns and advantages, so the scale of rewards
does not matter.
"""

import torch
from torch import Tensor

from esper.simic.normalise import RunningMoments
from esper.tamiyo.policy.recurrent import FlatObservation


class FlatMoments:
    """Moments of the features of observations.

    Args:
        width: number of features of an observation.
        device: device of the moments.
        active: whether features are normalised; one-hot features should not be.
    """

    def __init__(self, width: int, device: torch.device, active: bool):
        self.features = RunningMoments((width,), device)
        self.active = active

    def normalise(self, observation: FlatObservation) -> FlatObservation:
        """See ``ObservationMoments.normalise``."""
        if not self.active:
            return observation
        return FlatObservation(self.features.normalise(observation.features), observation.masks)

    def update(self, observation: FlatObservation, valid: Tensor | None) -> None:
        """See ``ObservationMoments.update``; ignores the final observations of episodes."""
        if not self.active:
            return
        features = observation.features
        if valid is not None:
            # Moments ignore rows of NaN; boolean indexing would make the CPU wait for the device.
            features = torch.where(valid[..., None].to(features.device), features, float("nan"))
        self.features.update(features)

    def parts(self) -> dict[str, RunningMoments]:
        """See ``ObservationMoments.parts``."""
        return {"features": self.features}
