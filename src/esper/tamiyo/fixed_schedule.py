"""Fixed schedules: seeds, slots and steps of growth, chosen before the episode."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import CANONICAL_CHOICE, Op, Style
from esper.tamiyo.baselines import first_applicable, on_device, with_canonical, without_learning
from esper.tamiyo.policy.features import Observation

NEVER = 1 << 30
"""A start that no episode reaches."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The seed to grow in each slot of N environments; all fields are int64 ``[N, S]``.

    Attributes:
        start: the seed germinates at the first legal step from ``start`` on; ``NEVER`` for no seed.
        blueprint: option of the blueprint head.
        style: option of the style head.
        tempo: option of the tempo head.
    """

    start: Tensor
    blueprint: Tensor
    style: Tensor
    tempo: Tensor

    @classmethod
    def never(cls, environments: int, slots: int) -> "Schedule":
        """A schedule that grows nothing."""

        def table(value: int) -> Tensor:
            return torch.full((environments, slots), value, dtype=torch.long)

        style, tempo = CANONICAL_CHOICE["style"], CANONICAL_CHOICE["tempo"]
        return cls(table(NEVER), table(0), table(style), table(tempo))

    @classmethod
    def everything(cls, environments: int, slots: tuple[SlotSpec, ...]) -> "Schedule":
        """The largest blueprint in each slot, as early as legal and with the shortest blend."""
        rows = cls.never(environments, len(slots))
        rows.start[:] = 0
        rows.style[:] = int(Style.LINEAR_ADD)
        rows.tempo[:] = 0
        for s, slot in enumerate(slots):
            rows.blueprint[:, s] = max(slot.kinds, key=lambda kind: slot.layouts[kind].size)
        return rows

    @classmethod
    def concatenate(cls, parts: Sequence["Schedule"]) -> "Schedule":
        """The schedules one below the other, with as many slots as the widest."""
        slots = max(part.start.shape[1] for part in parts)
        schedule = cls.never(sum(len(part.start) for part in parts), slots)
        begin = 0
        for part in parts:
            count, width = part.start.shape
            for f in fields(cls):
                getattr(schedule, f.name)[begin : begin + count, :width] = getattr(part, f.name)
            begin += count
        return schedule

    def take(self, rows: Tensor) -> "Schedule":
        """The schedules of the environments ``rows``, int64 ``[M]``; rows may repeat."""
        return Schedule(*(getattr(self, f.name)[rows] for f in fields(self)))


class ScheduleActor:
    """Follows a schedule; advances and fossilises each seed as soon as that is legal.

    Args:
        schedule: one row per environment, with at most as many slots as the observations.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self._plan = on_device(self.schedule, environments.device)
        self._grown = torch.zeros_like(self._plan.start, dtype=torch.bool)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``.

        Order of precedence: fossilise, advance, germinate, wait.
        """
        legal = observation.masks.slots[..., : self._plan.start.shape[1]]
        due = (self._plan.start <= step) & ~self._grown
        requests = {
            Op.FOSSILISE: legal[:, Op.FOSSILISE],
            Op.ADVANCE: legal[:, Op.ADVANCE],
            Op.GERMINATE: legal[:, Op.GERMINATE] & due,
        }
        op, slot = first_applicable(requests)
        germinates = op == Op.GERMINATE
        self._grown |= germinates[:, None] & (
            torch.arange(due.shape[1], device=op.device) == slot[:, None]
        )

        def choice(name: str) -> Tensor:
            value = getattr(self._plan, name).gather(1, slot[:, None])[:, 0]
            return torch.where(germinates, value, CANONICAL_CHOICE[name])

        heads = {"op": op, "slot": slot} | {
            name: choice(name) for name in ("blueprint", "style", "tempo")
        }
        return without_learning(with_canonical(heads))
