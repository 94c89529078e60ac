"""Learning from recorded episodes: the batch, the policy network and the training step.

What the step minimises is the ``Loss`` that the trainer is given, see ``simic.offline.methods``;
``simic.offline.batches`` makes batches from records.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from esper.leyline.config import LearnerConfig
from esper.leyline.metrics import Metric
from esper.simic.gradients import GradientNorms, LossScaler, backward, check_gradients
from esper.simic.loss import is_compiler_error, log_uncompiled
from esper.simic.normalise import ObservationMoments, RunningMoments
from esper.simic.optimizer import PolicyOptimizer
from esper.simic.update_metrics import Metrics
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.interface import Evaluation, Policy


class SlotFeatures(NamedTuple):
    """Inputs of the policy that every slot has; leading axes ``[T, B]``.

    Attributes:
        measures: features of the slots, not normalised, ``[T, B, S, G]``.
        blueprints: blueprint of the seed in each slot, int64 ``[T, B, S]``.
        legal_ops: bool ``[T, B, ops, S]``, see ``ActionMasks.slots``.
        legal_blueprints: bool ``[T, B, S, blueprints]``, see ``ActionMasks.kinds``.
    """

    measures: Tensor
    blueprints: Tensor
    legal_ops: Tensor
    legal_blueprints: Tensor


class Batch(NamedTuple):
    """B recorded episodes, padded to T steps; leading axes ``[T, B]``.

    Attributes:
        features: inputs that every slot has.
        metric_sequence: features of the host over time, not normalised, ``[T, B, F]``.
        seed_idx: slot that the action names, int64 ``[T, B]``.
        blueprint_idx: option of the blueprint head, int64 ``[T, B]``.
        returns: sum of the discounted rewards from the step on, in units of reward, ``[T, B]``.
        choices: options of the other heads, in the order of ``HEADS``, int64 ``[T, B, 6]``.
        critic: features that only the critic observes, ``[T, B, C]``.
        rewards: ``[T, B]``.
        terminated: whether the episode ended with the step, bool ``[T, B]``.
        log_prob: log-probability of the action under the policy that acted, ``[T, B]``.
        weight: 1 for the steps of the episode, 0 for those that pad it, ``[T, B]``.
        group: episodes of one group share host and data, int64 ``[B]``.
    """

    features: SlotFeatures
    metric_sequence: Tensor
    seed_idx: Tensor
    blueprint_idx: Tensor
    returns: Tensor
    choices: Tensor
    critic: Tensor
    rewards: Tensor
    terminated: Tensor
    log_prob: Tensor
    weight: Tensor
    group: Tensor

    @property
    def observation(self) -> Observation:
        """The observation of each step, not normalised."""
        slots = self.features
        masks = ActionMasks(slots.legal_ops, slots.legal_blueprints)
        return Observation(
            self.metric_sequence, slots.measures, slots.blueprints, self.critic, masks
        )

    @property
    def actions(self) -> Tensor:
        """The option of every head, int64 ``[T, B, heads]``."""
        placement = torch.stack([self.seed_idx, self.blueprint_idx], -1)
        return torch.cat([self.choices[..., :1], placement, self.choices[..., 1:]], -1)

    def to(self, device: torch.device) -> "Batch":
        """The batch on ``device``; a copy from page-locked memory does not make the CPU wait."""

        def transfer(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        return Batch(SlotFeatures(*map(transfer, self.features)), *map(transfer, self[1:]))


class Loss(Protocol):
    """What a trainer minimises."""

    def __call__(self, evaluation: Evaluation, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and its metrics by name, detached.

        Args:
            evaluation: of the batch's actions and states by the current policy, ``[T, B]``.
            batch: the batch.
        """
        ...


class _PolicyNetwork(nn.Module):
    """The recurrent policy that PPO trains, behind the normalisation of its observations.

    Args:
        policy: encoder, LSTM, heads and critic.
        moments: normalise the observations.
    """

    def __init__(self, policy: Policy[Observation], moments: ObservationMoments[Observation]):
        super().__init__()
        self.policy, self.moments = policy, moments

    def forward(self, batch: Batch) -> Evaluation:
        """Evaluate the actions of whole episodes with one call of the LSTM."""
        observation, actions = self.moments.normalise(batch.observation), batch.actions
        hidden = self.policy.initial_hidden(actions.shape[1])
        return self.policy.evaluate_actions(observation, actions, hidden)


