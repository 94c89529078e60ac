"""Which backend computes: the native one where it can, torch everywhere."""

import torch

from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.module import ModuleHost
from esper.leyline.actions import BLUEPRINTS
from esper.native.build import Unavailable
from esper.native.library import fall_back
from esper.tolaria.backends import Backend
from esper.tolaria.backends.functional import FunctionalBackend
from esper.tolaria.backends.mixed import MixedBackend
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.precision import Precision

NAMES = ("auto", "torch", "native")


def choose_backend(
    name: str,
    host: Host,
    precision: Precision,
    dtype: torch.dtype,
    device: torch.device,
    threads: int = 1,
) -> Backend:
    """The backend called ``name`` for hosts of one shape.

    ``auto`` is ``native`` on a CPU in full precision and ``torch`` elsewhere. Where the native
    backend cannot be had, torch takes its place and one line of the log says why; where it does not
    know a blueprint, in the hosts with such a seed alone.

    Args:
        name: one of ``NAMES``.
        host: what the stack is made of.
        precision: of the arithmetic.
        dtype: of parameters and data.
        device: where they live.
        threads: of the native backend; with torch the caller deals environments over threads.
    """
    if name == "torch" or (name == "auto" and (device.type != "cpu" or precision.enabled)):
        return torch_backend(host, precision)
    try:
        if device.type != "cpu":
            raise Unavailable(f"it computes on the CPU alone, not on {device}")
        if precision.enabled:
            raise Unavailable("it computes in full precision alone")
        native = NativeBackend(host, dtype, threads)
    except Unavailable as reason:
        fall_back(str(reason))
        return torch_backend(host, precision)
    kinds = sorted({kind for slot in host.slots for kind in slot.kinds})
    unknown = [BLUEPRINTS[kind] for kind in kinds if native.kind_of[kind] < 0]
    if not unknown:
        return native
    fall_back(f"it does not know the blueprint {unknown[0]!r}", "hosts with such a seed use torch")
    return MixedBackend(native, TorchBackend(host, precision))


def torch_backend(host: Host, precision: Precision) -> TorchBackend:
    """The backend that computes ``host`` with torch: somebody's own module by ``torch.vmap``."""
    if isinstance(host, ModuleHost):
        return FunctionalBackend(host, precision)
    return TorchBackend(host, precision)
