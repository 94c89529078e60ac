"""Try and keep: plant in every slot, measure contributions, keep what pays its price.

The rule a user would write first. It needs no look at the host before it plants, because the
contribution of a planted seed is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.actions import ALPHA_SPEED_STEPS, CANONICAL_CHOICE, Op, Style
from esper.leyline.stages import Stage
from esper.runtime.tasks import Task
from esper.tamiyo.baselines import first_applicable, on_device, with_canonical, without_learning
from esper.tamiyo.plans import blueprint_of
from esper.tamiyo.policy.features import (
    HOST_FEATURES,
    SCORE_FEATURE_SCALE,
    SLOT_FEATURES,
    USUAL_PRICE,
    Observation,
)

REST = 2
"""Steps before the end at which a trial has pruned or fossilised the seed of every slot."""


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
        """See ``simic.growth.collect.Actor.begin``."""
        self._trial = on_device(self.trial, environments.device)
        self._planted = torch.zeros_like(self._trial.blueprint, dtype=torch.bool)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``simic.growth.collect.Actor.act``.

        Order of precedence: prune, fossilise, advance, germinate, wait.
        """
        legal, trial = observation.masks.slots, self._trial
        worth = seed_worth(observation)
        deciding = (trial.decision <= step)[:, None]
        order = worth.argsort(1, descending=True).argsort(1)
        kept = (worth > 0.0) & (order < trial.keep[:, None])
        known = feature(observation, "contribution_known") > 0.0
        fossilised = feature(observation, f"stage_{Stage.FOSSILISED.name.lower()}") > 0.0
        rejected = deciding & known & ~fossilised & ~kept & legal[:, Op.PRUNE]
        due = (trial.start <= step) & (trial.decision > step)
        wanted = {
            Op.PRUNE: rejected,
            Op.FOSSILISE: legal[:, Op.FOSSILISE] & deciding & kept,
            Op.ADVANCE: legal[:, Op.ADVANCE],
            Op.GERMINATE: legal[:, Op.GERMINATE] & due[:, None] & ~self._planted,
        }
        op, slot = first_applicable(wanted, {Op.PRUNE: order.float() + 1.0})
        places = torch.arange(self._planted.shape[1], device=op.device)
        self._planted |= (op == Op.GERMINATE)[:, None] & (places == slot[:, None])
        return growth_actions(op, slot, trial.blueprint)


def smallest_trial(tasks: Sequence[Task], slots: int, episode_length: int) -> Trial:
    """The smallest seed in every slot, from the first step until shortly before the last.

    Args:
        tasks: the task of each environment.
        slots: S of the observations.
        episode_length: steps per episode.
    """
    count = len(tasks)
    blueprint = torch.zeros(count, slots, dtype=torch.long)
    for row, task in enumerate(tasks):
        for s, slot in enumerate(task.host.slots):
            blueprint[row, s] = blueprint_of(0.0, slot)
    decisions = [last_decision(episode_length, len(task.host.slots)) for task in tasks]
    return Trial(
        blueprint=blueprint,
        start=torch.zeros(count, dtype=torch.long),
        decision=torch.tensor(decisions),
        keep=torch.full((count,), slots),
    )


def last_decision(episode_length: int, slots: int) -> int:
    """The latest step from which every slot's seed can still be pruned or fossilised."""
    return max(1, episode_length - slots - REST)


def growth_actions(op: Tensor, slot: Tensor, blueprint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Actions of a rule: seeds blend linearly at the first tempo, and a prune is at once.

    Args:
        op, slot: int64 ``[N]``.
        blueprint: blueprint for each slot, int64 ``[N, S]``.

    Returns:
        see ``simic.growth.collect.Actor.act``.
    """
    germinates = op == Op.GERMINATE
    planted = blueprint.gather(1, slot[:, None])[:, 0]
    heads = {
        "op": op,
        "slot": slot,
        "blueprint": torch.where(germinates, planted, CANONICAL_CHOICE["blueprint"]),
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
