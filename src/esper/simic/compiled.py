"""Compiles what surrounds the LSTM: the encoder, and the heads with the loss."""

import logging
from typing import Any

import torch
from torch import Tensor

from esper.simic.loss import ppo_loss
from esper.simic.sequences import Sequences
from esper.tamiyo.policy.interface import Policy

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
        if self.active:
            self._encode = torch.compile(policy.encode, mode=mode)
            self._compiled_loss = torch.compile(self._loss_of, mode=mode)

    def loss(
        self, minibatch: Sequences[Any], clip: Tensor, entropy_weight: Tensor, value_weight: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``ppo_loss`` of a minibatch, with its metrics."""
        learned = minibatch.old_log_prob, minibatch.advantages, minibatch.targets, minibatch.weight
        rest = (*learned, clip, entropy_weight, value_weight)
        if not self.active:
            evaluation = self._policy.evaluate_actions(
                minibatch.observation, minibatch.actions, minibatch.hidden
            )
            return ppo_loss(evaluation, *rest)
        encoded = self._encode(minibatch.observation)
        memory, _ = self._policy.remember(encoded[0], minibatch.hidden)
        return self._compiled_loss(memory, encoded, minibatch.observation, minibatch.actions, *rest)

    def _loss_of(
        self,
        memory: Tensor,
        encoded: tuple[Tensor, ...],
        observation: Any,
        actions: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        evaluation = self._policy.evaluate_heads(memory, encoded, observation, actions)
        return ppo_loss(evaluation, *rest)

    def give_up(self, error: Exception) -> bool:
        """Go on without compilation after ``error``; false where nothing was compiled."""
        if not self.active:
            return False
        first = str(error).strip().splitlines()
        reason = first[0] if first else type(error).__name__
        log.warning("compile: %s; going on without compilation", reason)
        self.active = False
        return True
