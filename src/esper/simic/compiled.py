"""What surrounds the memory, compiled: the encoder, and heads with their loss."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from esper.simic.loss import ppo_loss
from esper.tamiyo.policy.base import Policy

log = logging.getLogger(__name__)

MODES = ("auto", "off", "default", "reduce-overhead", "max-autotune")


def resolve_mode(mode: str, device: torch.device) -> str:
    """``auto`` compiles on CUDA; on a CPU it was measured slower and is off."""
    if mode == "auto":
        return "default" if device.type == "cuda" else "off"
    return mode


class Compiled:
    """Encoder and loss of a policy, each one graph; the memory between them is called as it is.

    ``torch.compile`` around a function that calls ``nn.LSTM`` takes what comes before the LSTM and
    leaves the rest eager without a word, which is why there are two.

    Args:
        policy: whose encoder and heads.
        mode: ``off``, or a mode of ``torch.compile``.
    """

    def __init__(self, policy: Policy[Any], mode: str):
        self._policy = policy
        self.active = mode != "off"
        self.encode: Callable[[Any], tuple[Tensor, ...]] = policy.encode
        self.loss: Callable[..., tuple[Tensor, dict[str, Tensor]]] = self._loss
        if self.active:
            self.encode = torch.compile(policy.encode, mode=mode)
            self.loss = torch.compile(self._loss, mode=mode)

    def _loss(
        self,
        memory: Tensor,
        encoded: tuple[Tensor, ...],
        observation: Any,
        actions: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``ppo_loss`` of what the policy says; ``rest`` are its arguments behind the first."""
        said = self._policy.judge(memory, encoded, observation, actions)
        return ppo_loss(said, *rest)

    def give_up(self, error: Exception) -> bool:
        """Go on without compilation after ``error``; false where nothing was compiled."""
        if not self.active:
            return False
        first = str(error).strip().splitlines()
        reason = first[0] if first else type(error).__name__
        log.warning("compile: %s; going on without compilation", reason)
        self.active = False
        self.encode, self.loss = self._policy.encode, self._loss
        return True
