"""State and signals of seeds, as structs of arrays ``[N, S]``."""

from collections.abc import Callable
from dataclasses import Field, dataclass, fields, replace
from enum import IntEnum
from math import nan
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from esper.kasmina.transfer import Table, on_host
from esper.leyline.stages import ACTING, COMPUTING, LIVING, STAGE_COUNT, Stage


def membership(stages: tuple[Stage, ...]) -> Table:
    """A bool table by ``Stage``, true for the members of ``stages``; see also ``StageSets``."""
    return Table([number in stages for number in range(STAGE_COUNT)])


LIVES, COMPUTES, ACTS = membership(LIVING), membership(COMPUTING), membership(ACTING)
"""By stage, whether the seed exists, takes part in training, and may change the output."""


class AlphaMode(IntEnum):
    """State of the alpha ramp: at rest, rising or falling."""

    HOLD = 0
    UP = 1
    DOWN = 2


class _Record:
    """Measurements or states of all slots: a dataclass of tensors ``[N, S]``."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The record with ``function`` applied to every field."""
        return type(self)(**{f.name: function(getattr(self, f.name)) for f in fields(self)})

    def with_value(self, where: Tensor, value: float) -> Self:
        """The record with every field set to ``value`` (bools to false) where ``where [N, S]`` is
        true.

        Fields of one dtype are stacked and filled in one operation.
        """
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for field in fields(self):
            x: Tensor = getattr(self, field.name)
            by_dtype.setdefault(x.dtype, {})[field.name] = x
        tensors_by_name: dict[str, Tensor] = {}
        for dtype, tensors in by_dtype.items():
            fill = value if dtype.is_floating_point else 0
            together = torch.stack(list(tensors.values())).masked_fill_(where, fill)
            tensors_by_name |= zip(tensors, together.unbind(), strict=True)
        return replace(self, **tensors_by_name)


@dataclass(slots=True)
class SeedState(_Record):
    """State of the seeds except network parameters; every field is ``[N, S]``.

    In an empty slot, every field except the stage is 0.
    """

    stage: Tensor
    """``Stage``, int64."""
    blueprint: Tensor
    """Option of the blueprint head, 0 (noop) in an empty slot."""
    style: Tensor
    """``Style``, int64."""
    tempo: Tensor
    """Length of the first blend in steps."""
    goal: Tensor
    """Target alpha of the first blend."""
    alpha: Tensor
    """Weight of the branch in the output, in [0, 1]."""
    alpha_velocity: Tensor
    """Change of alpha in the last tick, without jumps made by actions."""
    ramp_start: Tensor
    """Alpha at the start of the current ramp."""
    ramp_target: Tensor
    """Alpha at the end of the current ramp."""
    ramp_mode: Tensor
    """``AlphaMode``, int64."""
    ramp_curve: Tensor
    """``Curve``, int64."""
    ramp_steps: Tensor
    """Length of the current ramp in steps."""
    ramp_done: Tensor
    """Completed steps of the current ramp."""
    pruning: Tensor
    """Whether the seed is pruned at the end of its ramp."""
    age: Tensor
    """Steps since germination."""
    stage_age: Tensor
    """Steps since the stage began."""

    @classmethod
    def dormant(cls, shape: tuple[int, int], device: torch.device) -> "SeedState":
        """The state of empty slots."""

        floats = ("goal", "alpha", "alpha_velocity", "ramp_start", "ramp_target")
        kinds = {name: torch.float32 for name in floats} | {"pruning": torch.bool}
        empty = {
            f.name: torch.zeros(shape, dtype=kinds.get(f.name, torch.long), device=device)
            for f in fields(cls)
        }
        return cls(**empty | {"stage": empty["stage"] + Stage.DORMANT})

    def on_host(self) -> "SeedState":
        """The state in CPU memory: itself if it is there, else a copy; see ``states_on_host``."""
        return states_on_host(self)[0]

    def with_empty_slots(self, slots: Tensor) -> "SeedState":
        """The state with the slots emptied where ``slots [N, S]`` is true."""
        stage = self.stage.masked_fill(slots, Stage.DORMANT)
        return replace(self.with_value(slots, 0), stage=stage)

    @property
    def living(self) -> Tensor:
        """Slots that hold a seed."""
        return LIVES[self.stage]

    @property
    def computing(self) -> Tensor:
        """Slots whose seed takes part in the training pass."""
        return COMPUTES[self.stage]

    @property
    def acting(self) -> Tensor:
        """Slots whose seed may change the output."""
        return ACTS[self.stage]

    @property
    def frozen(self) -> Tensor:
        """Slots whose seed does not learn because its alpha is falling."""
        return self.ramp_mode == AlphaMode.DOWN


