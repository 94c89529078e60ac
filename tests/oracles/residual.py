"""A residual network unlike any built-in host, and the same network with explicit seeds.

``ResidualNet`` is a typical user module; ``NaiveResidual`` replaces it in the naive loop. It shares
only the slot marker with Esper.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import ModuleHost, Slot
from esper.tolaria.stores import Stack
from oracles.naive import NaiveSeed

CLASSES = 4
IMAGE = (6, 6, 2)


class Residual(nn.Module):
    """Pre-activation block with a projected shortcut, and a slot inside the branch."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.inner = Slot(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        # No bias: the next norm makes its gradient pure rounding error, which Adam amplifies.
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(x))
        return self.shortcut(x) + self.second(F.gelu(self.inner(self.first(x))))


class ResidualNet(nn.Module):
    """Two residual blocks, a slot between them, features from mean and maximum, one more slot."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(IMAGE[2], 3, 3, padding=1, bias=False)
        self.early = Residual(3, 4, stride=1)
        self.between = Slot(4)
        self.late = Residual(4, 5, stride=2)
        self.features = nn.Linear(10, 6)
        self.last = Slot(6)
        self.head = nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(self.head.weight.new_ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.late(self.between(self.early(self.stem(x))))
        pooled = F.elu(self.features(self.joined(x)))
        return self.scale * self.head(self.last(pooled))

    def joined(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)


SLOTS = ("early.inner", "between", "late.inner", "last")


class Pixel(nn.Module):
    """A seed of the oracle on features ``[B, C]``."""

    def __init__(self, seed: NaiveSeed):
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        return self.seed(x[:, :, None, None])[:, :, 0, 0]


class NaiveResidual(ResidualNet):
    """``ResidualNet`` with seeds of the oracle in its slots, passed in every forward pass."""

    def __init__(self, spec: ModuleHost):
        super().__init__()
        self.spec = spec

    @torch.no_grad()
    def load(self, stack: Stack, row: int) -> None:
        """Load parameters and statistics from one row of the store."""
        views = self.spec.layout.views(stack.host) | self.spec.buffers.views(stack.buffers)
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            value.copy_(views[name][row])

    def forward(self, x: Tensor, seeds: dict[str, NaiveSeed] | None = None) -> Tensor:
        places = {"early.inner": self.early, "between": self, "late.inner": self.late, "last": self}
        before = {}
        for name, holder in places.items():
            leaf = name.split(".")[-1]
            before[name] = getattr(holder, leaf)
            seed = (seeds or {}).get(name)
            grown = None if seed is None else Pixel(seed) if name == "last" else seed
            # Not registered as a submodule: its parameters do not belong to the host.
            holder.__dict__[f"{leaf}"] = grown or (lambda x: x)
        try:
            return super().forward(x)
        finally:
            for name, holder in places.items():
                holder.__dict__.pop(name.split(".")[-1])
