"""The policy ``rule``: plant in every slot, measure contributions, keep what pays its price.

The rule a user would write first. It needs no look at the host before it plants, because the
contribution of a planted seed is measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.blueprints import SHIPPED_BLUEPRINTS
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import ALPHA_SPEED_STEPS, BLUEPRINTS, CANONICAL_CHOICE, Op, Style
from esper.leyline.stages import Stage
from esper.tamiyo.baselines import (
    Actor,
    blueprint_of,
    first_applicable,
    on_device,
    with_canonical,
    without_learning,
)
from esper.tamiyo.policy.features import (
    HOST_FEATURES,
    SCORE_FEATURE_SCALE,
    SLOT_FEATURES,
    USUAL_PRICE,
    Observation,
)

MARGIN = 2
"""Steps before the end at which a trial has pruned or fossilised the seed of every slot."""


@dataclass(frozen=True, slots=True)
class RuleSettings:
    """What the policy ``rule`` plants, and when it decides.

    Attributes:
        blueprints: the first of these that a slot accepts is planted there; the smallest blueprint
            of the slot if it accepts none of them.
        start: first step in which a seed may germinate.
        decision: part of the episode after which nothing more is planted, and seeds are pruned and
            fossilised; earlier where not every slot could be decided about before the end.
        margin: steps before the end at which every slot is decided about.
        plugins_first: whether a blueprint of the user's own that a slot accepts comes first.
    """

    blueprints: tuple[str, ...] = ()
    start: int = 0
    decision: float = 1.0
    margin: int = MARGIN
    plugins_first: bool = False

    def blueprint(self, slot: SlotSpec) -> int:
        """Index of the blueprint that is planted in ``slot``."""
        options = [BLUEPRINTS[kind] for kind in slot.kinds]
        plugins = [
            name for name in options if name not in SHIPPED_BLUEPRINTS and self.plugins_first
        ]
        name = next((name for name in (*plugins, *self.blueprints) if name in options), None)
        return blueprint_of(0.0, slot) if name is None else BLUEPRINTS.index(name)

    def decision_step(self, episode_length: int, slots: int) -> int:
        """The step from which seeds are pruned and fossilised, one per step."""
        return max(
            1, min(round(self.decision * episode_length), episode_length - slots - self.margin)
        )


OF_TASKS = RuleSettings()
"""The settings on hosts of a task."""
OF_OWN_MODELS = RuleSettings(
    ("conv_light", "mlp_small", "mlp"), start=1, decision=0.7, margin=1, plugins_first=True
)
"""The settings on a module of the user's own, whose seeds are larger and learn for longer. ``mlp``
generalises worse than ``mlp_small`` on small tables; the first step there follows an epoch."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What to plant and what to keep, for N environments.

    Attributes:
        blueprint: blueprint for each slot, int64 ``[N, S]``.
        start: first step in which a seed may germinate, int64 ``[N]``.
        decision: step from which seeds are pruned and fossilised, int64 ``[N]``.
        keep: most seeds that are kept, int64 ``[N]``.
    """

    blueprint: Tensor
    start: Tensor
    decision: Tensor
    keep: Tensor


class TryAndKeepActor:
    """Plants a seed in every slot and keeps the best that pay their price.

    From the step of the decision on, seeds are ranked by contribution minus price. Those that do
    not pay, or are not among the best, are pruned one per step, the worst first; then the others
    are fossilised. A seed that is not fossilised at the end does not count.

    Args:
        trial: one row per environment, with as many slots as the observations.
    """

    def __init__(self, trial: Trial):
        self.trial = trial

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self._trial = on_device(self.trial, environments.device)
        self._plantings = torch.zeros_like(self._trial.blueprint, dtype=torch.bool)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``.

        Order of precedence: prune, fossilise, advance, germinate, wait.
        """
        legal, trial = observation.masks.slots, self._trial
        worth = seed_worth(observation)
        deciding = (trial.decision <= step)[:, None]
        order = worth.argsort(1, descending=True).argsort(1)
        keeps = (worth > 0.0) & (order < trial.keep[:, None])
        is_measured = feature(observation, "contribution_known") > 0.0
        fossilised = feature(observation, f"stage_{Stage.FOSSILISED.name.lower()}") > 0.0
        prunes = deciding & is_measured & ~fossilised & ~keeps & legal[:, Op.PRUNE]
        due = (trial.start <= step) & (trial.decision > step)
        requests = {
            Op.PRUNE: prunes,
            Op.FOSSILISE: legal[:, Op.FOSSILISE] & deciding & keeps,
            Op.ADVANCE: legal[:, Op.ADVANCE],
            Op.GERMINATE: legal[:, Op.GERMINATE] & due[:, None] & ~self._plantings,
        }
        op, slot = first_applicable(requests, {Op.PRUNE: order.float() + 1.0})
        slots = torch.arange(self._plantings.shape[1], device=op.device)
        self._plantings |= (op == Op.GERMINATE)[:, None] & (slots == slot[:, None])
        return growth_actions(op, slot, trial.blueprint)


