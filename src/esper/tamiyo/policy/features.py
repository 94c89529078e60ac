"""Observations: features of the host and of each slot, for any number of slots."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import log
from typing import Any, Self

import torch
from torch import Tensor

from esper.kasmina.seeds import AlphaMode, SeedSignals, SeedState
from esper.kasmina.slots import SlotSpec
from esper.kasmina.transfer import Table, cached_tensor
from esper.leyline.actions import Op, Style
from esper.leyline.stages import STAGE_COUNT, Stage
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tolaria.results import SLOT_MEASURES

HISTORY = 5
"""Number of previous steps whose validation scores are in the observation."""

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
    "log_price",
)
"""Names of the host features, in order."""

SEED_SIGNALS = (
    "contribution",
    "contribution_velocity",
    "contribution_known",
    "gradient_norm",
    "gradient_health",
    "previous_health",
    "exploding",
    "log_gradient_ratio",
    "improvement",
)
"""Names of the slot features that show how a seed learns."""

EMPTY_SLOT_SIGNALS = (
    "slot_known",
    "log_slot_gradient",
    "log_slot_gradient_ratio",
    "log_slot_activation",
    "active_share",
    *(f"log_{name}" for name in SLOT_MEASURES if name.startswith("gain_")),
)
"""Names of the slot features that show how a host learns around a slot without a seed: whether they
are known, and ``tolaria.backends.SLOT_MEASURES``. All are 0 in a slot with a seed, and where
they are unknown: before the first step, after a rollback, in the step after a prune."""

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
    *SEED_SIGNALS,
    "age",
    "stage_age",
    "log_seed_share",
    *EMPTY_SLOT_SIGNALS,
    "depth",
    "log_channels",
)
"""Names of the slot features, in order."""

SIZE_FEATURES = ("log_host_parameters", "log_growth", "log_price", "log_seed_share", "log_channels")
"""Names of the features of sizes and prices. They are not normalised by the moments of a run, in
which they may be constant, so that they tell hosts of any other size apart."""

SCORE_FEATURE_SCALE = 10.0
"""Factor applied to differences of scores."""
USUAL_PRICE, MIN_PRICE = 0.05, 1e-4
"""Price whose feature is 0, and the price below which the feature no longer falls."""
INFINITE_NORM = 1e6
"""Replaces an infinite norm."""
USUAL_HOST, USUAL_CHANNELS = 1000.0, 16.0
"""Parameters of a host and channels of a slot whose size features are 0."""
MIN_MEASURE, MAX_MEASURE, MEASURE_UNIT = 1e-12, 1e12, 5.0
"""Bounds of a measurement of a slot, and the unit of its logarithm in nats."""

CRITIC_FEATURES = ("twin_score", "gain", "known")
"""Names of the critic's additional features: the never-grow twin's score, the host's score
minus the twin's (without the price, times ``SCORE_FEATURE_SCALE``), and whether there is a twin."""


@dataclass(frozen=True, slots=True)
class FeatureNames:
    """Names of the features that a policy observes: a policy observes those it was trained on.

    Attributes:
        host, slots, critic: names of the columns of the tensors of an ``Observation``, in order.
    """

    host: tuple[str, ...]
    slots: tuple[str, ...]
    critic: tuple[str, ...]

    @classmethod
    def current(cls) -> Self:
        """The features of the observations of this version."""
        return cls(HOST_FEATURES, SLOT_FEATURES, CRITIC_FEATURES)

    def unknown(self) -> list[str]:
        """The features that this version does not compute."""
        names = FeatureNames.current()
        return [
            name
            for f in fields(self)
            for name in getattr(self, f.name)
            if name not in getattr(names, f.name)
        ]

    def columns(self, device: torch.device) -> dict[str, Tensor]:
        """Indices of the features among those of this version, int64, by tensor.

        Empty if they are all of this version in the same order.
        """
        names = FeatureNames.current()
        if self == names:
            return {}
        return {
            f.name: torch.tensor(
                [getattr(names, f.name).index(name) for name in getattr(self, f.name)],
                device=device,
            )
            for f in fields(self)
        }


