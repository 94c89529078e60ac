"""Construction of the learner of growth policies."""

from collections.abc import Mapping
from typing import Any

import torch

from esper.leyline.config import LearnerConfig
from esper.leyline.errors import UsageError, first_line
from esper.simic.estimates import GeneralisedEstimator, GroupedEstimator
from esper.simic.graphs.captured_agent import agent_class
from esper.simic.growth.growth_moments import GrowthMoments
from esper.simic.ppo import PPOAgent
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.features import FeatureNames, Observation


def growth_agent(
    config: LearnerConfig,
    seed: int,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    compile_mode: str = "off",
    learner_arguments: Mapping[str, Any] | None = None,
    initial: dict[str, dict[str, Any]] | None = None,
    group_size: int = 1,
    features: FeatureNames | None = None,
) -> PPOAgent[Observation]:
    """A learner of growth policies.

    Args:
        config, seed, device, compile_mode: see ``PPOAgent``.
        amp_dtype: dtype of the policy's trunk, see ``Policy.amp_dtype``.
        learner_arguments: those of an algorithm other than PPO, see ``AlgorithmConfig``.
        initial: state of an agent whose weights and moments are taken, see ``PPOAgent.state``.
        group_size: environments per group, for the baseline of the group.
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
    if config.group_baseline:
        estimator = arguments.get("estimator") or GeneralisedEstimator.of(config)
        arguments["estimator"] = GroupedEstimator(estimator, group_size)
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
    return agent
