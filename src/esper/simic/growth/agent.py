"""Construction of the learner of growth policies."""

import torch

from esper.leyline.config import ImpalaConfig, LearnerConfig
from esper.simic.graphs.captured_agent import agent_class
from esper.simic.growth.growth_moments import GrowthMoments
from esper.simic.impala.learner import impala_arguments
from esper.simic.ppo import PPOAgent
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.features import Observation


def growth_agent(
    config: LearnerConfig,
    seed: int,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    compile_mode: str = "off",
    threads: int = 1,
    impala: ImpalaConfig | None = None,
) -> PPOAgent[Observation]:
    """A learner of growth policies.

    Args:
        config, seed, device, compile_mode: see ``PPOAgent``.
        amp_dtype: dtype of the policy's trunk, see ``Policy.amp_dtype``.
        threads: CPU threads of the native policy, see ``FactoredLSTM``.
        impala: settings of IMPALA; None learns by PPO.
    """

    def network() -> FactoredLSTM:
        policy = FactoredLSTM(config.lstm_hidden)
        policy.amp_dtype, policy.threads = amp_dtype, threads
        return policy

    kind = agent_class(device, compile_mode)
    moments = GrowthMoments(device)
    arguments = impala_arguments(config, impala)
    return kind(config, seed, device, network, moments, compile_mode, **arguments)