@dataclass(frozen=True, slots=True)
class Observation:
    """Input of policy and critic; leading axes ``[...]`` are ``[N]`` or ``[T, N]``.

    Attributes:
        host: ``[..., len(HOST_FEATURES)]``.
        slots: ``[..., S, len(SLOT_FEATURES)]``.
        blueprints: blueprint of the seed in each slot, int64 ``[..., S]``.
        critic: ``[..., len(CRITIC_FEATURES)]``, seen only by the critic.
        masks: legal actions.
    """

    host: Tensor
    slots: Tensor
    blueprints: Tensor
    critic: Tensor
    masks: ActionMasks

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, masks included."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "masks"}
        return tensors | {"mask_slots": self.masks.slots, "mask_kinds": self.masks.kinds}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """The inverse of ``tensors``."""
        features = {name: value for name, value in tensors.items() if not name.startswith("mask_")}
        return cls(masks=ActionMasks(tensors["mask_slots"], tensors["mask_kinds"]), **features)


@dataclass(slots=True)
class Progress:
    """Measurements of N hosts so far in an episode.

    Attributes:
        step: environment steps completed.
        episode_length: steps per episode.
        losses, expected: validation loss and expected accuracy of the last ``HISTORY + 1`` steps,
            latest last, ``[N, HISTORY + 1]``; NaN before the scores of the initial host.
        train_loss, train_accuracy: means of the last epoch, ``[N]``; NaN before the first epoch and
            after a rollback.
        slot_measures: measurements of the slots in the last epoch, ``[N, S, len(SLOT_MEASURES)]``;
            NaN likewise, and where a seed was computed.
        last_op: op that took effect in the last step, WAIT if none did, int64 ``[N]``.
        success: whether the last action took effect, bool ``[N]``.
        rolled_back: whether the governor rolled the host back in the last step, bool ``[N]``.
        log_price: price of parameters, see ``log_price``, float32 ``[N]``.
        deadline: part of the episode after which nothing is trained, float64 ``[N]``.
    """

    step: int
    episode_length: int
    losses: Tensor
    expected: Tensor
    train_loss: Tensor
    train_accuracy: Tensor
    slot_measures: Tensor
    last_op: Tensor
    success: Tensor
    rolled_back: Tensor
    log_price: Tensor
    deadline: Tensor

    @property
    def remaining(self) -> Tensor:
        """The feature ``remaining``: part of the episode until the deadline, float32 ``[N]``."""
        return (self.deadline - self.step / self.episode_length).clamp(min=0.0).float()

    def map(self, function: Callable[[Tensor], Tensor]) -> "Progress":
        """A copy with ``function`` applied to every tensor."""
        tensors: dict[str, Any] = {
            f.name: function(getattr(self, f.name))
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)


def symlog(x: Tensor) -> Tensor:
    """``sign(x) ln(1 + |x|)``: linear near zero, logarithmic for large values."""
    return x.sign() * x.abs().log1p()


def host_features(
    progress: Progress,
    state: SeedState,
    host_parameters: int,
    seed_parameters: Tensor,
    max_seeds: int,
) -> Tensor:
    """Host features, float32 ``[N, len(HOST_FEATURES)]``; unknown values are -1.

    Args:
        progress: measurements of the N hosts.
        state: their seeds, ``[N, S]``.
        host_parameters: parameters of a host without seeds.
        seed_parameters: parameters of each living seed, int64 ``[N, S]``; 0 in other slots.
        max_seeds: limit of living seeds per host.
    """
    count, slots = state.stage.shape
    fraction = progress.step / progress.episode_length

    device = state.stage.device
    losses = symlog(torch.cat([progress.losses, progress.train_loss[:, None]], 1))
    scores = [losses, progress.expected, progress.train_accuracy[:, None]]
    history = _fill_unknown(torch.cat(scores, 1)).index_select(1, _score_columns(device))
    shares = SHARES[state.stage].mean(1)
    living = state.living.sum(1, keepdim=True)
    flags = torch.stack([progress.success, progress.rolled_back], 1).float()
    features = torch.cat(
        [
            torch.full((count, 1), fraction, device=device),
            progress.remaining[:, None],
            history,
            shares,
            flags[:, :1],
            OPS[progress.last_op],
            cached_tensor(((log_size(host_parameters),),), device).expand(count, 1),
            (seed_parameters.sum(1, keepdim=True).float() / host_parameters).log1p(),
            1.0 - living.float() / most_seeds(max_seeds, slots),
            flags[:, 1:],
            progress.log_price[:, None],
        ],
        1,
    )
    assert features.shape[1] == len(HOST_FEATURES)
    return features


