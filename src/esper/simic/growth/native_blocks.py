"""Seeds and signals stored as blocks of fields, which the native library reads and writes."""

from collections import deque
from ctypes import c_bool, c_float, c_int64
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from esper.kasmina.seeds import SeedSignals, SeedState
from esper.native.structures import Struct, definitions

CALLS = definitions("step")
_TYPES = {c_int64: torch.int64, c_float: torch.float32, c_bool: torch.bool}
_R = TypeVar("_R")


class _InBlocks:
    """A record stored in one block ``[fields, N, S]`` per dtype.

    The tensor of a field is created when the field is first read; most fields are never read.
    """

    fields: ClassVar[dict[torch.dtype, tuple[str, ...]]]
    """Names of the fields in each block, in the order of the blocks."""
    addresses: ClassVar[type[Struct]]
    """Structure with the addresses of the blocks, for the library."""
    places: ClassVar[dict[str, tuple[int, int]]]
    """Index of each field's block, and of the field in the block."""
    blocks: list[Tensor]
    count: int | None

    def __init_subclass__(cls, record: type[Struct], addresses: type[Struct]):
        names = {dtype: record.names_of(kind) for kind, dtype in _TYPES.items()}
        cls.fields = {dtype: fields for dtype, fields in names.items() if fields}
        cls.addresses = addresses
        blocks = enumerate(cls.fields.values())
        cls.places = {name: (b, i) for b, names in blocks for i, name in enumerate(names)}

    @classmethod
    def of(cls, blocks: list[Tensor], count: int | None = None) -> Self:
        """The record of the first ``count`` rows of ``blocks``; of all rows if None."""
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


class StateInBlocks(_InBlocks, SeedState, record=CALLS.Seed, addresses=CALLS.SeedBlocks):
    """A ``SeedState`` stored in blocks."""


class SignalsInBlocks(_InBlocks, SeedSignals, record=CALLS.Signals, addresses=CALLS.SignalBlocks):
    """``SeedSignals`` stored in blocks."""


@dataclass(frozen=True, slots=True)
class RecordBlocks(Generic[_R]):
    """A record with its blocks.

    Attributes:
        record: the record of all rows.
        own: the record of the environments.
        blocks: the blocks of all rows.
        at: addresses of the blocks.
    """

    record: _R
    own: _R
    blocks: list[Tensor]
    at: Struct


class Records(Generic[_R]):
    """Creates records in blocks and keeps the last three.

    Args:
        kind: ``StateInBlocks`` or ``SignalsInBlocks``.
        shape: rows and slots.
        count: number of environments among the rows.
    """

    def __init__(self, kind: type[_R], shape: tuple[int, int], count: int):
        self.kind: Any = kind
        self.shape, self.count = shape, count
        # A step uses three records: before the action, after it and after the tick.
        self.recent: deque[RecordBlocks[_R]] = deque(maxlen=3)

    def empty(self) -> RecordBlocks[_R]:
        """A record with uninitialised blocks for the library to fill."""
        fields = self.kind.fields.items()
        packed = self._record_blocks(
            [torch.empty(len(n), *self.shape, dtype=dtype) for dtype, n in fields]
        )
        self.recent.append(packed)
        return packed

    def of(self, record: _R) -> RecordBlocks[_R]:
        """The blocks of ``record``; the fields are copied into blocks if they are stored elsewhere.

        The caller must keep the result alive while the library reads it.
        """
        for known in self.recent:
            if known.record is record:
                return known
        names = self.kind.fields.values()
        blocks = [torch.stack([getattr(record, name) for name in block]) for block in names]
        self.recent.append(replace(self._record_blocks(blocks), record=record))
        return self.recent[-1]

    def _record_blocks(self, blocks: list[Tensor]) -> RecordBlocks[_R]:
        names, kind = self.kind.addresses.names, self.kind
        pairs = zip(names, blocks, strict=True)
        at = kind.addresses(**{name: block.data_ptr() for name, block in pairs})
        return RecordBlocks(kind.of(blocks), kind.of(blocks, self.count), blocks, at)