def states_on_host(*states: SeedState) -> list[SeedState]:
    """The states in CPU memory: themselves if they are there, else copies, in one transfer."""
    if states[0].stage.device.type == "cpu":
        return list(states)
    names = [f.name for f in fields(SeedState)]
    copies = iter(on_host(*(getattr(state, name) for state in states for name in names)))
    return [SeedState(**{name: next(copies) for name in names}) for _ in states]


@dataclass(slots=True)
class SeedSignals(_Record):
    """Measurements of each seed in the last step; every field is ``[N, S]``."""

    contribution: Tensor
    """Expected validation accuracy with the seed minus without it, NaN when not measured."""
    contribution_velocity: Tensor
    """Smoothed change of the contribution per step, 0 when unknown."""
    health: Tensor
    """Gradient health in [0, 1], NaN when not measured."""
    previous_health: Tensor
    """The health one step earlier, NaN when not measured."""
    gradient_norm: Tensor
    """Norm of the seed's gradient before clipping, NaN when not measured."""
    exploding: Tensor
    """Whether the gradient norm of any parameter tensor is above 10 or not finite, bool."""
    gradient_ratio: Tensor
    """Gradient norm / sqrt(parameter count) of the seed over that of the host, smoothed; NaN until
    measured."""
    baseline: Tensor
    """Validation accuracy at the start of the seed's stage, NaN in an empty slot."""
    improvement: Tensor
    """Current validation accuracy minus ``baseline``, NaN in an empty slot."""
    birth_accuracy: Tensor
    """Validation accuracy when the seed germinated, NaN in an empty slot."""

    @classmethod
    def unknown(cls, shape: tuple[int, int], device: torch.device) -> "SeedSignals":
        """Signals of seeds that have not been measured yet."""

        signals = cls(*(torch.full(shape, nan, device=device) for _ in fields(cls)))
        zeros = torch.zeros(shape, device=device)
        return replace(signals, contribution_velocity=zeros, exploding=zeros.bool())

    def after_entries(self, before: SeedState, after: SeedState, accuracy: Tensor) -> "SeedSignals":
        """The signals after an action that took seeds from ``before`` to ``after``.

        ``accuracy [N]`` is the latest validation accuracy: the baseline of newborn seeds and of
        seeds in a new stage.
        """
        enters = after.living & (before.stage != after.stage)
        germinates = enters & (before.stage == Stage.DORMANT)
        # All other signals of an empty slot are already unknown.
        now = accuracy.float()[:, None]
        return replace(
            self,
            baseline=torch.where(enters, now, self.baseline),
            birth_accuracy=torch.where(germinates, now, self.birth_accuracy),
        )

    def forget(self, slots: Tensor) -> "SeedSignals":
        """The signals, reset to unknown where ``slots [N, S]`` is true."""
        velocity = self.contribution_velocity.masked_fill(slots, 0.0)
        return replace(self.with_value(slots, nan), contribution_velocity=velocity)


class StageSets:
    """Membership of stages in several sets of stages, by one table lookup."""

    def __init__(self, *sets: tuple[Stage, ...]):
        self._table = Table([[number in each for each in sets] for number in range(STAGE_COUNT)])

    def of(self, stage: Tensor) -> tuple[Tensor, ...]:
        """For each set, whether ``stage [...]`` is in it, bool ``[...]``."""
        return self._table[stage].unbind(-1)
