"""Compiles the parts around the LSTM: the encoder, and the heads with the loss."""

import logging
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import first_line
from esper.simic.loss import ppo_loss
from esper.simic.sequences import Sequences
from esper.tamiyo.policy.interface import Policy

log = logging.getLogger(__name__)

_COMPILERS = ("torch._dynamo.", "torch._functorch.", "torch._inductor.", "triton.")
"""Packages whose exceptions are the compiler's: they have no common base class."""


def resolve_mode(mode: str, device: torch.device) -> str:
    """The mode for ``device``: ``auto`` compiles on CUDA only, because it is slower on a CPU."""
    if mode == "auto":
        return "default" if device.type == "cuda" else "off"
    return mode


class CompiledLoss:
    """Compiles a policy's encoder and its loss as one graph each; the LSTM between them is eager.

    Compiling a function that calls ``nn.LSTM`` compiles only what comes before the LSTM and
    silently leaves the rest eager, so encoder and loss are compiled separately.

    Args:
        policy: policy whose encoder and heads are compiled.
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
        """``ppo_loss`` of a minibatch and its metrics."""
        loss_inputs = (
            minibatch.old_log_prob,
            minibatch.advantages,
            minibatch.targets,
            minibatch.weight,
            clip,
            entropy_weight,
            value_weight,
        )
        if not self.active:
            evaluation = self._policy.evaluate_actions(
                minibatch.observation, minibatch.actions, minibatch.hidden
            )
            return ppo_loss(evaluation, *loss_inputs)
        encoding = self._encode(minibatch.observation)
        memory, _ = self._policy.run_lstm(encoding[0], minibatch.hidden)
        return self._compiled_loss(
            memory, encoding, minibatch.observation, minibatch.actions, *loss_inputs
        )

    def _loss_of(
        self,
        memory: Tensor,
        encoding: tuple[Tensor, ...],
        observation: Any,
        actions: Tensor,
        *loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        evaluation = self._policy.evaluate_heads(memory, encoding, observation, actions)
        return ppo_loss(evaluation, *loss_inputs)

    def disable(self, error: Exception) -> bool:
        """Continue without compilation after ``error``; false if it was already off."""
        if not self.active:
            return False
        log_uncompiled(error)
        self.active = False
        return True


def is_compiler_error(error: Exception) -> bool:
    """Whether ``error`` is of the compiler, and not of what it compiled.

    What fails for another reason would fail again without compilation, or hide a fault if not.
    """
    return any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__)


def log_uncompiled(error: Exception) -> None:
    """Log in one line that ``error`` ends compilation."""
    log.warning("compile: %s; continuing without compilation", first_line(error))