def _score_columns(device: torch.device) -> Tensor:
    """The latest loss and score, the earlier losses and scores, and those of training, as columns
    of all losses followed by all scores."""
    losses, scores = (range(begin, begin + HISTORY + 2) for begin in (0, HISTORY + 2))
    latest = (losses[HISTORY], scores[HISTORY])
    training = (losses[-1], scores[-1])
    return cached_tensor((*latest, *losses[:HISTORY], *scores[:HISTORY], *training), device)


def _one_hot(values: tuple[int, ...]) -> Table:
    """One-hot rows for the integers from 0 to the largest of ``values``, one column per value.

    torch's one_hot without a number of classes makes the CPU wait for the largest index.
    """
    return Table([[float(i == v) for v in values] for i in range(max(values) + 1)])


OPS, STAGES, STYLES = _one_hot(tuple(Op)), _one_hot(tuple(Stage)), _one_hot(tuple(Style))
RAMPS = Table([[float(m == way) for way in (AlphaMode.UP, AlphaMode.DOWN)] for m in AlphaMode])
SHARES = Table(
    [
        [
            float(stage in stages)
            for stages in ((Stage.TRAINING,), (Stage.BLENDING,), (Stage.HOLDING, Stage.FOSSILISED))
        ]
        for stage in range(STAGE_COUNT)
    ]
)
"""For each stage, whether a slot counts towards ``share_training``, ``_blending``, ``_kept``."""


def slot_features(
    slots: tuple[SlotSpec, ...],
    episode_length: int,
    state: SeedState,
    signals: SeedSignals,
    host_parameters: int,
    seed_parameters: Tensor,
    slot_measures: Tensor,
) -> Tensor:
    """Slot features, float32 ``[N, S, len(SLOT_FEATURES)]``.

    Features of a seed are 0 in an empty slot, and ``EMPTY_SLOT_SIGNALS`` in an occupied one.

    Args:
        slots: the S slots of the hosts.
        episode_length: steps per episode.
        state: seeds of the N hosts, ``[N, S]``.
        signals: measurements of the seeds, ``[N, S]``.
        host_parameters: parameters of a host without seeds.
        seed_parameters: parameters of each living seed, int64 ``[N, S]``; 0 in other slots.
        slot_measures: see ``Progress``, ``[N, S, len(SLOT_MEASURES)]``.
    """
    living = state.living[..., None]
    alphas = torch.stack([state.alpha, state.alpha_velocity, state.goal, state.ramp_target], -1)
    durations = [state.ramp_steps, state.ramp_done, state.tempo, state.age, state.stage_age]
    ages = torch.stack(durations, -1) / episode_length
    contributions = [signals.contribution, signals.contribution_velocity, signals.improvement]
    points = SCORE_FEATURE_SCALE * torch.stack(contributions, -1).float().nan_to_num(0.0)
    gradients = [signals.gradient_norm, signals.gradient_ratio]
    norms = symlog(torch.stack(gradients, -1).float().nan_to_num(0.0, posinf=INFINITE_NORM))
    health = _fill_unknown(torch.stack([signals.health, signals.previous_health], -1))
    flags = torch.stack([signals.contribution.isfinite(), signals.exploding], -1).float()
    seeds = torch.cat(
        [
            alphas,
            RAMPS[state.ramp_mode],
            ages[..., :3],
            STYLES[state.style],
            points[..., :2],
            flags[..., :1],
            norms[..., :1],
            health,
            flags[..., 1:],
            norms[..., 1:],
            points[..., 2:],
            ages[..., 3:],
            (seed_parameters[..., None].float() / host_parameters).log1p(),
        ],
        -1,
    ).masked_fill(~living, 0.0)
    positions = cached_tensor(slot_positions(slots), living.device).expand(len(living), -1, -1)
    empty = _empty_slot_signals(slot_measures).masked_fill(living, 0.0)
    features = torch.cat([living.float(), STAGES[state.stage], seeds, empty, positions], -1)
    assert features.shape[-1] == len(SLOT_FEATURES)
    return features


