"""Trainings of the hosts by ``esper.grow``, all with Adam, a cosine schedule and the last epoch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.kasmina import width_prior
from esper.kasmina.wider_layers import parameter_count
from esper.leyline.errors import UsageError
from esper_lab.capacity.hosts import VALIDATION, Host, Split

BATCH, RATE, PRETRAINING = 50, 0.005, 40
FACTORS = 1.0, *width_prior.FACTORS
"""By how much the controls make all hidden layers wider."""
Entry = dict[str, Any]
"""What a training of a host came to and took, and the number of parameters that the host has."""


def utility(result: Entry, never: Entry, prices: tuple[float, float], split: str = "test") -> float:
    """A score minus what it costs beyond never growing, as a share.

    Args:
        result: what a training came to.
        never: parameters and operations of never growing.
        prices: of parameters, which cost nothing below those of ``never``, and of operations.
        split: whose score counts.
    """
    growth = math.log(max(1.0, result["parameters"] / never["parameters"]))
    longer = math.log(result["operations"] / never["operations"])
    return float(result[split]) - prices[0] * growth - prices[1] * longer


@contextmanager
def counted_operations() -> Iterator[list[float]]:
    """The multiplications and additions of each layer in each forward pass that keeps gradients,
    and of its backward pass, which takes twice as many; those of other layers are few."""
    counts: list[float] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            counts.append(6.0 * output.numel() * layer.weight[0].numel())
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            weights = sum(value.numel() for value in layer.parameters() if value.dim() > 1)
            counts.append(6.0 * inputs[0].numel() / inputs[0].shape[-1] * weights)

    with register_module_forward_hook(count):
        yield counts


def arrival(host: Host) -> tuple[Split, nn.Module]:
    """The data of a host, and its network as it arrives."""
    data = host.data()
    small = host.build(data)
    if host.trained:
        _grown(host, data, small, "never", PRETRAINING, host.seed, RATE)
    return data, small


def beginning(host: Host, data: Split, small: nn.Module, order: int = 1) -> nn.Module:
    """The network that is trained: a copy of a trained one, else one of its own for each order."""
    return deepcopy(small) if host.trained else host.build(data, seed=order)


def grown(policy: str, host: Host, rate: float = RATE) -> Entry:
    """What ``esper.grow`` makes of a host in the first order of its data; nothing without slots."""
    data, small = arrival(host)
    model, seed = beginning(host, data, small), 1000 + host.seed
    try:
        result = _grown(host, data, model, policy, host.epochs, seed, rate)
    except UsageError as error:
        if not str(error).startswith("slots: found no place"):
            raise
        result = _grown(host, data, model, "never", host.epochs, seed, rate)
    return result | {"host_parameters": parameter_count(small)}


def _grown(
    host: Host, data: Split, model: nn.Module, policy: str, epochs: int, seed: int, rate: float
) -> Entry:
    """Train and grow a network of ``host`` in place.

    Operations are those of training, trials included; seconds of the processor, with validation
    after every epoch.
    """
    generator, begin = torch.Generator().manual_seed(seed), process_time()
    with counted_operations() as operations:
        result = esper.grow(
            model,
            _loader(data.part(slice(host.samples)), BATCH, generator),
            _loader(data.part(slice(host.samples, host.samples + VALIDATION))),
            test_loader=_loader(data.part(slice(host.samples + VALIDATION, None))),
            policy=policy, epochs=epochs, price=host.price, seed=host.seed, progress=False,
            training_price=host.training_price,
            loss="mse" if data.y.is_floating_point() else "cross_entropy", best_epoch=False,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate, fused=True),
            scheduler=lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, epochs),
        )  # fmt: skip
    assert result.test is not None
    return {
        "operations": sum(operations),
        "seconds": process_time() - begin,
        "validation": max(0.0, result.validation.figure),
        "test": max(0.0, result.test.figure),
        "parameters": result.parameters,
        "actions": [line for record in result.history for line in record.actions],
    }


def _loader(
    part: Split, batch: int = 500, generator: torch.Generator | None = None
) -> DataLoader[Any]:
    """Batches of a part, in an order that a generator draws."""
    data = TensorDataset(part.x, part.y)
    return DataLoader(data, batch, shuffle=generator is not None, generator=generator)
