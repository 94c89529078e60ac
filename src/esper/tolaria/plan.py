"""The seeds to compute in a pass, per slot, and the order of the calls.

A plan is made before the first minibatch, so that minibatches run without reading the state of the
seeds. Seeds of one slot are sorted by (isolated, blueprint, form), and seeds with equal keys are
computed in one call, at most ``CHUNK`` of them.
"""

from dataclasses import dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor

from esper.kasmina.cached_tensors import cached_tensor
from esper.kasmina.seeds import SeedState
from esper.leyline.actions import BLUEPRINTS, Style

CHUNK = 12
"""Maximum seeds per call, so that their activations stay in the second-level cache."""


class Form(IntEnum):
    """How a branch f is combined with the activation x."""

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
    """The seeds that a backend computes in the slots of R rows.

    Attributes:
        computed: slots with a seed to compute, bool ``[R, S]``.
        blueprint: blueprint of each seed, int64 ``[R, S]``.
        style: style of each seed, int64 ``[R, S]``.
        alpha: alpha of each seed, ``[R, S]``; at 0 a seed is isolated, see ``Group``.
        frozen: seeds that are computed but not updated, bool ``[R, S]``.
    """

    computed: Tensor
    blueprint: Tensor
    style: Tensor
    alpha: Tensor
    frozen: Tensor

    @classmethod
    def training(cls, state: SeedState) -> "Seeds":
        """Every seed in TRAINING or a later stage."""
        return cls(state.computing, state.blueprint, state.style, state.alpha, state.frozen)

    @classmethod
    def acting(cls, state: SeedState) -> "Seeds":
        """Every seed that changes the output (alpha above 0)."""
        return cls(state.alpha > 0, state.blueprint, state.style, state.alpha, state.frozen)

    @property
    def form(self) -> Tensor:
        """``Form`` of each seed, int64 ``[R, S]``."""
        return cached_tensor(tuple(FORM_OF_STYLE[s] for s in Style), self.style.device)[self.style]

    def of_rows(self, rows: Tensor) -> "Seeds":
        """The seeds of ``rows``, int64 ``[M]``."""
        return Seeds(*(getattr(self, field.name)[rows] for field in fields(self)))

    def varied(self, rows: Tensor, alpha: Tensor) -> "Seeds":
        """The seeds of ``rows``, int64 ``[M]``, possibly repeated, with other alphas ``[M, S]``."""
        return Seeds(alpha > 0, self.blueprint[rows], self.style[rows], alpha, self.frozen[rows])


@dataclass(frozen=True, slots=True)
class Group:
    """Seeds of one slot that are computed in one call.

    Attributes:
        kind: index of their blueprint.
        form: how they are combined with the activation.
        isolated: whether alpha is 0, in TRAINING and until the first tick of BLENDING. An isolated
            seed does not change the output. Its branch gets the output's gradient as if it had been
            added; the host gets no gradient through it. Seeds with alpha above 0 pass a
            gradient to the host.
        rows: their environments, int64 ``[m]``, at most ``CHUNK``.
        alpha: weight of each branch in the output, ``[m]``.
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
        rows: environments of all seeds, ``[M]``, in the order of ``groups``.
        groups: the calls to make.
    """

    rows: Tensor
    groups: tuple[Group, ...]


Plan = list[SlotPlan | None]
"""One entry per slot, None where there is nothing to compute."""


def plan(seeds: Seeds) -> Plan:
    """Plan the calls that compute ``seeds``."""
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
