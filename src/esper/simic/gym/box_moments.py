"""How observations of a Gymnasium task are brought to one scale.

Rewards are not touched: the learner normalises returns and advantages, so their size is of no
consequence.
"""

import torch
from torch import Tensor

from esper.simic.normalise import RunningMoments
from esper.tamiyo.policy.recurrent import FlatObservation


class FlatMoments:
    """Moments of the features of observations.

    Args:
        width: features of an observation.
        device: where they live.
        active: whether features are normalised; zeros and ones are better left as they are.
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
        """See ``ObservationMoments.update``; what an episode ended with is left out."""
        if not self.active:
            return
        features = observation.features
        if valid is not None:
            # Rows that are not finite are left out; to index them would wait for the device.
            features = torch.where(valid[..., None].to(features.device), features, float("nan"))
        self.features.update(features)

    def parts(self) -> dict[str, RunningMoments]:
        """See ``ObservationMoments.parts``."""
        return {"features": self.features}
