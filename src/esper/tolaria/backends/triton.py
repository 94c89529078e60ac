"""The Triton backend: the torch backend, whose convolutional layers are kernels of our own.

On an H200 a step of 256 hosts for CIFAR-10 took 88 ms with it and 180 ms without. It compiles a
kernel for each shape of a layer, which takes a minute when such hosts are first trained on a
machine; Triton keeps them in its cache.
"""

import os
from contextlib import AbstractContextManager
from importlib.util import find_spec

import torch
from torch import Tensor

from esper.kasmina import ops
from esper.kasmina.hosts.host import Host, NormedHost
from esper.native.build import Unavailable
from esper.tolaria.backends import HeldBack, Minibatches, Optimisation, Variant
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import Precision
from esper.tolaria.results import EpochResult, Scores
from esper.tolaria.stores import Stack


def _kernels() -> AbstractContextManager[None]:
    # Triton decides when it is imported whether it compiles, and it takes a second.
    from esper.kasmina import kernel_layers

    return ops.computed_by(kernel_layers)


class TritonBackend(TorchBackend):
    """Implements ``tolaria.backends.Backend`` for hosts with convolutions or BatchNorm.

    Raises:
        Unavailable: it cannot compute these hosts here.
    """

    name = "triton"

    def __init__(
        self, host: Host, precision: Precision, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(host, precision)
        if not isinstance(host, NormedHost):
            raise Unavailable(f"it has no kernels for hosts without BatchNorm ({host.summary})")
        if dtype == torch.float64:
            raise Unavailable("its kernels compute no float64")
        # Triton's interpreter, with which the kernels are tested, computes on a CPU.
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise Unavailable(f"it computes on a CUDA device only, not on {device}")
        if find_spec("triton") is None:
            raise Unavailable("Triton is not installed, which torch for CUDA brings on Linux")

    def train_epoch(
        self, stack: Stack, seeds: Seeds, minibatches: Minibatches, optimisation: Optimisation
    ) -> EpochResult:
        """See ``Backend.train_epoch``."""
        with _kernels():
            return super().train_epoch(stack, seeds, minibatches, optimisation)

    def evaluate(
        self,
        stack: Stack,
        seeds: Seeds,
        held_back: HeldBack,
        variants: list[Variant],
        rows: Tensor | None = None,
    ) -> tuple[Scores, list[Scores]]:
        """See ``Backend.evaluate``."""
        with _kernels():
            return super().evaluate(stack, seeds, held_back, variants, rows)
