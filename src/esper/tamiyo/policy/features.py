"""What a policy sees: features of the host and of each slot, never of a fixed number of slots."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from esper.kasmina.constants import constant
from esper.kasmina.seeds import AlphaMode, SeedSignals, SeedState, among
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import Op, Style
from esper.leyline.stages import LIVING, Stage
from esper.tamiyo.policy.action_masks import ActionMasks

HISTORY = 5
"""Past validation scores in the observation."""

HOST_FEATURES = (
    "progress",
    "remaining",
    "validation_loss",
    "expected_accuracy",
    *(f"loss_history_{i}" for i in range(HISTORY)),
    *(f"accuracy_history_{i}" for i in range(HISTORY)),
    "train_loss",
    "train_accuracy",
    "share_training",
    "share_blending",
    "share_kept",
    "action_success",
    *(f"last_{op.name.lower()}" for op in Op),
    "log_host_parameters",
    "log_growth",
    "budget_left",
    "rolled_back",
)
"""Names of the host features, in order."""

SLOT_FEATURES = (
    "occupied",
    *(f"stage_{stage.name.lower()}" for stage in Stage),
    "alpha",
    "alpha_velocity",
    "alpha_goal",
    "ramp_target",
    "ramp_up",
    "ramp_down",
    "ramp_steps",
    "ramp_done",
    "tempo",
    *(f"style_{style.name.lower()}" for style in Style),
    "contribution",
    "contribution_velocity",
    "contribution_known",
    "gradient_norm",
    "gradient_health",
    "previous_health",
    "exploding",
    "log_gradient_ratio",
    "improvement",
    "age",
    "stage_age",
    "log_seed_share",
    "depth",
    "log_channels",
)
"""Names of the slot features, in order."""

CRITIC_FEATURES = ("twin_score", "gain", "known")
"""Names of what the critic sees besides: the never-grow twin's score, and the gain over it."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What policy and critic are given; leading axes ``[...]`` are ``[N]`` or ``[T, N]``.

    Attributes:
        host: ``[..., len(HOST_FEATURES)]``.
        slots: ``[..., S, len(SLOT_FEATURES)]``.
        blueprints: what lives in each slot, int64 ``[..., S]``.
        critic: ``[..., len(CRITIC_FEATURES)]``, for the critic alone.
        masks: what may be done.
    """

    host: Tensor
    slots: Tensor
    blueprints: Tensor
    critic: Tensor
    masks: ActionMasks

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, masks included."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "masks"}
        return own | {"mask_slots": self.masks.slots, "mask_kinds": self.masks.kinds}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """The inverse of ``tensors``."""
        own = {name: value for name, value in tensors.items() if not name.startswith("mask_")}
        return cls(masks=ActionMasks(tensors["mask_slots"], tensors["mask_kinds"]), **own)


@dataclass(slots=True)
class Progress:
    """What has been measured of N hosts so far in an episode.

    Attributes:
        step: environment steps that have passed.
        episode_length: steps of an episode.
        losses, expected: validation scores of the last ``HISTORY`` steps and now, newest last,
            ``[N, HISTORY + 1]``, NaN where there was none.
        train_loss, train_accuracy: of the last epoch, ``[N]``, NaN before the first.
        last_op: int64 ``[N]``, as it took effect.
        success: whether the last action took effect, bool ``[N]``.
        rolled_back: whether the governor rolled the host back in the last step, bool ``[N]``.
    """

    step: int
    episode_length: int
    losses: Tensor
    expected: Tensor
    train_loss: Tensor
    train_accuracy: Tensor
    last_op: Tensor
    success: Tensor
    rolled_back: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Progress":
        """The progress with ``function`` applied to every tensor."""
        tensors: dict[str, Any] = {
            f.name: function(getattr(self, f.name))
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)


def symlog(x: Tensor) -> Tensor:
    """``sign(x) ln(1 + |x|)``: linear near zero, tame far out."""
    return x.sign() * x.abs().log1p()


def host_features(
    progress: Progress,
    state: SeedState,
    host_parameters: int,
    seed_parameters: Tensor,
    max_seeds: int,
) -> Tensor:
    """``[N, len(HOST_FEATURES)]`` in float32; unknown values are -1."""
    count, slots = state.stage.shape
    part = progress.step / progress.episode_length

    def column(value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, device=state.stage.device).float().expand(count)[:, None]

    def share(*stages: Stage) -> Tensor:
        return among(state.stage, stages).float().mean(1, keepdim=True)

    added = seed_parameters.sum(1, keepdim=True).float()
    living = state.living.float().sum(1, keepdim=True)
    features = torch.cat(
        [
            column(part),
            column(1.0 - part),
            _known(symlog(progress.losses[:, -1:])),
            _known(progress.expected[:, -1:]),
            _known(symlog(progress.losses[:, :-1])),
            _known(progress.expected[:, :-1]),
            _known(symlog(progress.train_loss)[:, None]),
            _known(progress.train_accuracy[:, None]),
            share(Stage.TRAINING),
            share(Stage.BLENDING),
            share(Stage.HOLDING, Stage.FOSSILISED),
            column(progress.success),
            _one_of(progress.last_op, tuple(Op)),
            column(host_parameters).log() / 10.0,
            (added / host_parameters).log1p(),
            1.0 - living / max(1, min(max_seeds, slots)),
            column(progress.rolled_back),
        ],
        1,
    )
    assert features.shape[1] == len(HOST_FEATURES)
    return features


def _one_of(x: Tensor, values: tuple[int, ...]) -> Tensor:
    """1 where ``x [...]`` is each of ``values``, 0 elsewhere, ``[..., len(values)]``.

    torch's one_hot looks at the largest number first, for which the host waits.
    """
    return (x[..., None] == constant(values, x.device)).float()


def slot_features(
    slots: tuple[SlotSpec, ...],
    episode_length: int,
    state: SeedState,
    signals: SeedSignals,
    host_parameters: int,
    seed_parameters: Tensor,
) -> Tensor:
    """``[N, S, len(SLOT_FEATURES)]`` in float32; what belongs to a seed is 0 in an empty slot."""
    living = among(state.stage, LIVING)

    def ages(x: Tensor) -> Tensor:
        return x.float() / episode_length

    stages = _one_of(state.stage, tuple(Stage))
    of_seed = [
        state.alpha,
        state.alpha_velocity,
        state.goal,
        state.ramp_target,
        (state.ramp_mode == AlphaMode.UP).float(),
        (state.ramp_mode == AlphaMode.DOWN).float(),
        ages(state.ramp_steps),
        ages(state.ramp_done),
        ages(state.tempo),
        *_one_of(state.style, tuple(Style)).unbind(-1),
        10.0 * signals.contribution.nan_to_num(0.0),
        10.0 * signals.contribution_velocity,
        signals.contribution.isfinite().float(),
        symlog(signals.gradient_norm.nan_to_num(0.0, posinf=1e6)),
        _known(signals.health),
        _known(signals.previous_health),
        signals.exploding.float(),
        symlog(signals.gradient_ratio.nan_to_num(0.0, posinf=1e6)),
        10.0 * signals.improvement.nan_to_num(0.0),
        ages(state.age),
        ages(state.stage_age),
        (seed_parameters.float() / host_parameters).log1p(),
    ]
    seeds = torch.where(living[..., None], torch.stack([f.float() for f in of_seed], -1), 0.0)
    places = torch.tensor([[slot.depth, slot.channels] for slot in slots], device=living.device)
    places[:, 1] = places[:, 1].log() / 5.0
    place = places.expand(*living.shape, -1)
    features = torch.cat([living[..., None].float(), stages, seeds, place], -1)
    assert features.shape[-1] == len(SLOT_FEATURES)
    return features


def critic_features(score: Tensor, twin_score: Tensor | None) -> Tensor:
    """``[N, len(CRITIC_FEATURES)]`` of scores ``[N]`` in [0, 1]; zeros without twins."""
    if twin_score is None:
        return torch.zeros(len(score), len(CRITIC_FEATURES), device=score.device)
    gain = 10.0 * (score - twin_score)
    return torch.stack([twin_score, gain, torch.ones_like(gain)], -1).float()


def _known(x: Tensor) -> Tensor:
    """-1 where the value is NaN."""
    return torch.where(x.isnan(), -1.0, x).float()
