"""Files of the user's own are run with seeds everywhere."""

import random

import numpy as np
import torch

from esper.runtime.own_files import set_seed


def test_a_seed_fixes_the_draws_of_torch_numpy_and_python() -> None:
    draws = []
    for _ in range(2):
        set_seed(7)
        draws.append((torch.rand(()).item(), np.random.rand(), random.random()))
    set_seed(8)
    other = torch.rand(()).item(), np.random.rand(), random.random()
    assert draws[0] == draws[1]
    assert not set(other) & set(draws[0])
