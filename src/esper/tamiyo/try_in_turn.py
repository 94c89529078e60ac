"""Try in turn: plant a seed, measure its contribution, keep it or try the next slot.

What try and keep becomes where one seed may live: a slot is left before the next is tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import Op
from esper.tamiyo.baselines import blueprint_of, on_device
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.try_and_keep import MARGIN, feature, growth_actions, seed_worth

PATIENCE = 0.3
"""Part of the episode for which ``RuleActor`` waits before it decides about a seed."""

ORDERS: dict[str, Callable[[int], list[int]]] = {
    "forwards": lambda slots: [*range(slots)],
    "backwards": lambda slots: [*range(slots)][::-1],
    "ends": lambda slots: list(dict.fromkeys([slots - 1, *range(slots)])),
}
"""Orders in which slots are tried: from the first, from the last, or the last before the others."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What to plant where, and when to decide about it, for N environments.

    Attributes:
        blueprint: blueprint for each slot, int64 ``[N, S]``.
        order: slots in the order in which they are tried, int64 ``[N, S]``; -1 for none.
        start: first step in which a seed may germinate, int64 ``[N]``.
        patience: steps between germination and decision, int64 ``[N]``.
        last: the latest step in which a seed may germinate, int64 ``[N]``.
    """

    blueprint: Tensor
    order: Tensor
    start: Tensor
    patience: Tensor
    last: Tensor


class TryInTurnActor:
    """Plants one seed at a time, and the next one only where the last did not pay.

    It decides about a seed that is old enough and whose contribution is known: if that is at
    most the price of its parameters, it is pruned and the next slot is tried; else it is fossilised
    as soon as that is legal, and nothing else is planted.

    Args:
        turns: one row per environment, with as many slots as the observations.
    """

    def __init__(self, turns: Turns):
        self.turns = turns

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self._turns = on_device(self.turns, environments.device)
        self._attempts = torch.zeros_like(self._turns.start)
        self._birth_step = torch.full_like(self._turns.start, -1)
        self._slot = torch.zeros_like(self._turns.start)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``.

        Order of precedence: prune, fossilise, advance, germinate, wait.
        """
        legal, turns = observation.masks.slots, self._turns
        rows = torch.arange(len(self._attempts), device=self._attempts.device)
        slot_column = self._slot[:, None]

        def of_slot(values: Tensor) -> Tensor:
            return values.gather(1, slot_column)[:, 0]

        is_measured = of_slot(feature(observation, "contribution_known")) > 0.0
        pays = of_slot(seed_worth(observation)) > 0.0
        grown = self._birth_step >= 0
        decides = grown & is_measured & (step - self._birth_step >= turns.patience)
        prunes = decides & ~pays & of_slot(legal[:, Op.PRUNE])
        fossilises = decides & pays & of_slot(legal[:, Op.FOSSILISE])
        advances = grown & of_slot(legal[:, Op.ADVANCE])
        slots = turns.order.shape[1]
        following = turns.order[rows, self._attempts.clamp(max=slots - 1)]
        remaining = (self._attempts < slots) & (following >= 0)
        following = following.clamp(min=0)
        due = (turns.start <= step) & (step <= turns.last) & remaining & ~grown
        germinates = due & legal[:, Op.GERMINATE].gather(1, following[:, None])[:, 0]
        op = torch.zeros_like(turns.start)
        for choice, where in (
            (Op.GERMINATE, germinates),
            (Op.ADVANCE, advances),
            (Op.FOSSILISE, fossilises),
            (Op.PRUNE, prunes),
        ):
            op = torch.where(where, int(choice), op)
        slot = torch.where(germinates, following, torch.where(op == Op.WAIT, 0, self._slot))
        self._birth_step = torch.where(germinates, step, torch.where(prunes, -1, self._birth_step))
        self._slot = torch.where(germinates, following, self._slot)
        self._attempts = self._attempts + germinates.long()
        return growth_actions(op, slot, turns.blueprint)


def turns_of(
    slots: Sequence[Sequence[SlotSpec]],
    width: int,
    episode_length: int,
    size: float = 0.0,
    start: float = 0.0,
    patience: float = PATIENCE,
    order: str = "ends",
) -> Turns:
    """Seeds of one size in slot after slot.

    Args:
        slots: the slots of each environment's host.
        width: S of the observations.
        episode_length: steps per episode.
        size: see ``plans.PlannedSeed``.
        start: part of the episode after which the first seed may germinate.
        patience: part of the episode between germination and decision.
        order: see ``ORDERS``.
    """
    count, wait = len(slots), max(1, round(patience * episode_length))
    blueprint = torch.zeros(count, width, dtype=torch.long)
    sequence = torch.full((count, width), -1)
    for row, specs in enumerate(slots):
        length = len(specs)
        blueprint[row, :length] = torch.tensor([blueprint_of(size, slot) for slot in specs])
        sequence[row, :length] = torch.tensor(ORDERS[order](length))

    def table(value: int) -> Tensor:
        return torch.full((count,), value)

    return Turns(
        blueprint=blueprint,
        order=sequence,
        start=table(round(start * episode_length)),
        patience=table(wait),
        last=table(episode_length - wait - MARGIN),
    )