def trial_of(
    slots: Sequence[Sequence[SlotSpec]],
    width: int,
    episode_length: int,
    settings: RuleSettings = OF_TASKS,
) -> Trial:
    """A seed in every slot, and the decision about all of them at once.

    Args:
        slots: the slots of each environment's host.
        width: S of the observations.
        episode_length: steps per episode.
        settings: what is planted, and when.
    """
    count = len(slots)
    blueprint = torch.zeros(count, width, dtype=torch.long)
    for row, specs in enumerate(slots):
        for s, slot in enumerate(specs):
            blueprint[row, s] = settings.blueprint(slot)
    decisions = [settings.decision_step(episode_length, len(specs)) for specs in slots]
    return Trial(
        blueprint=blueprint,
        start=torch.full((count,), settings.start),
        decision=torch.tensor(decisions),
        keep=torch.full((count,), width),
    )


def growth_actions(op: Tensor, slot: Tensor, blueprint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Actions of a rule: seeds blend linearly at the first tempo, and a prune is at once.

    Args:
        op, slot: int64 ``[N]``.
        blueprint: blueprint for each slot, int64 ``[N, S]``.

    Returns:
        see ``baselines.Actor.act``.
    """
    germinates = op == Op.GERMINATE
    choice = blueprint.gather(1, slot[:, None])[:, 0]
    heads = {
        "op": op,
        "slot": slot,
        "blueprint": torch.where(germinates, choice, CANONICAL_CHOICE["blueprint"]),
        "style": torch.where(germinates, int(Style.LINEAR_ADD), CANONICAL_CHOICE["style"]),
        "tempo": torch.where(germinates, 0, CANONICAL_CHOICE["tempo"]),
        "alpha_speed": torch.where(
            op == Op.PRUNE, ALPHA_SPEED_STEPS.index(0), CANONICAL_CHOICE["alpha_speed"]
        ),
    }
    return without_learning(with_canonical(heads))


def seed_worth(observation: Observation) -> Tensor:
    """Contribution of each seed minus the price of its parameters alone, ``[N, S]``.

    -inf where no contribution is known.
    """
    price = USUAL_PRICE * observation.host[:, HOST_FEATURES.index("log_price")].exp()
    cost = price[:, None] * feature(observation, "log_seed_share")
    worth = feature(observation, "contribution") / SCORE_FEATURE_SCALE - cost
    return torch.where(feature(observation, "contribution_known") > 0.0, worth, -torch.inf)


def feature(observation: Observation, name: str) -> Tensor:
    """A slot feature, ``[N, S]``."""
    return observation.slots[..., SLOT_FEATURES.index(name)]


class RuleActor:
    """Tries a seed in every slot and keeps all that pay their price.

    Of the variants of try-and-keep the one with ``OF_TASKS`` is best on the family ``adaptation``.
    Where only one seed may live, it tries the last slot, then the others from the first on, and
    keeps the first seed that pays.

    Args:
        slots: returns the slots of each environment's host in the current episode.
        episode_length: steps per episode.
        max_seeds: limit of living seeds per environment; None without a limit.
        settings: what it plants and when it decides; where one seed may live, it plants the
            smallest.
    """

    def __init__(
        self,
        slots: Callable[[], Sequence[Sequence[SlotSpec]]],
        episode_length: int,
        max_seeds: int | None = None,
        settings: RuleSettings = OF_TASKS,
    ):
        self.slots, self.episode_length = slots, episode_length
        self.max_seeds, self.settings = max_seeds, settings

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self._environments, self._episode = environments, episode
        self._first = True

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``. Hosts are known only after ``begin``."""
        if self._first:
            self._first, self._actor = False, self._actor_for(observation.slots.shape[1])
            self._actor.begin(self._environments, self._episode)
        return self._actor.act(observation, step)

    def _actor_for(self, width: int) -> Actor:
        if self.max_seeds == 1 < width:
            from esper.tamiyo.try_in_turn import TryInTurnActor, turns_of

            return TryInTurnActor(turns_of(self.slots(), width, self.episode_length))
        return TryAndKeepActor(trial_of(self.slots(), width, self.episode_length, self.settings))
