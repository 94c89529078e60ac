"""Gardeners: what an environment should grow, and the actions that grow it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, Op, Style
from esper.leyline.stages import Stage
from esper.tamiyo.policy.features import SLOT_FEATURES, Observation
from synthetic import canonical_action

STAGE_FEATURES = [SLOT_FEATURES.index(f"stage_{stage.name.lower()}") for stage in Stage]


@dataclass(frozen=True)
class Wish:
    """A seed that an environment should grow, and how far."""

    blueprint: str
    slot: int = 0
    style: Style = Style.LINEAR_ADD
    until: Stage = Stage.FOSSILISED
    start: int = 0


Wishes = dict[int, list[Wish]]


def wished_actions(
    wishes: Wishes, environments: Tensor, observation: Observation, t: int
) -> Tensor:
    """The next step of every wish that the masks allow, else WAIT."""
    actions = torch.stack([canonical_action(op=Op.WAIT) for _ in environments])
    for row, identity in enumerate(environments.tolist()):
        legal = observation.masks.slots[row]
        for wish in reversed(wishes.get(identity, [])):
            stage = stage_in(observation, row, wish.slot)
            if stage == Stage.DORMANT and legal[Op.GERMINATE, wish.slot] and t >= wish.start:
                kind = BLUEPRINTS.index(wish.blueprint)
                actions[row] = canonical_action(
                    op=Op.GERMINATE, slot=wish.slot, blueprint=kind, style=wish.style, tempo=0
                )
            for op in (Op.ADVANCE, Op.FOSSILISE):
                if stage != wish.until and legal[op, wish.slot]:
                    actions[row] = canonical_action(op=op, slot=wish.slot)
    return actions


def stage_in(observation: Observation, row: int, slot: int) -> Stage:
    """The stage that the observation tells of."""
    told = [observation.slots[row, slot, place].item() for place in STAGE_FEATURES]
    assert sorted(told) == [0.0] * (len(Stage) - 1) + [1.0]
    return list(Stage)[told.index(1.0)]