def _empty_slot_signals(measures: Tensor) -> Tensor:
    """``EMPTY_SLOT_SIGNALS`` of slots without a seed; ``measures [..., len(SLOT_MEASURES)]``."""
    measures = measures.float()
    finite = measures[..., :1].isfinite()
    logarithms = measures.clamp(MIN_MEASURE, MAX_MEASURE).log() / MEASURE_UNIT
    shares = cached_tensor(tuple(n == "active_share" for n in SLOT_MEASURES), measures.device)
    values = torch.where(shares, measures, logarithms).nan_to_num(0.0, torch.inf, -torch.inf)
    return torch.cat([finite.float(), values.masked_fill(~finite, 0.0)], -1)


def log_size(host_parameters: int) -> float:
    """The host feature ``log_host_parameters``."""
    return log(host_parameters / USUAL_HOST) / 2.0


def log_price(price: Tensor) -> Tensor:
    """The host feature ``log_price``: logarithm of the price relative to 0.05, float32 ``[N]``."""
    return (price.float().clamp(min=MIN_PRICE) / USUAL_PRICE).log()


def utility(
    score: Tensor, added_parameters: Tensor, host_parameters: int | Tensor, price: float | Tensor
) -> Tensor:
    """``score - price ln(1 + added_parameters / host_parameters)``, elementwise; at most the score.

    Args:
        score: expected accuracy in [0, 1].
        added_parameters: parameters of the seeds that count.
        host_parameters: parameters of the host alone.
        price: price of parameters; doubling the host costs ``price ln 2`` of expected accuracy.
    """
    return score - price * growth(score, added_parameters, host_parameters)


def growth(score: Tensor, added_parameters: Tensor, host_parameters: int | Tensor) -> Tensor:
    """``ln(1 + added_parameters / host_parameters)`` in the dtype of ``score``."""
    return (added_parameters.to(score.dtype) / host_parameters).log1p()


def most_seeds(max_seeds: int, slots: int) -> int:
    """Maximum number of living seeds of a host with ``slots`` slots."""
    return max(1, min(max_seeds, slots))


def slot_positions(slots: tuple[SlotSpec, ...]) -> tuple[tuple[float, float], ...]:
    """Depth and ``log_channels`` of each slot, which do not depend on its seed.

    The channels are those of the layer, in a slot that spans one, and else those of the activation.
    """
    widths = (slot.span.units if slot.span else slot.channels for slot in slots)
    each = zip(slots, widths, strict=True)
    return tuple((slot.depth, log(width / USUAL_CHANNELS)) for slot, width in each)


def critic_features(score: Tensor, twin_score: Tensor | None) -> Tensor:
    """Critic features ``[N, len(CRITIC_FEATURES)]`` from scores ``[N]``; zeros without twins."""
    if twin_score is None:
        return torch.zeros(len(score), len(CRITIC_FEATURES), device=score.device)
    gain = SCORE_FEATURE_SCALE * (score - twin_score)
    return torch.stack([twin_score, gain, torch.ones_like(gain)], -1).float()


def _fill_unknown(x: Tensor) -> Tensor:
    """``x`` with NaN replaced by -1."""
    return x.float().nan_to_num(-1.0, torch.inf, -torch.inf)
