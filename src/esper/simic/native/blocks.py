"""Seeds and signals as blocks of fields, which the library reads and writes."""

from collections.abc import Sequence

from torch import Tensor

from esper.kasmina.seeds import SeedSignals, SeedState
from esper.simic.native.interface import AMOUNTS, FLAGS, NUMBERS, SIGNAL_FLAGS, SIGNALS

Blocks = tuple[Tensor, ...]
"""Blocks of fields, ``[fields, N, S]`` each."""


class CutState(SeedState):
    """Seeds in blocks. A field is cut out when it is first asked for: most never are."""

    __slots__ = ("blocks", "count")
    blocks: Blocks
    count: int | None

    @classmethod
    def of(cls, blocks: Blocks, count: int | None = None) -> "CutState":
        """The seeds of the first ``count`` rows, of all when None."""
        state = cls.__new__(cls)
        state.blocks, state.count = blocks, count
        return state

    def __getattr__(self, name: str) -> Tensor:
        field = _field(self, _SEED_PLACES, name)
        setattr(self, name, field)
        return field


class CutSignals(SeedSignals):
    """Likewise what was measured of them."""

    __slots__ = ("blocks", "count")
    blocks: Blocks
    count: int | None

    @classmethod
    def of(cls, blocks: Blocks, count: int | None = None) -> "CutSignals":
        """The signals of the first ``count`` rows, of all when None."""
        signals = cls.__new__(cls)
        signals.blocks, signals.count = blocks, count
        return signals

    def __getattr__(self, name: str) -> Tensor:
        field = _field(self, _SIGNAL_PLACES, name)
        setattr(self, name, field)
        return field


def _places(*blocks: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The block of each field and its place there."""
    return {name: (b, i) for b, names in enumerate(blocks) for i, name in enumerate(names)}


_SEED_PLACES = _places(NUMBERS, AMOUNTS, FLAGS)
_SIGNAL_PLACES = _places(SIGNALS, SIGNAL_FLAGS)


def _field(record: CutState | CutSignals, places: dict[str, tuple[int, int]], name: str) -> Tensor:
    if name not in places:
        raise AttributeError(name)
    block, place = places[name]
    field = record.blocks[block][place]
    return field if record.count is None else field[: record.count]
