"""Proximal policy optimisation of a recurrent policy (Schulman et al., 2017)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor, nn

from esper.kasmina.rng import Purpose, random_bits
from esper.leyline.config import LearnerConfig
from esper.leyline.metrics import Metric, part_metric
from esper.simic.advantage import explained_variance, generalised_advantages
from esper.simic.compiled import Compiled
from esper.simic.gradients import GradientNorms
from esper.simic.loss import weighted_mean
from esper.simic.loss_scaler import LossScaler
from esper.simic.nonfinite import Refusal, all_finite, first_not_finite
from esper.simic.normalise import RunningMoments
from esper.simic.observation_moments import ObservationMoments
from esper.simic.optimiser import PolicyOptimizer
from esper.simic.rollout import Rollout
from esper.simic.schedules import AdaptiveRate, Schedules
from esper.simic.sequences import Sequences, split_sequences
from esper.tamiyo.policy.interface import ObservationT, Policy, RecurrentState, full_precision
from esper.tamiyo.policy.noise import EpisodeNoise

ADVANTAGE_FLOOR = 0.1
"""Advantages of growth, whose rewards are points of accuracy, are divided by at least this, so that
noise is not blown up into a signal."""

LOSSES = (Metric.POLICY_LOSS, Metric.VALUE_LOSS, Metric.ENTROPY, Metric.LOSS)
"""Parts of the loss, in the order in which they are looked at for numbers that are not finite."""

Record = dict[str, Any]
"""Tensors that tell what happened in a minibatch, by name; None is a gradient that is missing."""


@dataclass(frozen=True, slots=True)
class Learning(Generic[ObservationT]):
    """What an update learns from, made of a rollout.

    Attributes:
        sequences: what the policy is run over.
        values, returns: of the critic and as they came about, ``[T, N]``.
        targets: what the critic learns, before it is scaled, ``[T, N]``.
        weight: 1 for steps that count, 0 for others, ``[T, N]``; None when all count.
    """

    sequences: Sequences[ObservationT]
    values: Tensor
    returns: Tensor
    targets: Tensor
    weight: Tensor | None


class PPOAgent(Generic[ObservationT]):
    """Policy, critic, optimizer and normalisers; acts and learns.

    Args:
        config: see ``leyline.config.LearnerConfig``.
        seed: of initial weights, action sampling and shuffling.
        device: where the networks live.
        network: makes the policy, called once with the global generator seeded.
        moments: normalise what the policy sees.
        compile_mode: see ``simic.compiled.Compiled``.
        advantage_floor: advantages are divided by their deviation, or by this where it is larger.

    Attributes:
        refusal: why the last update stopped learning, None where it did not.
        shape: what one must know besides the settings to make the network again.
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
    ):
        self.advantage_floor = advantage_floor
        self.config, self.seed, self.device = config, seed, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = network().to(device)
        self.optimizer = PolicyOptimizer(self.policy, device)
        self.moments = moments
        self.return_moments = RunningMoments((), device)
        self.schedules = Schedules.of(config)
        target = config.lr_adaptive_kl
        self.adaptive = AdaptiveRate(target, device) if target is not None else None
        half = self.policy.amp_dtype == torch.float16
        self.scaler = LossScaler(device) if half else None
        self.norms = GradientNorms(self.policy, device)
        scheduled = (Metric.CLIP, Metric.ENTROPY_WEIGHT)
        self.scalars = {name: torch.zeros((), device=device) for name in scheduled}
        self.compiled = Compiled(self.policy, compile_mode)
        self.updates = 0
        self.greedy = False
        self.refusal: Refusal | None = None
        self.shape: dict[str, Any] = {}
        self._before: dict[str, dict[str, Any]] = {}

    # --- acting -------------------------------------------------------------------------------

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``Actor.begin``."""
        self.hidden: RecurrentState = self.policy.initial_hidden(len(environments))
        self.go_on(environments, episode)

    def go_on(self, environments: Tensor, episode: int) -> None:
        """Get ready for a rollout that goes on where the last one ended: memory stays as it is."""
        self._environments, self._episode = environments, episode
        self._noise: EpisodeNoise | None = None

    def act(self, observation: ObservationT, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Actor.act``. Draws from the policy, or takes its mode when ``greedy``."""
        noise = None if self.greedy else self._drawn(observation, step)
        actions, log_prob, value, self.hidden = self._act(observation, self.hidden, noise)
        return actions, log_prob, value

    def _act(
        self, observation: ObservationT, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        return self.policy.act(self.moments.normalise(observation), hidden, noise)

    def value(self, observation: ObservationT) -> Tensor:
        """The critic's opinion, normalised, ``[N]``; what is remembered stays as it is."""
        return self._act(observation, self.hidden, None)[2]

    def forget(self, rows: Tensor) -> None:
        """Begin anew with the environments ``rows``, bool ``[N]``."""
        self.hidden = tuple(torch.where(rows[:, None], 0.0, state) for state in self.hidden)

    def _drawn(self, observation: ObservationT, step: int) -> Tensor:
        heads, widest = self.policy.noise_shape(observation)
        if self._noise is None or self._noise.shape[-1] != widest:
            self._noise = EpisodeNoise(self.seed, self._environments, self._episode, widest, heads)
        return self._noise.at(step)

    # --- learning -----------------------------------------------------------------------------

    def update(self, rollout: Rollout[ObservationT]) -> dict[str, float | None]:
        """Learn from one rollout. Returns what happened, by name; one host transfer.

        A number that is not finite, in the rollout, a loss, a gradient or the optimizer, ends the
        learning of the round before it touches a weight; see ``refusal``. So does a KL divergence
        above its bound. A norm is None where a gradient is missing.
        """
        self._before = _kept(self.state(), self._before)
        self._set_schedules()
        learning = self._learning(rollout)
        refused = stopped = self._refused_before(rollout)
        minibatches = self._minibatches(learning.sequences.count)
        records = []
        for chosen in minibatches:
            record, stopped = self._learn(learning.sequences.pick(chosen), stopped)
            records.append(record)
        records[0] |= {Metric.REFUSED: torch.maximum(records[0][Metric.REFUSED], refused)}
        self._follow_kl(records)
        summary, first_refused = self._summary(records, self._overview(learning))
        self.refusal = None
        if first_refused is not None:
            part = learning.sequences.pick(minibatches[first_refused])
            bad = self._first_bad(rollout, part)
            self.refusal, self._before = Refusal(bad, self._before, rollout.state()), {}
        self.updates += 1
        self._take_in(rollout, learning.targets)
        return summary

    def _set_schedules(self) -> None:
        """Put this update's step sizes, clip and entropy weight where the device reads them."""
        schedules, update = self.schedules, self.updates
        factor = 1.0 if self.adaptive is None else self.adaptive.factor
        rates = {"policy": schedules.policy_rate, "value": schedules.value_rate}
        self.optimizer.set_rates({name: rate.at(update) * factor for name, rate in rates.items()})
        self.scalars[Metric.CLIP].fill_(schedules.clip.at(update))
        self.scalars[Metric.ENTROPY_WEIGHT].fill_(schedules.entropy.at(update))

    def _learning(self, rollout: Rollout[ObservationT]) -> Learning[ObservationT]:
        """Advantages, returns and sequences."""
        values = self.return_moments.restore(rollout.values)
        last_value = self.return_moments.restore(rollout.last_value)

        def estimated(trace_decay: float) -> tuple[Tensor, Tensor]:
            return generalised_advantages(
                rollout.rewards,
                values,
                last_value,
                rollout.terminated,
                self.config.discount,
                trace_decay,
                None if rollout.valid is None else rollout.truncated,
            )

        advantages, targets = estimated(self.config.trace_decay)
        weight = None if rollout.valid is None else rollout.valid.to(self.device, values.dtype)
        advantages = advantages - weighted_mean(advantages, weight)
        deviation = weighted_mean(advantages.square(), weight).sqrt()
        advantages = advantages / deviation.clamp(min=self.advantage_floor)
        if self.updates == 0 and self.policy.value_layer() is not None:
            # Nothing is known of the returns yet, and raw ones would drown the actor's gradient.
            self.return_moments.update(self._live(targets, rollout))
        seen, scaled = (
            self.moments.normalise(rollout.observation),
            self.return_moments.scale(targets),
        )
        sequences = split_sequences(rollout, seen, advantages, scaled)
        if not sequences.hidden:
            hidden = self.policy.initial_hidden(sequences.count)
            sequences = replace(sequences, hidden=hidden)
        return Learning(sequences, values, estimated(1.0)[1], targets, weight)

    def _refused_before(self, rollout: Rollout[ObservationT]) -> Tensor:
        """1 where rollout or optimizer hold a number that is not finite, 0 otherwise."""
        finite = all_finite(rollout.tensors().values()) & self.optimizer.finite()
        return (~finite).float()

    def _minibatches(self, sequences: int) -> list[Tensor]:
        """Sequences of each minibatch of each epoch, shuffled by a keyed draw; on the CPU."""
        streams = torch.arange(self.config.ppo_epochs)
        drawn = random_bits(self.seed, streams, Purpose.POLICY_SHUFFLE, self.updates, 0, sequences)
        count = min(self.config.minibatches, sequences)
        return [part for order in drawn.argsort(1) for part in order.tensor_split(count)]

    def _learn(self, part: Sequences[ObservationT], stopped: Tensor) -> tuple[Record, Tensor]:
        """One optimizer step, left out by the device where it must not be taken."""
        loss, record = self._gradients(part)
        norm, heads = self.norms.measure()
        self.norms.clip(norm, self.config.max_gradient_norm)
        finite = loss.isfinite() & norm.isfinite()
        overflowed = self._overflowed(loss, norm)
        refused = (~(finite | overflowed)).float()
        passed = (record[Metric.APPROX_KL] > 1.5 * self.config.target_kl).float()
        stopped = torch.maximum(stopped, torch.maximum(refused, passed))
        self.optimizer.step_unless(torch.maximum(stopped, overflowed.float()))
        flags = {Metric.GRAD_NORM: norm, Metric.REFUSED: refused, Metric.STOPPED: stopped}
        named = {part_metric(Metric.HEAD_GRAD_NORMS, head): v for head, v in heads.items()}
        return record | flags | named, stopped

    def _gradients(self, part: Sequences[ObservationT]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of a minibatch, backward outside of autocast."""
        with full_precision(self.device):
            try:
                return self._backward(part)
            except Exception as error:
                # The first call compiles, the backward pass in its own time.
                if not self.compiled.give_up(error):
                    raise
                return self._backward(part)

    def _backward(self, part: Sequences[ObservationT]) -> tuple[Tensor, dict[str, Tensor]]:
        self.optimizer.zero_grad()
        clip, entropy_weight = self.scalars[Metric.CLIP], self.scalars[Metric.ENTROPY_WEIGHT]
        loss, record = self.compiled.loss(part, clip, entropy_weight, self.config.value_weight)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scaled(loss).backward()
            self.scaler.unscale([p.grad for p in self.policy.parameters() if p.grad is not None])
        return loss.detach(), record

    def _overflowed(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether half precision ran over: no error, the scaler takes it back."""
        if self.scaler is None:
            return torch.zeros_like(loss, dtype=torch.bool)
        overflowed = loss.isfinite() & ~norm.isfinite() & self.scaler.may_overflow()
        self.scaler.follow(overflowed)
        return overflowed

    def _follow_kl(self, records: list[Record]) -> None:
        if self.adaptive is not None:
            last = records[-len(records) // self.config.ppo_epochs :]
            self.adaptive.follow(torch.stack([record[Metric.APPROX_KL] for record in last]).mean())

    def _take_in(self, rollout: Rollout[ObservationT], targets: Tensor) -> None:
        """The round goes into the moments only now: rollout and update saw the same numbers."""
        self.moments.update(rollout.observation, rollout.valid)
        layer = self.policy.value_layer()
        if layer is None:
            self.return_moments.update(self._live(targets, rollout))
        elif self.refusal is None and self.updates > 1:
            self._follow_returns(self._live(targets, rollout), layer)

    @torch.no_grad()
    def _follow_returns(self, targets: Tensor, layer: nn.Linear) -> None:
        """Take in returns, and keep what the critic says of them in their own units.

        Equation 4 of van Hasselt et al., "Learning values across many orders of magnitude" (2016).
        """
        mean, deviation = self.return_moments.mean.clone(), self.return_moments.deviation.clone()
        self.return_moments.update(targets)
        now = self.return_moments.deviation
        shift = deviation * layer.bias + mean - self.return_moments.mean
        layer.weight.mul_((deviation / now).to(layer.weight.dtype))
        layer.bias.copy_((shift / now).to(layer.bias.dtype))

    def _live(self, x: Tensor, rollout: Rollout[ObservationT]) -> Tensor:
        """``x [T, N]`` with NaN, which moments leave out, where a step only reset."""
        if rollout.valid is None:
            return x
        return torch.where(rollout.valid.to(self.device), x, float("nan"))

    # --- telling ------------------------------------------------------------------------------

    def _overview(self, learning: Learning[ObservationT]) -> dict[str, Tensor]:
        """What is told of an update besides its minibatches."""
        values, returns, weight = learning.values, learning.returns, learning.weight
        overall, within = explained_variance(values, returns, weight)
        whole = weight is None  # episodes, whose return is that of their first step
        overview = {
            Metric.EXPLAINED_VARIANCE: overall,
            Metric.EXPLAINED_VARIANCE_WITHIN_STEP: within,
            Metric.RETURN_MEAN: returns[0].mean() if whole else weighted_mean(returns, weight),
            Metric.VALUE_MEAN: values[0].mean() if whole else weighted_mean(values, weight),
            **self.scalars,
            Metric.LEARNING_RATE: self.optimizer.rates["policy"],
            **{part_metric(Metric.LEARNING_RATE, n): r for n, r in self.optimizer.rates.items()},
        }
        if self.scaler is not None:
            overview[Metric.AMP_SCALE] = self.scaler.scale
        return overview

    def _summary(
        self, records: list[Record], overview: dict[str, Tensor]
    ) -> tuple[dict[str, float | None], int | None]:
        """Everything by name, and the first minibatch that was refused; one host transfer."""
        flat = [_flattened(record, self.policy.heads) for record in records]
        missing = {name for record in flat for name, value in record.items() if value is None}
        names = [name for name in flat[0] if name not in missing]
        table = torch.stack([torch.stack([r[name].float() for name in names]) for r in flat])
        extra = torch.stack([value.float() for value in overview.values()])
        numbers = torch.cat([table.flatten(), extra]).tolist()
        columns = {name: numbers[i : table.numel() : len(names)] for i, name in enumerate(names)}
        summary: dict[str, float | None] = dict.fromkeys(missing)
        summary |= {name: sum(column) / len(column) for name, column in columns.items()}
        for name in (Metric.RATIO_MAX, Metric.REFUSED):
            summary[name] = max(columns[name])
        summary[Metric.RATIO_MIN] = min(columns[Metric.RATIO_MIN])
        summary[Metric.STOPPED] = columns[Metric.STOPPED][-1]
        summary[Metric.FIRST_KL] = columns[Metric.APPROX_KL][0]
        summary[Metric.FIRST_RATIO_MAX] = columns[Metric.RATIO_MAX][0]
        summary |= dict(zip(overview, numbers[table.numel() :], strict=True))
        refused = columns[Metric.REFUSED]
        return summary, refused.index(1.0) if 1.0 in refused else None

    def _first_bad(self, rollout: Rollout[ObservationT], part: Sequences[ObservationT]) -> str:
        """The first tensor with a number that is not finite; waits for the device.

        Weights are those of the refused step, so its minibatch can be computed once more.
        """
        parts = self.optimizer.state()
        moments = {f"optimizer/{n}/{k}": x for n, part in parts.items() for k, x in part.items()}
        weights = {f"policy/{n}": p for n, p in self.policy.named_parameters()}
        # Not in one dictionary: rollout and minibatch have names in common.
        found = first_not_finite(rollout.tensors() | moments | weights)
        found = found or first_not_finite(part.tensors())
        if found is not None:
            return found
        _, record = self._gradients(part)
        losses = {f"loss/{name}": record[name] for name in LOSSES}
        gradients = {f"gradient/{n}": p.grad for n, p in self.policy.named_parameters()}
        return first_not_finite(losses | gradients) or "nothing that is still there"

    # --- remembering --------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Any]]:
        """Everything an agent has to remember, by part; optimizer state by parameter name."""
        counters: dict[str, Any] = {"updates": torch.tensor(self.updates)}
        if self.adaptive is not None:
            counters["rate_factor"] = self.adaptive.factor
        return {
            "policy": dict(self.policy.state_dict()),
            "optimizer": self.optimizer.state(),
            "moments": {name: m.state() for name, m in self._moments().items()},
            "scaler": self.scaler.state() if self.scaler is not None else {},
            "counters": counters,
        }

    def load_state(self, parts: dict[str, dict[str, Any]]) -> None:
        """Take back what ``state`` gave.

        Raises:
            RuntimeError, ValueError, KeyError, TypeError: it is another network's.
        """
        self.policy.load_state_dict(parts["policy"])
        self.optimizer.load(parts["optimizer"])
        for name, moments in self._moments().items():
            moments.load(parts["moments"][name])
        if self.scaler is not None:
            self.scaler.load(parts["scaler"])
        if self.adaptive is not None:
            self.adaptive.factor.copy_(parts["counters"]["rate_factor"])
        self.updates = int(parts["counters"]["updates"])

    def _moments(self) -> dict[str, RunningMoments]:
        return {**self.moments.parts(), "return": self.return_moments}


def _kept(parts: Any, place: Any) -> Any:
    """Nested dictionaries of tensors with tensors of their own, those of ``place`` where they fit.

    What is kept from round to round lies where it lay: fresh memory for all weights and moments
    would cost more than copying them.
    """
    if isinstance(parts, dict):
        known = place if isinstance(place, dict) else {}
        return {name: _kept(value, known.get(name)) for name, value in parts.items()}
    if not isinstance(parts, Tensor):
        return parts
    if isinstance(place, Tensor) and place.shape == parts.shape:
        return place.copy_(parts.detach())
    return parts.detach().clone()


def _flattened(record: Record, heads: tuple[str, ...]) -> Record:
    """A record with one scalar a head where it had a tensor ``[heads]``."""
    flat: Record = {}
    for name, value in record.items():
        if value is not None and value.ndim:
            flat |= {part_metric(name, head): value[i] for i, head in enumerate(heads)}
        else:
            flat[name] = value
    return flat
