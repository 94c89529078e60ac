"""Seeds and signals as blocks of fields, which the library reads and writes."""

from collections.abc import Sequence
from ctypes import c_bool, c_float, c_int64
from typing import ClassVar, Self

from torch import Tensor

from esper.kasmina.seeds import SeedSignals, SeedState
from esper.native.structures import definitions

CALLS = definitions("step")
NUMBERS, AMOUNTS, FLAGS = (CALLS.Seed.names_of(kind) for kind in (c_int64, c_float, c_bool))
"""Fields of ``SeedState`` in the order of their int64, float32 and bool blocks."""
SIGNALS, SIGNAL_FLAGS = (CALLS.Signals.names_of(kind) for kind in (c_float, c_bool))
"""Fields of ``SeedSignals`` in the order of their float32 and bool blocks."""

Blocks = tuple[Tensor, ...]
"""Blocks of fields, ``[fields, N, S]`` each."""


def _places(*blocks: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The block of each field and its place there."""
    return {name: (b, i) for b, names in enumerate(blocks) for i, name in enumerate(names)}


class _Cut:
    """A record in blocks. A field is cut out when it is first asked for: most never are."""

    places: ClassVar[dict[str, tuple[int, int]]]
    blocks: Blocks
    count: int | None

    @classmethod
    def of(cls, blocks: Blocks, count: int | None = None) -> Self:
        """What the first ``count`` rows hold, all when None."""
        record = cls.__new__(cls)
        record.blocks, record.count = blocks, count
        return record

    def __getattr__(self, name: str) -> Tensor:
        if name not in self.places:
            raise AttributeError(name)
        block, place = self.places[name]
        field = self.blocks[block][place]
        field = field if self.count is None else field[: self.count]
        setattr(self, name, field)
        return field


class CutState(_Cut, SeedState):
    """Seeds in blocks."""

    places = _places(NUMBERS, AMOUNTS, FLAGS)


class CutSignals(_Cut, SeedSignals):
    """What was measured of them, likewise."""

    places = _places(SIGNALS, SIGNAL_FLAGS)
