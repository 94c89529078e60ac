"""Proximal policy optimisation of the recurrent policy (Schulman et al., 2017)."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from esper.kasmina.rng import Purpose, random_bits
from esper.leyline.actions import HEAD_WIDTHS, HEADS
from esper.leyline.config import LearnerConfig
from esper.simic.advantage import explained_variance, generalised_advantages
from esper.simic.normalise import RunningMoments
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.action_masks import ActionMasks, MaskedCategorical
from esper.tamiyo.policy.factored_lstm import EpisodeNoise, FactoredLSTM, Hidden
from esper.tamiyo.policy.features import HOST_FEATURES, SLOT_FEATURES, Observation

ADVANTAGE_FLOOR = 0.1
"""Advantages are divided by at least this, so that noise is not blown up into a signal."""


class PPOAgent:
    """Policy, critic, optimizer and normalisers; acts and learns.

    Args:
        config: see ``leyline.config.LearnerConfig``.
        seed: of initial weights, action sampling and shuffling.
        device: where the networks live.
    """

    def __init__(self, config: LearnerConfig, seed: int, device: torch.device):
        self.config, self.seed, self.device = config, seed, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = FactoredLSTM(config.lstm_hidden).to(device)
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(), lr=config.learning_rate, eps=1e-5, fused=True
        )
        self.host_moments = RunningMoments((len(HOST_FEATURES),), device)
        self.slot_moments = RunningMoments((len(SLOT_FEATURES),), device)
        self.return_moments = RunningMoments((), device)
        self.updates = 0
        self.greedy = False

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``Actor.begin``."""
        self._environments, self._episode = environments, episode
        self._noise: EpisodeNoise | None = None
        self._hidden: Hidden = self.policy.initial_hidden(len(environments))

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Actor.act``. Draws from the policy, or takes its mode when ``greedy``."""
        noise = None
        if not self.greedy:
            widest = max(*HEAD_WIDTHS.values(), observation.slots.shape[-2])
            if self._noise is None or self._noise.shape[-1] != widest:
                self._noise = EpisodeNoise(self.seed, self._environments, self._episode, widest)
            noise = self._noise.at(step)
        actions, log_prob, value, self._hidden = self.policy.act(
            self.normalised(observation), self._hidden, noise
        )
        return actions, log_prob, value

    @torch.no_grad()
    def op_probabilities(self, masks: ActionMasks) -> Tensor:
        """Probability of each op in the step it acted in last, ``[N, ops]``.

        The LSTM's state after a step is its output of that step.
        """
        logits = self.policy.op_head(self._hidden[0][-1])
        return MaskedCategorical(logits, masks.ops, validate=False).log_probs.exp()

    def normalised(self, observation: Observation) -> Observation:
        """The observation as the network sees it."""
        return replace(
            observation,
            host=self.host_moments.normalise(observation.host),
            slots=self.slot_moments.normalise(observation.slots),
        )

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learn from one rollout. Returns what happened, by name; one host transfer.

        A minibatch whose loss or gradient is not finite, and every minibatch after the KL bound
        was passed, leaves weights and optimizer as they are.
        """
        observation = self.normalised(rollout.observation)
        values = self.return_moments.restore(rollout.values)
        advantages, targets = self._advantages(rollout, values, self.config.trace_decay)
        _, returns = self._advantages(rollout, values, 1.0)
        scaled_targets = self.return_moments.scale(targets)
        advantages = advantages - advantages.mean()
        advantages = advantages / advantages.std(correction=0).clamp(min=ADVANTAGE_FLOOR)
        stopped = torch.zeros((), device=self.device)
        records = []
        for chosen in self._minibatches(rollout.actions.shape[1]):
            part = Observation.from_tensors(
                {name: tensor[:, chosen] for name, tensor in observation.tensors().items()}
            )
            record, stopped = self._learn(
                part,
                rollout.actions[:, chosen],
                rollout.log_prob[:, chosen],
                advantages[:, chosen],
                scaled_targets[:, chosen],
                stopped,
            )
            records.append(record)
        self.updates += 1
        overall, within = explained_variance(values, returns)
        self._update_moments(rollout, targets)
        return self._summary(
            records,
            {
                "explained_variance": overall,
                "explained_variance_within_step": within,
                "return_mean": returns[0].mean(),
                "value_mean": values[0].mean(),
            },
        )

    def _advantages(
        self, rollout: Rollout, values: Tensor, trace_decay: float
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns of whole episodes; there is nothing behind the last step."""
        return generalised_advantages(
            rollout.rewards,
            values,
            torch.zeros_like(values[0]),
            rollout.terminated,
            self.config.discount,
            trace_decay,
        )

    def _minibatches(self, environments: int) -> list[Tensor]:
        """Environments of each minibatch of each epoch, shuffled by a keyed draw."""
        streams = torch.arange(self.config.ppo_epochs, device=self.device)
        drawn = random_bits(
            self.seed, streams, Purpose.POLICY_SHUFFLE, self.updates, 0, environments
        )
        count = min(self.config.minibatches, environments)
        return [part for order in drawn.argsort(1) for part in order.tensor_split(count)]

    def _learn(
        self,
        observation: Observation,
        actions: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        targets: Tensor,
        stopped: Tensor,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """One optimizer step on whole episodes ``[T, n]``."""
        config = self.config
        hidden = self.policy.initial_hidden(actions.shape[1])
        said = self.policy.evaluate_actions(observation, actions, hidden)

        log_ratio = said.log_prob - old_log_prob
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        value_loss = 0.5 * (said.value - targets).square().mean()
        entropy = said.head_entropy.sum(-1).mean()
        loss = policy_loss + config.value_weight * value_loss - config.entropy * entropy

        # k3 estimator (Schulman, "Approximating KL divergence", 2020); expm1 keeps its digits.
        kl = (torch.expm1(log_ratio) - log_ratio).mean().detach()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        head_norms = {
            f"head_grad_norms/{head}": self._head_norm(head) for head in (*HEADS, "value")
        }
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_gradient_norm)
        refused = (~(loss.isfinite() & norm.isfinite())).float()
        stopped = torch.maximum(stopped, (kl > 1.5 * config.target_kl).float())
        self._step_unless(torch.maximum(refused, stopped))

        chosen = said.head_choice.float()
        head_entropy = said.head_entropy.detach().sum((0, 1)) / chosen.sum((0, 1)).clamp(min=1.0)
        record = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": kl,
            "clip_fraction": ((ratio - 1.0).abs() > config.clip).float().mean(),
            "ratio_max": ratio.max(),
            "grad_norm": norm,
            "refused": refused,
            "stopped": stopped,
            **head_norms,
            **{f"head_entropy/{h}": e for h, e in zip(HEADS, head_entropy, strict=True)},
        }
        return {name: value.detach() for name, value in record.items()}, stopped

    def _step_unless(self, skip: Tensor) -> None:
        """An optimizer step that the device itself leaves out where ``skip`` is 1.

        Fused Adam skips parameters, moments and step count when ``found_inf`` is set; this is how
        a GradScaler does it, and it needs no host transfer.
        """
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.step()

    def _head_norm(self, head: str) -> Tensor:
        """Gradient norm of a head's own parameters; NaN where a gradient is missing."""
        gradients = [p.grad for p in self.policy.head_parameters(head)]
        if any(gradient is None for gradient in gradients):
            return torch.full((), float("nan"), device=self.device)
        return torch.linalg.vector_norm(
            torch.cat([g.flatten() for g in gradients if g is not None])
        )

    def _update_moments(self, rollout: Rollout, targets: Tensor) -> None:
        """Take the round in; only now, so that rollout and update saw the same numbers."""
        self.host_moments.update(rollout.observation.host)
        seen = rollout.observation
        # Rows that are not finite are left out; to index them would wait for the device.
        self.slot_moments.update(
            torch.where(seen.masks.exists[..., None], seen.slots, float("nan"))
        )
        self.return_moments.update(targets)

    def _summary(
        self, records: list[dict[str, Tensor]], extra: dict[str, Tensor]
    ) -> dict[str, float]:
        names = list(records[0])
        table = torch.stack([torch.stack([r[name].float() for name in names]) for r in records])
        last = {"stopped": table[-1, names.index("stopped")]}
        peak = {"ratio_max": table[:, names.index("ratio_max")].max()}
        first = {
            "first_kl": table[0, names.index("approx_kl")],
            "first_ratio_max": table[0, names.index("ratio_max")],
        }
        mean = dict(zip(names, table.mean(0), strict=True))
        everything = mean | last | peak | first | extra
        numbers = torch.stack([value.float() for value in everything.values()]).tolist()
        summary = dict(zip(everything, numbers, strict=True))
        return summary | {"learning_rate": self.config.learning_rate}
