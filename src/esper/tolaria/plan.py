"""Which seeds a pass has to compute, slot by slot, and in which order.

A plan is made once per environment step on the host, from the struct of arrays; the minibatches
then run without looking at the lifecycle. Seeds of one slot are sorted by (isolated, blueprint,
form), and those that agree are computed in one call.
"""

from dataclasses import dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor

from esper.kasmina.cached_tensors import cached_tensor
from esper.kasmina.seeds import SeedState
from esper.leyline.actions import BLUEPRINTS, Style

CHUNK = 12
"""Most seeds computed in one call: their activations should stay in the second-level cache."""


class Form(IntEnum):
    """How a branch f enters the activation x."""

    ADD = 0
    MULTIPLY = 1
    GATE = 2


FORM_OF_STYLE = {
    Style.LINEAR_ADD: Form.ADD,
    Style.LINEAR_MULTIPLY: Form.MULTIPLY,
    Style.SIGMOID_ADD: Form.ADD,
    Style.GATED_GATE: Form.GATE,
}


@dataclass(frozen=True, slots=True)
class Seeds:
    """What a backend computes in the slots of R rows.

    Attributes:
        computed: where there is a seed to compute, bool ``[R, S]``.
        blueprint: of each seed, int64 ``[R, S]``.
        style: likewise.
        alpha: likewise; at 0 a seed is isolated, see ``Group``.
        frozen: seeds that are computed but not updated, bool ``[R, S]``.
    """

    computed: Tensor
    blueprint: Tensor
    style: Tensor
    alpha: Tensor
    frozen: Tensor

    @classmethod
    def training(cls, state: SeedState) -> "Seeds":
        """Every seed from TRAINING on."""
        return cls(state.computing, state.blueprint, state.style, state.alpha, state.frozen)

    @classmethod
    def acting(cls, state: SeedState) -> "Seeds":
        """Every seed that shows in the output."""
        return cls(state.alpha > 0, state.blueprint, state.style, state.alpha, state.frozen)

    @property
    def form(self) -> Tensor:
        """``Form`` of each seed, int64 ``[R, S]``."""
        return cached_tensor(tuple(FORM_OF_STYLE[s] for s in Style), self.style.device)[self.style]

    def of_rows(self, rows: Tensor) -> "Seeds":
        """Those of ``rows``, int64 ``[M]``."""
        return Seeds(*(getattr(self, field.name)[rows] for field in fields(self)))

    def varied(self, rows: Tensor, alpha: Tensor) -> "Seeds":
        """Those of ``rows``, int64 ``[M]`` and possibly repeated, that act at ``alpha [M, S]``."""
        return Seeds(alpha > 0, self.blueprint[rows], self.style[rows], alpha, self.frozen[rows])


@dataclass(frozen=True, slots=True)
class Group:
    """Seeds of one slot that are computed in one call.

    Attributes:
        kind: their blueprint.
        form: how they enter the activation.
        isolated: alpha is 0, in TRAINING and until the first tick of BLENDING. They learn behind
            the host: the output is the host's, the branch gets the output's gradient as if it had
            been added, the host gets none through it. The others (alpha above 0) let gradients
            flow through.
        rows: their environments, int64 ``[m]``, at most ``CHUNK``.
        alpha: how much of each branch enters the output, ``[m]``.
    """

    kind: int
    form: Form
    isolated: bool
    rows: Tensor
    alpha: Tensor


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The seeds of one slot.

    Attributes:
        rows: environments of all seeds, ``[M]``: those of the groups one after another.
        groups: the calls to make.
    """

    rows: Tensor
    groups: tuple[Group, ...]


Plan = list[SlotPlan | None]
"""One entry a slot, None where there is nothing to compute."""


def plan(seeds: Seeds) -> Plan:
    """The calls that compute ``seeds``."""
    isolated = (seeds.alpha == 0).long()
    key = (isolated * len(BLUEPRINTS) + seeds.blueprint) * len(Form) + seeds.form
    columns = zip(seeds.computed.unbind(1), key.unbind(1), seeds.alpha.unbind(1), strict=True)
    return [_slot_plan(use.nonzero()[:, 0], keys, alphas) for use, keys, alphas in columns]


def _slot_plan(rows: Tensor, keys: Tensor, alphas: Tensor) -> SlotPlan | None:
    if len(rows) == 0:
        return None
    rows = rows[torch.sort(keys[rows], stable=True).indices]
    present, counts = torch.unique_consecutive(keys[rows], return_counts=True)
    groups = []
    runs = zip(present.tolist(), rows.split(counts.tolist()), strict=True)
    for key, run in runs:
        isolated, kind, form = (
            key // len(Form) // len(BLUEPRINTS),
            key // len(Form),
            key % len(Form),
        )
        for chunk in run.split(CHUNK):
            group = Group(kind % len(BLUEPRINTS), Form(form), bool(isolated), chunk, alphas[chunk])
            groups.append(group)
    return SlotPlan(rows, tuple(groups))
