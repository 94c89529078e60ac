"""Making learners: which network, and which way of running it on a device."""

from typing import Any

import torch

from esper.leyline.config import LearnerConfig
from esper.simic.captured_agent import CapturedAgent
from esper.simic.moments import GrowthMoments
from esper.simic.ppo import PPOAgent
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.features import Observation


def growth_agent(
    config: LearnerConfig,
    seed: int,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    compile_mode: str = "off",
) -> PPOAgent[Observation]:
    """A learner of growth policies.

    Args:
        config, seed, device, compile_mode: see ``PPOAgent``.
        amp_dtype: of the policy's trunk, see ``Policy.amp_dtype``.
    """

    def network() -> FactoredLSTM:
        policy = FactoredLSTM(config.lstm_hidden)
        policy.amp_dtype = amp_dtype
        return policy

    kind = agent_class(device, compile_mode)
    return kind(config, seed, device, network, GrowthMoments(device), compile_mode)


def agent_class(device: torch.device, compile_mode: str) -> type[PPOAgent[Any]]:
    """Captured on CUDA, unless compilation is off or ``torch.compile`` captures by itself."""
    captures = device.type == "cuda" and compile_mode in ("default", "max-autotune")
    return CapturedAgent if captures else PPOAgent