class Trainer:
    """Learns a policy from batches of recorded episodes.

    The state of a trainer is that of a ``PPOAgent``: what acts, what is evaluated and what learning
    by PPO starts from are the same weights and moments.

    Args:
        policy: learns; its ``amp_dtype`` is the precision of encoder and LSTM.
        moments: normalise the policy's observations.
        return_moments: relate the critic's normalised values to the units of the rewards.
        loss: what is minimised.
        config: learning rates and maximum norm of the gradient.
        device: device of the policy.
        compile_mode: mode of ``torch.compile``, or ``off``. If compilation fails, here or in the
            first step, one line is logged and the steps run eagerly.
    """

    def __init__(
        self,
        policy: Policy[Observation],
        moments: ObservationMoments[Observation],
        return_moments: RunningMoments,
        loss: Loss,
        config: LearnerConfig,
        device: torch.device,
        compile_mode: str = "default",
    ):
        self.policy, self.moments, self.return_moments = policy, moments, return_moments
        self.loss, self.config, self.device = loss, config, device
        self.network = _PolicyNetwork(policy, moments)
        self.optimizer = PolicyOptimizer(policy, device)
        rate = config.learning_rate
        self.optimizer.set_rates({"policy": rate, "value": config.value_learning_rate or rate})
        self.norms = GradientNorms(policy, device)
        self.scaler = LossScaler(device) if policy.amp_dtype == torch.float16 else None
        # torch does not trace fused optimizers, and says so in every compilation.
        self._step_unless = torch.compiler.disable(self.optimizer.step_unless)
        self.steps = 0
        self._compiled_step = self._train_step
        if compile_mode != "off":
            try:
                self._compiled_step = torch.compile(
                    self._train_step, dynamic=True, mode=compile_mode
                )
            except Exception as error:
                log_uncompiled(error)

    @property
    def compiled(self) -> bool:
        """Whether steps run compiled."""
        return self._compiled_step != self._train_step

    def step(self, batch: Batch) -> Metrics:
        """Learn from a batch.

        The device skips the optimizer's step if loss or gradient are not finite.

        Returns:
            metrics by name, on the device: those of the loss and of the gradients.
        """
        batch = batch.to(self.device)
        self.steps += 1
        try:
            return self._compiled_step(batch)
        except Exception as error:
            # The compiler runs in the first call, also for what it leaves to the backward pass.
            if not self.compiled or not is_compiler_error(error):
                raise
            log_uncompiled(error)
            self._compiled_step = self._train_step
            self.optimizer.zero_grad()
            return self._train_step(batch)

    def _train_step(self, batch: Batch) -> Metrics:
        """Forward, loss, backward, step of scaler and optimizer, and ``zero_grad``."""
        loss, metrics = self.loss(self.network(batch), batch)
        backward(loss, self.policy.parameters(), self.scaler)
        norm, heads, refusal, overflow = check_gradients(
            loss.detach(), self.norms, self.scaler, self.config.max_gradient_norm
        )
        self._step_unless(torch.maximum(refusal, overflow))
        self.optimizer.zero_grad()
        return metrics | heads | {Metric.GRAD_NORM: norm, Metric.REFUSED: refusal}

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, Tensor]:
        """The metrics of the loss on a batch, without learning from it."""
        batch = batch.to(self.device)
        return self.loss(self.network(batch), batch)[1]

    def state(self) -> dict[str, dict[str, Any]]:
        """Everything a checkpoint needs, by part; see ``PPOAgent.state``."""
        return {
            "policy": dict(self.policy.state_dict()),
            "optimizer": self.optimizer.state(),
            "moments": {name: moments.state() for name, moments in self._moments().items()},
            "scaler": self.scaler.state() if self.scaler is not None else {},
            "counters": {"updates": torch.tensor(self.steps)},
        }

    def load_state(self, parts: dict[str, dict[str, Any]]) -> None:
        """The inverse of ``state``.

        Raises:
            RuntimeError, ValueError, KeyError, TypeError: the state is that of another network.
        """
        self.policy.load_state_dict(parts["policy"])
        self.optimizer.load(parts["optimizer"])
        for name, moments in self._moments().items():
            moments.load(parts["moments"][name])
        if self.scaler is not None:
            self.scaler.load(parts["scaler"])
        self.steps = int(parts["counters"]["updates"])

    def _moments(self) -> dict[str, RunningMoments]:
        return {**self.moments.parts(), "return": self.return_moments}
