"""Joint value of seeds: coalitions, pairwise interactions and exact Shapley values."""

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import factorial

import torch
from torch import Tensor

from esper.kasmina.seeds import SeedState
from esper.kasmina.transfer import moved
from esper.tolaria.backends import Variant
from esper.tolaria.results import Scores

MAX_FOR_SHAPLEY = 4
"""With more slots than this, only coalitions of at most two seeds are measured."""


@cache
def coalition_members(slots: int) -> Tensor:
    """The coalitions to measure for ``slots`` slots, bool ``[M, S]``, smallest first.

    They are on the CPU; never write to them.
    """
    most = slots if slots <= MAX_FOR_SHAPLEY else 2
    members = [
        [slot in coalition for slot in range(slots)]
        for size in range(most + 1)
        for coalition in combinations(range(slots), size)
    ]
    with torch.inference_mode(False):
        return torch.tensor(members)


def grouped_by_first_change(state: SeedState, silences: Tensor) -> list[Variant]:
    """Variants in which the seeds ``silences``, bool ``[N, S]``, have alpha 0.

    Environments whose first silenced slot is the same share a variant. ``state`` and the result are
    in CPU memory.
    """
    first = torch.where(silences.any(1), silences.int().argmax(1), -1)
    alpha = state.alpha.masked_fill(silences, 0.0)
    by_slot = [(first == s).nonzero()[:, 0] for s in range(silences.shape[1])]
    return [Variant(s, rows, alpha[rows]) for s, rows in enumerate(by_slot) if len(rows)]


def coalition_variants(state: SeedState, members: Tensor) -> tuple[list[Variant], list[int]]:
    """Variants to measure besides the hosts themselves, and the index of each one's coalition.

    ``state``, ``members`` and the result are in CPU memory.
    """
    acts = state.alpha > 0
    variants: list[Variant] = []
    columns: list[int] = []
    for column, coalition in enumerate(members):
        # A seed that does not act makes no difference, so measure only coalitions of acting seeds.
        distinct = (~coalition | acts).all(1, keepdim=True)
        more = grouped_by_first_change(state, acts & ~coalition & distinct)
        variants += more
        columns += [column] * len(more)
    return variants, columns


@dataclass(frozen=True, slots=True)
class Coalitions:
    """Expected accuracy with every coalition of the acting seeds.

    Attributes:
        members: bool ``[M, S]``, the seeds of each coalition, on the CPU.
        acts: bool ``[N, S]``, the seeds that change the output.
        value: expected accuracy, ``[N, M]``; seeds that do not act make no difference. NaN
            until ``with_values``, and for coalitions that were not measured.
    """

    members: Tensor
    acts: Tensor
    value: Tensor

    @classmethod
    def of(cls, state: SeedState) -> "Coalitions":
        """Coalitions of ``state`` with nothing measured yet."""
        members = coalition_members(state.stage.shape[1])
        shape = len(state.stage), len(members)
        value = torch.full(shape, float("nan"), device=state.stage.device)
        return cls(members, state.alpha > 0, value)

    def with_values(
        self, of_hosts: Tensor, variants: list[Variant], columns: list[int], scores: list[Scores]
    ) -> "Coalitions":
        """A copy that holds the measured values.

        Args:
            of_hosts: expected accuracy of the hosts themselves, ``[N]``.
            variants, columns: as returned by ``coalition_variants``.
            scores: scores of each variant.
        """
        value = self.value.to(of_hosts.dtype)
        for variant, column, score in zip(variants, columns, scores, strict=True):
            value[variant.rows, column] = score.expected
        weight = 2 ** torch.arange(self.members.shape[1])
        code = (self.members * weight).sum(1)
        column_of = torch.zeros(int(code.max()) + 1, dtype=torch.long)
        column_of[code] = torch.arange(len(code))
        members, weight, column_of = (
            moved(x, value.device) for x in (self.members, weight, column_of)
        )
        acting = self.acts[:, None] & members  # [N, M, S]
        complete = (acting == self.acts[:, None]).all(2)
        value = torch.where(complete, of_hosts[:, None], value)
        return Coalitions(
            self.members, self.acts, value.gather(1, column_of[(acting * weight).sum(2)])
        )

    def shapley(self) -> Tensor:
        """Exact Shapley value of each seed, ``[N, S]``; NaN where the seed does not act.

        ``phi_i = sum over C without i of |C|! (S - |C| - 1)! / S! (v(C + i) - v(C))`` (Shapley,
        1953). The values of a row sum to v(all) - v(none). With more than ``MAX_FOR_SHAPLEY``
        slots all values are NaN.
        """
        slots = self.members.shape[1]
        if slots > MAX_FOR_SHAPLEY:
            return torch.full(self.acts.shape, float("nan"), device=self.value.device)
        sizes = self.members.sum(1, keepdim=True)
        # The probability that exactly n other seeds precede a seed in a random order.
        shares = [factorial(n) * factorial(slots - n - 1) / factorial(slots) for n in range(slots)]
        share = torch.tensor([*shares, 0.0], dtype=self.value.dtype)
        table = torch.where(self.members, share[sizes - 1], -share[sizes])
        values = self.value @ moved(table, self.value.device)
        return torch.where(self.acts, values, float("nan"))

    def interactions(self) -> Tensor:
        """``v(ij) - v(i) - v(j) + v(none)`` of each pair of seeds, ``[N, S, S]``.

        NaN on the diagonal and where one of the two does not act.
        """
        slots = self.members.shape[1]
        columns = {tuple(m): c for c, m in enumerate(self.members.tolist())}

        def value(*coalition: int) -> Tensor:
            return self.value[:, columns[tuple(slot in coalition for slot in range(slots))]]

        shape = (len(self.acts), slots, slots)
        result = torch.full(shape, float("nan"), dtype=self.value.dtype, device=self.value.device)
        for i, j in combinations(range(slots), 2):
            both = self.acts[:, i] & self.acts[:, j]
            interaction = value(i, j) - value(i) - value(j) + value()
            result[:, i, j] = result[:, j, i] = torch.where(both, interaction, float("nan"))
        return result
