"""How observations and rewards of a Gymnasium task are brought to one scale."""

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


class RewardScale:
    """Divides rewards by the standard deviation of their discounted sums.

    As Engstrom et al., "Implementation matters in deep policy gradients" (2020), but exact over
    everything seen and frozen while a rollout is collected. Rewards are not shifted: that would pay
    for long episodes.

    Args:
        active: whether rewards are scaled at all.
    """

    def __init__(self, active: bool):
        self.active = active
        self.moments = RunningMoments((), torch.device("cpu"))

    def factor(self) -> float:
        """What rewards are multiplied with."""
        return 1.0 / float(self.moments.deviation) if self.active else 1.0

    def update(self, discounted: Tensor) -> None:
        """Take in discounted sums ``[...]``; those that are not finite are left out."""
        self.moments.update(discounted)
