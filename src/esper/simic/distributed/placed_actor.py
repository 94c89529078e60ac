"""An actor that acts for some environments with the arithmetic of all of them."""

from typing import Generic

import torch
from torch import Tensor

from esper.simic.actor import PolicyActor
from esper.simic.normalise import ObservationMoments
from esper.tamiyo.policy.interface import ObservationT, Policy, RecurrentState


class PlacedActor(PolicyActor[ObservationT], Generic[ObservationT]):
    """Acts for the environments ``begin`` to ``end`` of ``total`` with the bits of one process.

    The last bits of a matrix product depend on its number of rows and on the place of a row among
    them. The policy therefore computes ``total`` rows, of which those of other environments are
    copies that nothing reads.

    Args:
        policy, moments, seed, device: see ``PolicyActor``.
        begin, end, total: the rows.
    """

    def __init__(
        self,
        policy: Policy[ObservationT],
        moments: ObservationMoments[ObservationT],
        seed: int,
        device: torch.device,
        begin: int,
        end: int,
        total: int,
    ):
        super().__init__(policy, moments, seed, device)
        self._rows = slice(begin, end)
        self._source = torch.zeros(total, dtype=torch.int64, device=device)
        self._source[self._rows] = torch.arange(end - begin, device=device)

    def spread(self, x: Tensor, dim: int = 0) -> Tensor:
        """``x`` with its rows, along ``dim``, at their places among ``total``."""
        return x.index_select(dim, self._source)

    def part(self, x: Tensor, dim: int = 0) -> Tensor:
        """The inverse of ``spread``."""
        return x.narrow(dim, self._rows.start, self._rows.stop - self._rows.start)

    def _act(
        self, observation: ObservationT, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        wide = {name: self.spread(x) for name, x in observation.tensors().items()}
        actions, log_prob, value, after = super()._act(
            type(observation).from_tensors(wide),
            tuple(self.spread(state, 1) for state in hidden),
            None if noise is None else self.spread(noise),
        )
        outputs = (self.part(x) for x in (actions, log_prob, value))
        return (*outputs, tuple(self.part(state, 1).contiguous() for state in after))  # type: ignore[return-value]
