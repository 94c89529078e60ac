"""Channels that are followed through a forward pass, and where they lie in a tensor."""

from dataclasses import dataclass, field

from esper.kasmina.channel_probe import Position

Unit = tuple[int, int]
"""See ``ChannelGroup.units``."""


@dataclass(eq=False)
class TracedGroup:
    """A group while a forward pass is followed, see ``ChannelGroup``."""

    channels: int
    writers: list[str]
    companions: list[str] = field(default_factory=list)
    readers: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    is_mixed: bool = False
    is_balanced: bool = False
    """Whether its channels are mixed by a function that is taken to see their moments alone."""
    is_output: bool = False
    parts: list[tuple["TracedGroup | None", int]] = field(default_factory=list)
    """Of a concatenation, which has no writers: its groups and what belongs to none."""
    layouts: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """See ``ChannelGroup.axes``."""
    attends: bool = False
    is_rigid: bool = False
    """Whether rows of a writer cannot be taken together."""
    heads: dict[str, Unit] = field(default_factory=dict)
    """By the name of attention as wide as these channels, its heads and the width of each."""
    silent: list[str] = field(default_factory=list)
    """See ``ChannelGroup.silent``."""
    products: list[list[tuple[list[str], list[str]]]] = field(default_factory=list)
    """Of each product with other channels, the layers that write each factor, and its last norm."""
    contracts: bool = False
    """Whether products of its channels are summed, as in a dot product."""
    options: list[Unit] = field(default_factory=list)
    """Of a group that a function mixes: units of its rows that the function keeps apart."""

    def refuse(self, reason: str) -> None:
        """Note why it cannot become wider as it is, with larger units perhaps."""
        self.reason, self.is_mixed = self.reason or reason, True

    def join(self, other: "TracedGroup") -> None:
        """Tie the channels of another group to these."""
        self.coarsen(other.channels)
        other.coarsen(self.channels)
        self.writers += other.writers
        self.units |= other.units
        self.attends |= other.attends
        self.is_rigid |= other.is_rigid
        self.companions = [*dict.fromkeys(self.companions + other.companions)]
        self.readers |= other.readers
        self.heads |= other.heads
        self.silent += other.silent
        self.products += other.products
        self.contracts |= other.contracts
        self.reason = self.reason or other.reason
        self.is_mixed |= other.is_mixed
        self.is_balanced |= other.is_balanced

    def coarsen(self, channels: int) -> None:
        """Take several channels as one, if there are more than so many."""
        factor = self.channels // channels
        if factor > 1:
            units = {name: self.units.get(name, (1, 1)) for name in self.writers}
            self.units = {name: (gates, factor * rows) for name, (gates, rows) in units.items()}
            self.readers = {name: factor * block for name, block in self.readers.items()}
            self.channels = channels


@dataclass(frozen=True, slots=True)
class Tag:
    """Where the channels of a group lie in a tensor, of which there were so many then."""

    group: TracedGroup
    position: Position
    channels: int

    @property
    def is_plain(self) -> bool:
        """Whether each channel is one entry of the axis."""
        return (self.position.block, self.position.gates) == (1, 1)

    @property
    def is_contiguous(self) -> bool:
        """Whether the entries of each channel lie side by side, and are its only ones."""
        return self.is_plain or (self.position.gates == 1 and not self.group.parts)
