"""Proximal policy optimisation of a recurrent policy (Schulman et al., 2017).

With another estimator of advantages and an older copy that acts, the same learner is that of other
algorithms; see ``simic.algorithms``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor, nn

from esper.kasmina.rng import Purpose, random_bits
from esper.leyline.config import LearnerConfig
from esper.leyline.metrics import Metric, part_metric
from esper.simic.actor import OlderActor, PolicyActor
from esper.simic.advantage import Estimates, Estimator, GeneralisedEstimator, explained_variance
from esper.simic.gradients import (
    GradientNorms,
    LossScaler,
    Refusal,
    all_finite,
    backward,
    check_gradients,
    first_not_finite,
)
from esper.simic.loss import CompiledLoss, is_compiler_error, weighted_mean
from esper.simic.normalise import ObservationMoments, RunningMoments
from esper.simic.optimizer import PolicyOptimizer
from esper.simic.rollout import Rollout, Sequences, even_split, split_sequences
from esper.simic.schedules import AdaptiveRate, Schedules
from esper.simic.update_metrics import Metrics, summarise
from esper.tamiyo.policy.interface import ObservationT, Policy, full_precision

ADVANTAGE_FLOOR = 0.1
"""Smallest divisor of advantages. Rewards in growth are differences of accuracy: a smaller standard
deviation is noise, and dividing by it would amplify the noise."""

LOSSES = (Metric.POLICY_LOSS, Metric.VALUE_LOSS, Metric.ENTROPY, Metric.LOSS)
"""Parts of the loss, in the order in which they are searched for numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class LearningBatch(Generic[ObservationT]):
    """The tensors of one update, computed from a rollout.

    Attributes:
        sequences: inputs of the policy and the loss.
        estimates: advantages and value targets before scaling.
        weight: 1 for steps that count, 0 for others, ``[T, N]``; None if all count.
    """

    sequences: Sequences[ObservationT]
    estimates: Estimates
    weight: Tensor | None


Bootstrap = Callable[[Rollout[ObservationT], "PPOAgent[ObservationT]", bool], Rollout[ObservationT]]
"""Returns a rollout with its truncated episodes and, where the flag is set, with values by what the
critic has learned from it; before the first update, measures the units of what is in it."""


