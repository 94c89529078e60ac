"""Choice of the backend: native where it is available, torch elsewhere."""

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

    ``auto`` is ``native`` on a CPU in full precision and ``torch`` elsewhere. If the native backend
    is not available, torch replaces it and one log line says why. If it does not implement a
    blueprint, torch computes only the hosts with such a seed.

    Args:
        name: one of ``NAMES``.
        host: host of the stack.
        precision: precision of the arithmetic.
        dtype: dtype of parameters and data.
        device: device of parameters and data.
        threads: threads of the native backend; with torch the caller distributes environments
            over threads.
    """
    if name == "torch" or (name == "auto" and (device.type != "cpu" or precision.enabled)):
        return torch_backend(host, precision)
    try:
        if device.type != "cpu":
            raise Unavailable(f"it computes on the CPU only, not on {device}")
        if precision.enabled:
            raise Unavailable("it computes in full precision only")
        native = NativeBackend(host, dtype, threads)
    except Unavailable as reason:
        fall_back(str(reason))
        return torch_backend(host, precision)
    kinds = sorted({kind for slot in host.slots for kind in slot.kinds})
    unknown = [BLUEPRINTS[kind] for kind in kinds if native.kind_of[kind] < 0]
    if not unknown:
        return native
    fall_back(
        f"it does not implement the blueprint {unknown[0]!r}", "hosts with such a seed use torch"
    )
    return MixedBackend(native, TorchBackend(host, precision))


def torch_backend(host: Host, precision: Precision) -> TorchBackend:
    """The torch backend for ``host``: for a user's module, the one based on ``torch.vmap``."""
    if isinstance(host, ModuleHost):
        return FunctionalBackend(host, precision)
    return TorchBackend(host, precision)
