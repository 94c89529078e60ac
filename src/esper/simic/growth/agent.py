"""The learner of growth policies, and its moments of observations."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from esper.leyline.config import LearnerConfig
from esper.leyline.config.setting import assignments
from esper.leyline.errors import UsageError, first_line
from esper.simic.advantage import GeneralisedEstimator
from esper.simic.graphs import agent_class
from esper.simic.growth.group_baseline import GroupedEstimator
from esper.simic.normalise import RunningMoments
from esper.simic.ppo import PPOAgent
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
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


def head_weights(
    config: LearnerConfig, heads: Sequence[str], device: torch.device
) -> Tensor | None:
    """Factors of the entropy weight by head, ``[heads]``; None if no head has its own."""
    factors = assignments("entropy_per_head", config.entropy_per_head, heads)
    if not factors:
        return None
    return torch.tensor([factors.get(head, 1.0) for head in heads], device=device)


def growth_agent(
    config: LearnerConfig,
    seed: int,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    compile_mode: str = "off",
    learner_arguments: Mapping[str, Any] | None = None,
    initial: dict[str, dict[str, Any]] | None = None,
    baseline_group: int | None = None,
    features: FeatureNames | None = None,
) -> PPOAgent[Observation]:
    """A learner of growth policies.

    Args:
        config, seed, device, compile_mode: see ``PPOAgent``.
        amp_dtype: dtype of the policy's trunk, see ``Policy.amp_dtype``.
        learner_arguments: those of an algorithm other than PPO, see ``AlgorithmConfig``.
        initial: state of an agent whose weights and moments are taken, see ``PPOAgent.state``.
        baseline_group: see ``TrainConfig.baseline_group``.
        features: the features that the policy observes; all of this version if None.

    Raises:
        UsageError: the initial state is that of another network.
    """

    def network() -> FactoredLSTM:
        policy = FactoredLSTM(config.lstm_hidden, features=features)
        policy.amp_dtype = amp_dtype
        if initial is not None:
            policy.load_state_dict(initial["policy"])
        return policy

    kind = agent_class(device, compile_mode)
    moments = GrowthMoments(device, features)
    arguments = dict(learner_arguments or {})
    if baseline_group is not None:
        estimator = arguments.get("estimator") or GeneralisedEstimator.of(config)
        arguments["estimator"] = GroupedEstimator(estimator, baseline_group)
    try:
        if initial is not None:
            # Before the agent is made: an older copy of it, if any, begins with the same.
            for name, part in moments.parts().items():
                part.load(initial["moments"][name])
        agent = kind(config, seed, device, network, moments, compile_mode, **arguments)
        if initial is not None:
            agent.return_moments.load(initial["moments"]["return"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        if initial is None:
            raise
        reason = first_line(error)
        raise UsageError(
            f"initial_policy: it belongs to another network ({reason}); give another run"
        ) from error
    agent.head_weights = head_weights(config, agent.policy.heads, device)
    return agent
