"""The plateau heuristic: grow when the host stops improving, keep seeds that contribute.

It gets the same observations and masks as the learned policy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.actions import ALPHA_TARGETS, BLUEPRINTS, TEMPO_STEPS, Op, Style
from esper.leyline.stages import Stage
from esper.tamiyo.baselines import first_applicable, with_canonical, without_learning
from esper.tamiyo.policy.features import (
    HOST_FEATURES,
    SCORE_FEATURE_SCALE,
    SLOT_FEATURES,
    Observation,
)

ROTATION = ("conv_light", "conv_heavy", "attention", "norm", "depthwise", "mlp_small", "mlp")
"""Blueprints to try in turn; blueprints that no slot of the host accepts are skipped."""


@dataclass(frozen=True, slots=True)
class HeuristicConfig:
    """Thresholds of the heuristic.

    Attributes:
        plateau_slope: the host is on a plateau when its smoothed validation loss falls by less
            than this fraction per step, averaged over an eighth of the episode.
        smoothing: weight of the latest loss in the smoothed loss.
        least_contribution: a seed must add more than this expected accuracy to be fossilised.
        penalty: added to a blueprint's penalty when one of its seeds is pruned; the sum halves in
            every step.
        penalty_limit: a blueprint with at least this penalty is skipped.
    """

    plateau_slope: float = 0.03
    smoothing: float = 0.5
    least_contribution: float = 0.005
    penalty: float = 2.0
    penalty_limit: float = 3.0


class HeuristicActor:
    """Plateau heuristic for N environments at once.

    Args:
        episode_length: steps per episode.
        config: see ``HeuristicConfig``.
    """

    def __init__(self, episode_length: int, config: HeuristicConfig | None = None):
        self.config = config or HeuristicConfig()
        self.window = max(1, round(episode_length / 8))

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        count, device = len(environments), environments.device
        self._losses: list[Tensor] = []
        self._attempts = torch.zeros(count, dtype=torch.long, device=device)
        self._penalties = torch.zeros(count, len(ROTATION), device=device)
        self._since_prune = torch.full((count,), self.window, device=device)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``.

        Order of precedence: prune, fossilise, advance, germinate, wait.
        """
        plateau = self._plateau(observation)
        contribution = observation.slots[..., SLOT_FEATURES.index("contribution")]
        contribution = contribution / SCORE_FEATURE_SCALE
        holding = observation.slots[..., SLOT_FEATURES.index(f"stage_{Stage.HOLDING.name.lower()}")]
        contributes = contribution > self.config.least_contribution
        legal = observation.masks.slots

        requests = {
            Op.PRUNE: legal[:, Op.PRUNE] & (holding > 0) & ~contributes,
            Op.FOSSILISE: legal[:, Op.FOSSILISE] & contributes,
            Op.ADVANCE: legal[:, Op.ADVANCE],
        }
        kinds, available = self._next_blueprint(observation)
        ready = plateau & available & (self._since_prune >= self.window)
        requests[Op.GERMINATE] = legal[:, Op.GERMINATE] & ready[:, None]

        op, slot = first_applicable(requests)
        self._update_penalties(observation, op, slot)
        germinates = op == Op.GERMINATE
        self._attempts += germinates
        heads = {
            "op": op,
            "slot": slot,
            "blueprint": torch.where(germinates, kinds, 0),
            "style": torch.full_like(op, int(Style.LINEAR_ADD)),
            "tempo": torch.full_like(op, TEMPO_STEPS.index(3)),
            "alpha_target": torch.full_like(op, ALPHA_TARGETS.index(1.0)),
        }
        return without_learning(with_canonical(heads))

    def _plateau(self, observation: Observation) -> Tensor:
        """Whether the smoothed validation loss has stopped falling, bool ``[N]``."""
        loss = torch.expm1(observation.host[:, HOST_FEATURES.index("validation_loss")])
        if self._losses:
            loss = torch.lerp(self._losses[-1], loss, self.config.smoothing)
        self._losses.append(loss)
        if len(self._losses) <= self.window:
            return torch.zeros_like(loss, dtype=torch.bool)
        before = self._losses[-1 - self.window]
        return (before - loss) / before.clamp(min=1e-6) < self.config.plateau_slope * self.window

    def _next_blueprint(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """The next blueprint in the rotation, int64 ``[N]``, and whether any is possible."""
        kinds = torch.tensor(
            [BLUEPRINTS.index(name) for name in ROTATION], device=self._attempts.device
        )
        options = observation.masks.kinds.any(1)[:, kinds]
        possible = options & (self._penalties < self.config.penalty_limit)
        rank = options.cumsum(1) - 1
        turn = (rank - self._attempts[:, None]) % options.sum(1, keepdim=True).clamp(min=1)
        order = torch.where(possible, turn, len(ROTATION))
        return kinds[order.argmin(1)], possible.any(1)

    def _update_penalties(self, observation: Observation, op: Tensor, slot: Tensor) -> None:
        """Add a penalty to pruned blueprints, and count the steps since the last prune."""
        pruned = op == Op.PRUNE
        self._since_prune = torch.where(pruned, 0, self._since_prune + 1)
        blueprint = observation.blueprints.gather(1, slot[:, None])
        kinds = torch.tensor([BLUEPRINTS.index(name) for name in ROTATION], device=op.device)
        blame = pruned[:, None] & (blueprint == kinds)
        self._penalties = 0.5 * self._penalties + self.config.penalty * blame
