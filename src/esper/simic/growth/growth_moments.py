"""Running moments of a growth observation: features of hosts and features of slots."""

from dataclasses import replace

import torch
from torch import Tensor

from esper.simic.normalise import RunningMoments
from esper.tamiyo.policy.features import SIZE_FEATURES, FeatureNames, Observation


class GrowthMoments:
    """Moments of the features of hosts and of slots; ``SIZE_FEATURES`` are not normalised.

    Args:
        device: device of the moments.
        features: the features that the policy observes; all of this version if None.
    """

    def __init__(self, device: torch.device, features: FeatureNames | None = None):
        features = features or FeatureNames.current()
        self._columns = features.columns(device)
        self.host, self.slots = (
            RunningMoments((len(names),), device, torch.tensor([n in SIZE_FEATURES for n in names]))
            for names in (features.host, features.slots)
        )

    def _select(self, observation: Observation) -> Observation:
        """The features that the policy observes."""
        selection = {
            name: getattr(observation, name).index_select(-1, columns)
            for name, columns in self._columns.items()
        }
        return replace(observation, **selection) if selection else observation

    def normalise(self, observation: Observation) -> Observation:
        """See ``ObservationMoments.normalise``; only features that the policy observes are left."""
        observation = self._select(observation)
        return replace(
            observation,
            host=self.host.normalise(observation.host),
            slots=self.slots.normalise(observation.slots),
        )

    def update(self, observation: Observation, valid: Tensor | None) -> None:
        """See ``ObservationMoments.update``; slots that do not exist are ignored."""
        assert valid is None, "growth episodes fill their rollout"
        observation = self._select(observation)
        self.host.update(observation.host)
        # Moments ignore rows of NaN; boolean indexing would make the CPU wait for the device.
        exists = observation.masks.exists[..., None]
        self.slots.update(torch.where(exists, observation.slots, float("nan")))

    def parts(self) -> dict[str, RunningMoments]:
        """See ``ObservationMoments.parts``."""
        return {"host": self.host, "slot": self.slots}
