"""Choice of the backend, and of the precision in which it can compute."""

from collections.abc import Sequence
from itertools import product

import torch

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.module import ModuleHost
from esper.leyline.actions import BLUEPRINTS, Style
from esper.native.build import Unavailable
from esper.native.library import fall_back
from esper.tolaria.backends import Backend, HeldBack, Minibatches, Optimisation, Variant
from esper.tolaria.backends.native import (
    FAMILY_OF,
    KINDS,
    LEAST_ROUNDED,
    MixedBackend,
    NativeBackend,
)
from esper.tolaria.backends.torch import FunctionalBackend, TorchBackend
from esper.tolaria.backends.triton import TritonBackend
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import Precision
from esper.tolaria.stores import Stack

NAMES = ("auto", "torch", "native", "triton")


def choose_backend(
    name: str,
    host: Host,
    precision: Precision,
    dtype: torch.dtype,
    device: torch.device,
    threads: int = 1,
) -> Backend:
    """The backend called ``name`` for hosts of one shape.

    ``auto`` is ``native`` on a CPU and ``torch`` elsewhere. If the native or the
    Triton backend is not available, torch replaces it and one log line says why. If the native one
    does not implement a blueprint, torch computes only the hosts with such a seed.

    ``dtype`` and ``device`` are those of parameters and data; ``threads`` are for the native
    backend: with torch the caller distributes environments over threads.
    """
    if name == "torch" or (name == "auto" and device.type != "cpu"):
        return torch_backend(host, precision)
    try:
        if name == "triton":
            return TritonBackend(host, precision, dtype, device)
        if device.type != "cpu":
            raise Unavailable(f"it computes on the CPU only, not on {device}")
        if precision.scales_losses:
            raise Unavailable("it computes in float32 and bfloat16, not float16")
        native = NativeBackend(host, dtype, threads, precision.enabled)
    except Unavailable as reason:
        fall_back(str(reason), backend="triton" if name == "triton" else "native")
        return torch_backend(host, precision)
    unknown = _unknown_blueprints(host)
    if not unknown:
        return native
    fall_back(
        f"it does not implement the blueprint {unknown[0]!r}", "hosts with such a seed use torch"
    )
    return MixedBackend(native, TorchBackend(host, precision))


def _unknown_blueprints(host: Host) -> list[str]:
    """Blueprints that can live in ``host`` and that the native library does not implement."""
    kinds = sorted({kind for slot in host.slots for kind in slot.kinds})
    return [BLUEPRINTS[kind] for kind in kinds if BLUEPRINTS[kind] not in KINDS]


def torch_backend(host: Host, precision: Precision) -> TorchBackend:
    """The torch backend for ``host``: for a user's module, the one based on ``torch.vmap``."""
    if isinstance(host, ModuleHost):
        return FunctionalBackend(host, precision)
    return TorchBackend(host, precision)


_STYLES = (Style.LINEAR_ADD, Style.LINEAR_MULTIPLY, Style.GATED_GATE)
_ALPHAS = (0.0, 0.5)
_BATCH = 2


def precision_after_trial(
    precision: Precision,
    hosts: Sequence[Host],
    dtype: torch.dtype,
    device: torch.device,
    backend: str = "torch",
) -> Precision:
    """``precision`` if the ``hosts`` of all stacks can be trained and scored in it, else float32.

    On a CPU the native backend rounds wide convolutions alone: without any it is float32.

    Not every operation supports every dtype on every device, including operations of plug-ins. A
    failure at the start costs a warning, which names the reason. A failure during the run would
    make results depend on when it happens.
    """
    if not precision.enabled:
        return precision
    if device.type == "cpu" and backend != "torch":
        widths = [max(host.channels) for host in hosts if isinstance(host, CnnHost)]
        if max(widths, default=0) < LEAST_ROUNDED:
            what = (
                f"only convolutions of {LEAST_ROUNDED} and more channels, of which there are none"
            )
            return Precision("cpu", reason=f"backend {backend} rounds {what}; use --backend torch")
        # Torch computes the other hosts alone.
        hosts = [h for h in hosts if type(h) not in FAMILY_OF or _unknown_blueprints(h)]
    try:
        for host in hosts:
            try_host(host, precision, dtype, device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"{precision.dtype_name} fails on {device} ({line})"
        return Precision(precision.device_type, reason=reason)
    return precision


def try_host(host: Host, precision: Precision, dtype: torch.dtype, device: torch.device) -> None:
    """Train one minibatch and validate, with every blueprint in every slot and style.

    Raises:
        RuntimeError: an operation fails in this precision.
    """
    each = [list(product(slot.kinds, _STYLES, _ALPHAS)) for slot in host.slots]
    rows = max(map(len, each), default=1)
    table = [[options[row % len(options)] for options in each] for row in range(rows)]
    numbers = torch.tensor(table, dtype=torch.float64, device=device).view(rows, len(each), 3)
    kind, style, alpha = numbers.unbind(2)
    none = torch.zeros_like(kind, dtype=torch.bool)
    seeds = Seeds(~none, kind.long(), style.long(), alpha.float(), none)
    run_once(host, precision, seeds, dtype, _BATCH, _BATCH, [])


def run_once(
    host: Host,
    precision: Precision,
    seeds: Seeds,
    dtype: torch.dtype,
    batch_size: int,
    evaluation_batch: int,
    variants: list[Variant],
) -> None:
    """Train hosts with ``seeds`` on ``batch_size`` images of zeros, on the device of the seeds.

    Then score them and ``variants`` of them on ``evaluation_batch`` images.
    """
    (rows, slots), device = seeds.alpha.shape, seeds.alpha.device
    widths = [slot.width for slot in host.slots]
    stack = Stack.allocate(rows, host.layout.size, host.buffers.size, widths, dtype, device)
    backend = torch_backend(host, precision)
    rate = torch.zeros(rows, slots + 1, dtype=dtype, device=device)
    optimisation = Optimisation(rate[:, 0], rate[:, 1:], weight_decay=0.0, max_gradient_norm=1.0)

    def data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.zeros(count, *host.label_shape, dtype=torch.long, device=device)
        return torch.zeros(count, *host.image, dtype=dtype, device=device), labels

    samples = torch.arange(batch_size, device=device).expand(rows, 1, -1)
    backend.train_epoch(stack, seeds, Minibatches(*data(batch_size), samples), optimisation)
    images, labels = data(evaluation_batch)
    dataset = torch.zeros(rows, dtype=torch.long, device=device)
    backend.evaluate(stack, seeds, HeldBack(images[None], labels[None], dataset), variants)