class PPOAgent(PolicyActor[ObservationT]):
    """Policy, critic, optimizer and normalisers: acts in environments and learns from rollouts.

    It acts with the weights that it learns. Rollouts to learn from are collected with ``actor``.

    Args:
        config: see ``leyline.config.LearnerConfig``.
        seed: seed of initial weights, action sampling and shuffling.
        device: device of the networks.
        network: builds the policy; called once, with the global generator seeded.
        moments: normalises the policy's observations.
        compile_mode: see ``simic.loss.CompiledLoss``.
        advantage_floor: advantages are divided by their standard deviation or by this, whichever
            is larger.
        estimator: estimates advantages and value targets; generalised advantages if None.
        bootstrap: see ``Bootstrap``; None where no episode is truncated.
        older: makes an older copy of this agent that acts in its place; None if it acts itself.

    Attributes:
        actor: acts in the environments: this agent, or its older copy.
        refusal: why the last update was refused; None if it was not.
        head_weights: factors of the entropy weight by head, ``[heads]``; None if all are 1.
        shape: what is needed to rebuild the network in addition to the settings.
    """

    def __init__(
        self,
        config: LearnerConfig,
        seed: int,
        device: torch.device,
        network: Callable[[], Policy[ObservationT]],
        moments: ObservationMoments[ObservationT],
        compile_mode: str = "off",
        advantage_floor: float = ADVANTAGE_FLOOR,
        estimator: Estimator | None = None,
        bootstrap: Bootstrap[ObservationT] | None = None,
        older: Callable[[PolicyActor[ObservationT]], OlderActor[ObservationT]] | None = None,
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy = network().to(device)
        super().__init__(policy, moments, seed, device)
        self.config, self.advantage_floor = config, advantage_floor
        self.estimator = estimator or GeneralisedEstimator.of(config)
        self.bootstrap = bootstrap
        apart = config.value_learning_rate is not None
        self.optimizer = PolicyOptimizer(self.policy, device, apart)
        # Who bootstraps has rewards in any unit.
        self.return_moments = RunningMoments((), device, floor=0.0 if bootstrap else 1e-4)
        self.schedules = Schedules.of(config)
        target = config.lr_adaptive_kl
        self.adaptive = AdaptiveRate(target, device) if target is not None else None
        half = self.policy.amp_dtype == torch.float16
        self.scaler = LossScaler(device) if half else None
        self.norms = GradientNorms(self.policy, device)
        names = (Metric.CLIP, Metric.ENTROPY_WEIGHT)
        self.scalars = {name: torch.zeros((), device=device) for name in names}
        self.head_weights: Tensor | None = None
        self.value_weight = torch.zeros((), device=device) if config.value_warmup_steps else None
        self.compiled = CompiledLoss(self.policy, compile_mode)
        self.updates = 0
        self._older = older(self) if older is not None else None
        self.actor = self._older.actor if self._older is not None else self
        self.refusal: Refusal | None = None
        self.shape: dict[str, Any] = {}
        self._before: dict[str, dict[str, Any]] = {}

    # --- learning -----------------------------------------------------------------------------

    def update(self, rollout: Rollout[ObservationT]) -> dict[str, float | None]:
        """Update policy and critic from one rollout, with a single transfer from the device.

        If the rollout, the loss, a gradient or the optimizer state contains a number that is not
        finite, the current optimizer step and the remaining ones are skipped (see ``refusal``).
        They are also skipped if the approximate KL divergence of a minibatch is above 1.5
        ``target_kl``.

        Returns:
            metrics by name; a gradient norm is None if a gradient is missing.
        """
        self._before = _copy(self.state(), self._before)
        self._set_schedules()
        batch = later = self._prepare_batch(rollout)
        refusal = stop = self._refuse_inputs(rollout)
        minibatches = self._draw_minibatches(batch.sequences)
        metrics = []
        for i, indices in enumerate(minibatches):
            if self.bootstrap is not None and i and i == len(minibatches) // 2:
                later = self._prepare_batch(rollout, batch)
            step, stop = self._minibatch_step(self._pick(later.sequences, indices), stop)
            metrics.append(step)
        metrics[0] |= {Metric.REFUSED: torch.maximum(metrics[0][Metric.REFUSED], refusal)}
        self._adapt_learning_rate(metrics)
        summary, first_refused = summarise(metrics, self._update_metrics(batch), self.policy.heads)
        self.refusal = None
        if first_refused is not None:
            part = later if first_refused >= len(minibatches) // 2 else batch
            minibatch = part.sequences.pick(minibatches[first_refused])
            tensor = self._first_not_finite(rollout, minibatch)
            self.refusal, self._before = Refusal(tensor, self._before, rollout.state()), {}
        self.updates += 1
        self._update_moments(rollout, batch.estimates.targets)
        if self._older is not None:
            self._older.note_update()
        return summary

    def _set_schedules(self) -> None:
        """Write this update's learning rates, clip and entropy weight to the device."""
        schedules, update = self.schedules, self.updates
        factor = self.adaptive.factor if self.adaptive and self.adaptive.active else 1.0
        rates = {"policy": schedules.policy_rate, "value": schedules.value_rate}
        self.optimizer.set_rates({name: rate.at(update) * factor for name, rate in rates.items()})
        self.scalars[Metric.CLIP].fill_(schedules.clip.at(update))
        self.scalars[Metric.ENTROPY_WEIGHT].fill_(schedules.entropy.at(update))
        if self.value_weight is not None:
            self.value_weight.fill_(self.config.value_weight_at(update))

    def _prepare_batch(
        self, rollout: Rollout[ObservationT], first: LearningBatch[ObservationT] | None = None
    ) -> LearningBatch[ObservationT]:
        """Estimate advantages and value targets, normalise them, and form sequences.

        With ``bootstrap`` an update does so twice: what the critic has learned in the first half
        serves the second, as in Andrychowicz et al., "What matters in on-policy reinforcement
        learning?" (2021). Importance ratios stay relative to the policy before the update.
        """
        if self.bootstrap is not None:
            rollout = self.bootstrap(rollout, self, first is not None)
        estimates = self.estimator.estimate(rollout, self.policy, self.moments, self.return_moments)
        targets = estimates.targets
        weight = None if rollout.valid is None else rollout.valid.to(self.device, targets.dtype)
        advantages = estimates.normalised_advantages(weight, self.advantage_floor)
        observation = self.moments.normalise(rollout.observation)
        scaled_targets = self.return_moments.scale(rollout.with_cut_offs(targets, targets[-1])[0])
        old_log_prob = (estimates if first is None else first.estimates).old_log_prob
        sequences = split_sequences(rollout, observation, old_log_prob, advantages, scaled_targets)
        if not sequences.hidden:
            hidden = self.policy.initial_hidden(sequences.count)
            sequences = replace(sequences, hidden=hidden)
        return LearningBatch(sequences, estimates, weight)

    def _refuse_inputs(self, rollout: Rollout[ObservationT]) -> Tensor:
        """Scalar 1 if rollout or optimizer contains a number that is not finite, else 0."""
        finite = all_finite(rollout.tensors().values()) & self.optimizer.finite()
        return (~finite).float()

    def _draw_minibatches(self, sequences: Sequences[ObservationT]) -> list[Tensor]:
        """Indices of the sequences of each minibatch, over all epochs, on the CPU.

        The order is drawn from the counter-based generator, keyed by epoch and update. Minibatches
        of sequences that differ in length have nearly equal numbers of steps.
        """
        streams, count = torch.arange(self.config.ppo_epochs), sequences.count
        draws = random_bits(self.seed, streams, Purpose.POLICY_SHUFFLE, self.updates, 0, count)
        parts = self.config.minibatches
        if sequences.counts is None or sequences.lengths is None:
            parts = min(parts, count)
            return [part for order in draws.argsort(1) for part in order.tensor_split(parts)]
        sizes = sequences.counts.tolist(), sequences.lengths.tolist()
        orders = draws.argsort(1).tolist()
        return [part for order in orders for part in even_split(order, *sizes, parts)]

    def _pick(self, sequences: Sequences[ObservationT], indices: Tensor) -> Sequences[ObservationT]:
        return sequences.pick(indices)

    def _minibatch_step(
        self, minibatch: Sequences[ObservationT], stop: Tensor
    ) -> tuple[Metrics, Tensor]:
        """Take an optimizer step; the device skips it if it is refused, stopped or overflowed."""
        loss, metrics = self._gradients(minibatch)
        norm, heads, refusal, overflow = check_gradients(
            loss, self.norms, self.scaler, self.config.max_gradient_norm
        )
        beyond_kl = (metrics[Metric.APPROX_KL] > 1.5 * self.config.target_kl).float()
        stop = torch.maximum(stop, torch.maximum(refusal, beyond_kl))
        self.optimizer.step_unless(torch.maximum(stop, overflow))
        flags = {Metric.GRAD_NORM: norm, Metric.REFUSED: refusal, Metric.STOPPED: stop}
        return metrics | flags | heads, stop

    def _gradients(self, minibatch: Sequences[ObservationT]) -> tuple[Tensor, Metrics]:
        """Loss, metrics and gradients of a minibatch; backward runs outside autocast."""
        with full_precision(self.device):
            try:
                return self._backward(minibatch)
            except Exception as error:
                # The passes are compiled in their first call: either may raise a compiler error.
                if not is_compiler_error(error) or not self.compiled.disable(error):
                    raise
                return self._backward(minibatch)

    def _backward(self, minibatch: Sequences[ObservationT]) -> tuple[Tensor, Metrics]:
        self.optimizer.zero_grad()
        clip, entropy_weight = self.scalars[Metric.CLIP], self.scalars[Metric.ENTROPY_WEIGHT]
        if self.head_weights is not None:
            entropy_weight = entropy_weight * self.head_weights
        value_weight = self.config.value_weight if self.value_weight is None else self.value_weight
        loss, metrics = self.compiled.loss(minibatch, clip, entropy_weight, value_weight)
        backward(loss, self.policy.parameters(), self.scaler)
        return loss.detach(), metrics

    def _adapt_learning_rate(self, metrics: list[Metrics]) -> None:
        if self.adaptive is not None:
            last = metrics[-len(metrics) // self.config.ppo_epochs :]
            self.adaptive.adapt(torch.stack([step[Metric.APPROX_KL] for step in last]).mean())

    def _update_moments(self, rollout: Rollout[ObservationT], targets: Tensor) -> None:
        """Update the running moments last, so that rollout and update normalise alike."""
        if self.updates > 1 or self.bootstrap is None:
            self.moments.update(rollout.observation, rollout.valid)
        layer = self.policy.value_layer()
        if layer is None:
            self.return_moments.update(self.without_resets(targets, rollout))
        elif self.refusal is None and self.updates > 1:
            self._rescale_value_layer(self.without_resets(targets, rollout), layer)

    @torch.no_grad()
    def _rescale_value_layer(self, targets: Tensor, layer: nn.Linear) -> None:
        """Update the return moments and rescale the value layer so that its outputs are preserved.

        Equation 4 of van Hasselt et al., "Learning values across many orders of magnitude" (2016).
        """
        moments = self.return_moments
        old_mean, old_deviation = moments.mean.clone(), moments.deviation.clone()
        moments.update(targets)
        bias = old_deviation * layer.bias + old_mean - moments.mean
        layer.weight.mul_((old_deviation / moments.deviation).to(layer.weight.dtype))
        layer.bias.copy_((bias / moments.deviation).to(layer.bias.dtype))

    def without_resets(self, x: Tensor, rollout: Rollout[ObservationT]) -> Tensor:
        """``x [T, N]`` with NaN, which moments ignore, at steps that only reset."""
        if rollout.valid is None:
            return x
        return torch.where(rollout.valid.to(self.device), x, float("nan"))

    # --- metrics ------------------------------------------------------------------------------

    def _update_metrics(self, batch: LearningBatch[ObservationT]) -> dict[str, Tensor]:
        """Metrics of the update as a whole, in addition to those of its minibatches."""
        values, returns, weight = batch.estimates.values, batch.estimates.returns, batch.weight
        overall, within = explained_variance(values, returns, weight)

        def mean(x: Tensor) -> Tensor:
            # Without weights, episodes are whole: the episode's return is that of its first step.
            return x[0].mean() if weight is None else weighted_mean(x, weight)

        rates = self.optimizer.rates
        metrics = {
            Metric.EXPLAINED_VARIANCE: overall,
            Metric.EXPLAINED_VARIANCE_WITHIN_STEP: within,
            Metric.RETURN_MEAN: mean(returns),
            Metric.VALUE_MEAN: mean(values),
            Metric.CLIP: self.scalars[Metric.CLIP],
            Metric.ENTROPY_WEIGHT: self.scalars[Metric.ENTROPY_WEIGHT],
            Metric.LEARNING_RATE: rates["policy"],
            **{part_metric(Metric.LEARNING_RATE, name): rate for name, rate in rates.items()},
            **batch.estimates.metrics,
        }
        if self.head_weights is not None:
            weights = self.scalars[Metric.ENTROPY_WEIGHT] * self.head_weights
            names = [part_metric(Metric.ENTROPY_WEIGHT, head) for head in self.policy.heads]
            metrics |= dict(zip(names, weights, strict=True))
        if self.value_weight is not None:
            metrics[Metric.VALUE_WEIGHT] = self.value_weight
        if self.scaler is not None:
            metrics[Metric.AMP_SCALE] = self.scaler.scale
        return metrics

    def _first_not_finite(
        self, rollout: Rollout[ObservationT], minibatch: Sequences[ObservationT]
    ) -> str:
        """Name of the first tensor with a number that is not finite; waits for the device.

        The weights are still those of the refused step, so its minibatch can be recomputed.
        """
        parts = self.optimizer.state()
        moments = {f"optimizer/{n}/{k}": x for n, part in parts.items() for k, x in part.items()}
        weights = {f"policy/{n}": p for n, p in self.policy.named_parameters()}
        # In two calls: rollout and minibatch have names in common.
        cause = first_not_finite(rollout.tensors() | moments | weights)
        cause = cause or first_not_finite(minibatch.tensors())
        if cause is not None:
            return cause
        _, metrics = self._gradients(minibatch)
        losses = {f"loss/{name}": metrics[name] for name in LOSSES}
        gradients = {f"gradient/{n}": p.grad for n, p in self.policy.named_parameters()}
        return first_not_finite(losses | gradients) or "an unknown tensor"

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Any]]:
        """Everything a checkpoint needs, by part; the optimizer state is by parameter name."""
        counters: dict[str, Any] = {"updates": torch.tensor(self.updates)}
        if self.adaptive is not None:
            counters["rate_factor"] = self.adaptive.factor
        parts = {
            "policy": dict(self.policy.state_dict()),
            "optimizer": self.optimizer.state(),
            "moments": {name: m.state() for name, m in self._moments().items()},
            "scaler": self.scaler.state() if self.scaler is not None else {},
            "counters": counters,
        }
        return parts if self._older is None else parts | {"lagged_actor": self._older.state()}

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
        if self.adaptive is not None:
            self.adaptive.factor.copy_(parts["counters"]["rate_factor"])
        if self._older is not None:
            self._older.load(parts["lagged_actor"])
        self.updates = int(parts["counters"]["updates"])

    def _moments(self) -> dict[str, RunningMoments]:
        return {**self.moments.parts(), "return": self.return_moments}


def _copy(parts: Any, destination: Any) -> Any:
    """A deep copy of nested dictionaries of tensors, in ``destination`` where shapes match.

    Reusing the memory of the last round matters: allocating it costs more than copying.
    """
    if isinstance(parts, dict):
        destinations = destination if isinstance(destination, dict) else {}
        return {name: _copy(value, destinations.get(name)) for name, value in parts.items()}
    if not isinstance(parts, Tensor):
        return parts
    if isinstance(destination, Tensor) and destination.shape == parts.shape:
        return destination.copy_(parts.detach())
    return parts.detach().clone()
