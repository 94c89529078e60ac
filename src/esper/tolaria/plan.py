"""The seeds to compute in a pass, per slot, and the order of the calls.

A plan is made before the first minibatch, so that minibatches run without reading the state of the
seeds. Seeds of one slot are sorted by (isolated, blueprint, form), and seeds with equal keys are
computed in one call; on a CPU at most ``CHUNK`` of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.blueprints import FORM_OF_STYLE, Form
from esper.kasmina.seeds import SeedState
from esper.kasmina.transfer import cached_tensor, moved_together, on_host
from esper.leyline.actions import BLUEPRINTS, Style

CHUNK = 12
"""Maximum seeds per call on a CPU, so that their activations stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Hosts to validate again with different alphas.

    Attributes:
        start: index of the first slot whose alpha differs.
        rows: environments, int64 ``[M]``, possibly repeated.
        alpha: alpha of every slot of these rows, ``[M, S]``.
        host: the same variant in CPU memory, if it is known there.
    """

    start: int
    rows: Tensor
    alpha: Tensor
    host: "Variant | None" = None

    @property
    def on_host(self) -> "Variant":
        """The variant in CPU memory: itself if it is there, else a copy."""
        if self.rows.device.type == "cpu":
            return self
        if self.host is not None:
            return self.host
        rows, alpha = on_host(self.rows, self.alpha)
        return Variant(self.start, rows, alpha)


def moved_variants(variants: Sequence[Variant], device: torch.device) -> list[Variant]:
    """Copies on ``device`` of variants in CPU memory, in two transfers."""
    if device.type == "cpu":
        return list(variants)
    rows = moved_together([v.rows for v in variants], device)
    alphas = moved_together([v.alpha for v in variants], device)
    return [Variant(v.start, r, a, v) for v, r, a in zip(variants, rows, alphas, strict=True)]


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seeds that a backend computes in the slots of R rows.

    Attributes:
        computed: slots with a seed to compute, bool ``[R, S]``.
        blueprint: blueprint of each seed, int64 ``[R, S]``.
        style: style of each seed, int64 ``[R, S]``.
        alpha: alpha of each seed, ``[R, S]``; at 0 a seed is isolated, see ``Group``.
        frozen: seeds that are computed but not updated, bool ``[R, S]``.
        host: the same seeds in CPU memory, if they are known there; see ``on_host``.
    """

    computed: Tensor
    blueprint: Tensor
    style: Tensor
    alpha: Tensor
    frozen: Tensor
    host: "Seeds | None" = None

    @classmethod
    def training(cls, state: SeedState, host: SeedState | None = None) -> "Seeds":
        """Every seed in TRAINING or a later stage; ``host`` is the state in CPU memory."""
        copy = None if host is None or host is state else cls.training(host)
        return cls(state.computing, state.blueprint, state.style, state.alpha, state.frozen, copy)

    @classmethod
    def acting(cls, state: SeedState, host: SeedState | None = None) -> "Seeds":
        """Every seed that changes the output (alpha above 0); ``host`` as for ``training``."""
        copy = None if host is None or host is state else cls.acting(host)
        return cls(state.alpha > 0, state.blueprint, state.style, state.alpha, state.frozen, copy)

    @property
    def on_host(self) -> "Seeds":
        """The seeds in CPU memory: themselves if they are there, else copies."""
        if self.alpha.device.type == "cpu":
            return self
        return self.host or self._of(on_host(*self._parts()))

    def _parts(self) -> tuple[Tensor, ...]:
        return self.computed, self.blueprint, self.style, self.alpha, self.frozen

    @classmethod
    def _of(cls, parts: Iterable[Tensor]) -> "Seeds":
        computing, blueprint, style, alpha, frozen = parts
        return cls(computing, blueprint, style, alpha, frozen)

    @property
    def form(self) -> Tensor:
        """``Form`` of each seed, int64 ``[R, S]``."""
        return cached_tensor(tuple(FORM_OF_STYLE[s] for s in Style), self.style.device)[self.style]

    def of_rows(self, rows: Tensor) -> "Seeds":
        """The seeds of ``rows``, int64 ``[M]``."""
        return self._of(part[rows] for part in self._parts())

    def of_variant(self, variant: "Variant") -> "Seeds":
        """The seeds of the rows of ``variant``, with its alphas."""
        copy = None if self.host is None else self.host.of_variant(variant.on_host)
        rows, alpha = variant.rows, variant.alpha
        frozen = self.frozen[rows]
        return Seeds(alpha > 0, self.blueprint[rows], self.style[rows], alpha, frozen, copy)


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
        rows: their environments, int64 ``[m]``.
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
        kinds: index of the blueprint of each seed, int64 ``[M]``.
        groups: the calls to make.
        any_frozen: whether one of the seeds is frozen.
    """

    rows: Tensor
    kinds: Tensor
    groups: tuple[Group, ...]
    any_frozen: bool


Plan = list[SlotPlan | None]
"""One entry per slot, None where there is nothing to compute."""


def plan(seeds: Seeds) -> Plan:
    """Plan the calls that compute ``seeds``.

    The plan is made on the CPU and goes to the device of the seeds in one transfer.
    """
    copy = seeds.on_host
    isolation = (copy.alpha == 0).long()
    keys = (isolation * len(BLUEPRINTS) + copy.blueprint) * len(Form) + copy.form
    slots = range(keys.shape[1])
    members = [use.nonzero()[:, 0] for use in copy.computed.unbind(1)]
    orders = [
        rows[torch.sort(keys[rows, s], stable=True).indices] for s, rows in enumerate(members)
    ]
    kinds = [copy.blueprint[rows, s] for s, rows in enumerate(orders)]
    on_device = moved_together([*orders, *kinds], seeds.alpha.device)
    plans: Plan = []
    for s, rows, order, kinds_of_slot in zip(
        slots, orders, on_device[: len(slots)], on_device[len(slots) :], strict=True
    ):
        if len(rows) == 0:
            plans.append(None)
            continue
        groups = _groups(keys[rows, s], order, seeds.alpha[:, s][order])
        plans.append(SlotPlan(order, kinds_of_slot, groups, bool(copy.frozen[rows, s].any())))
    return plans


def _groups(keys: Tensor, rows: Tensor, alpha: Tensor) -> tuple[Group, ...]:
    """The calls for ``rows [M]`` of one slot, sorted by ``keys [M]``, which are in CPU memory."""
    # A launch on a GPU costs the same for any number of seeds, and there is no such cache.
    most = CHUNK if rows.device.type == "cpu" else len(rows)
    present, counts = torch.unique_consecutive(keys, return_counts=True)
    sizes, groups = counts.tolist(), []
    parts = zip(present.tolist(), rows.split(sizes), alpha.split(sizes), strict=True)
    for key, run, weights in parts:
        is_isolated, kind = divmod(key // len(Form), len(BLUEPRINTS))
        for chunk, weight in zip(run.split(most), weights.split(most), strict=True):
            groups.append(Group(kind, Form(key % len(Form)), bool(is_isolated), chunk, weight))
    return tuple(groups)
