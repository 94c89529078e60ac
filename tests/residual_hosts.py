"""Hosts made of ``oracles.residual.ResidualNet``, and what grows in them."""

import itertools
import random

import torch

from esper.kasmina import ModuleHost
from esper.tolaria.stores import Stack
from oracles.residual import CLASSES, IMAGE, ResidualNet
from support import BLUEPRINT_NAMES, F64, MLP_NAMES, Garden, every_plant, random_stack

CONV_PLACES = 3
"""Slots of ``ResidualNet`` that lie behind a convolution; the last lies behind a linear map."""


def residual_host() -> ModuleHost:
    return ModuleHost(ResidualNet, CLASSES, IMAGE)


def gardens(rows: int) -> list[Garden]:
    """Every blueprint, style and situation somewhere, three conv seeds and one mlp seed a host."""
    draw = random.Random(3)
    conv, mlp = every_plant(BLUEPRINT_NAMES), every_plant(MLP_NAMES)
    draw.shuffle(conv)
    draw.shuffle(mlp)
    places = itertools.cycle(mlp)
    hosts = [
        dict(enumerate([*conv[i : i + CONV_PLACES], next(places)]))
        for i in range(0, len(conv), CONV_PLACES)
    ]
    return [hosts[i : i + rows] for i in range(0, len(hosts), rows)]


def random_numbers(host: ModuleHost, rows: int, dtype: torch.dtype = F64) -> Stack:
    """A stack around the module's own initial numbers."""
    stack = random_stack(host, rows, dtype)
    parameters, buffers = host.initial_values(range(rows))
    stack.host.mul_(0.1).add_(parameters)
    stack.buffers.copy_(buffers)
    return stack
