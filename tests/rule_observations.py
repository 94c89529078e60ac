"""Observations of one environment for which the right decision of a rule is known."""

import torch

from esper.leyline.actions import HEADS, Op
from esper.leyline.stages import Stage
from esper.tamiyo.baselines import Actor
from esper.tamiyo.policy.features import HOST_FEATURES, SLOT_FEATURES, USUAL_PRICE, Observation
from synthetic import random_observation

SLOTS = 3


NOTHING: list[float | None] = [None] * SLOTS
"""Contributions of which none is known."""


def choice(actor: Actor, observation: Observation, step: int) -> tuple[Op, int, int]:
    """Op, slot and blueprint that the actor chooses for the single environment."""
    row = actor.act(observation, step)[0][0].tolist()
    return Op(row[0]), row[HEADS.index("slot")], row[HEADS.index("blueprint")]


def observed(
    legal: dict[Op, list[int]],
    contribution: list[float | None],
    share: float = 0.0,
    stages: list[Stage] | None = None,
    price: float = USUAL_PRICE,
) -> Observation:
    """One environment with ``legal`` slots by op and seeds of known or unknown contributions."""
    found = random_observation((1,), SLOTS, 0)
    found.slots.zero_()
    found.masks.slots.zero_()
    found.masks.slots[:, Op.WAIT] = True
    for op, slots in legal.items():
        found.masks.slots[0, op, slots] = True
    stages = stages or [Stage.HOLDING] * SLOTS
    for s, value in enumerate(contribution):
        found.slots[0, s, SLOT_FEATURES.index("contribution")] = 10.0 * (value or 0.0)
        found.slots[0, s, SLOT_FEATURES.index("contribution_known")] = float(value is not None)
        found.slots[0, s, SLOT_FEATURES.index("log_seed_share")] = share
        found.slots[0, s, SLOT_FEATURES.index(f"stage_{stages[s].name.lower()}")] = 1.0
    found.host[:, HOST_FEATURES.index("log_price")] = torch.tensor(price / USUAL_PRICE).log()
    return found
