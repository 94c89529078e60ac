"""Tries mixed precision on all hosts and seeds that a run may compute, before the run begins.

Not every operation supports every dtype on every device, including operations of plug-ins. A
failure at the start costs a warning. A failure during the run would make results depend on when it
happens.
"""

from collections.abc import Sequence
from itertools import product

import torch

from esper.kasmina.hosts.host import Host
from esper.kasmina.stack import Stack
from esper.leyline.actions import Style
from esper.tolaria.backends import HeldBack, Optimisation, Variant
from esper.tolaria.backends.choice import torch_backend
from esper.tolaria.minibatches import Minibatches
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import Precision

_STYLES = (Style.LINEAR_ADD, Style.LINEAR_MULTIPLY, Style.GATED_GATE)
_ALPHAS = (0.0, 0.5)
_BATCH = 2


def precision_after_trial(
    precision: Precision, hosts: Sequence[Host], dtype: torch.dtype, device: torch.device
) -> Precision:
    """``precision`` if all ``hosts`` can be trained and scored in it, else float32 and the reason.

    Args:
        precision: requested precision.
        hosts: the host of every stack.
        dtype: dtype of parameters and data.
        device: device of parameters and data.
    """
    if not precision.enabled:
        return precision
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
    run_once(host, precision, _every_seed(host, device), dtype, _BATCH, _BATCH, [])


def run_once(
    host: Host,
    precision: Precision,
    seeds: Seeds,
    dtype: torch.dtype,
    batch_size: int,
    evaluation_batch: int,
    variants: list[Variant],
) -> None:
    """Train hosts with ``seeds`` on one minibatch of zeros, and score them and their variants.

    Args:
        host: host of the stack.
        precision: precision of the arithmetic.
        seeds: the seeds of each row, on the device to compute on.
        dtype: dtype of parameters and data.
        batch_size: images of the minibatch.
        evaluation_batch: images to score on.
        variants: hosts to score again.
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


def _every_seed(host: Host, device: torch.device) -> Seeds:
    each = [list(product(slot.kinds, _STYLES, _ALPHAS)) for slot in host.slots]
    rows = max(map(len, each), default=1)
    table = [[kinds[row % len(kinds)] for kinds in each] for row in range(rows)]

    def column(index: int, kind: torch.dtype) -> torch.Tensor:
        values = [[seed[index] for seed in row] for row in table]
        return torch.tensor(values, dtype=kind, device=device).view(rows, len(host.slots))

    alpha = column(2, torch.float32)
    none = torch.zeros_like(alpha, dtype=torch.bool)
    return Seeds(~none, column(0, torch.long), column(1, torch.long), alpha, none)
