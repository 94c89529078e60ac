"""Splitting rollouts in which episodes begin and end into sequences."""

import pytest
import torch
from torch import Tensor

from esper.simic.sequences import segments


def naive_segments(valid: list[list[bool]]) -> list[tuple[int, int, int]]:
    found = []
    for n in range(len(valid[0])):
        t = 0
        while t < len(valid):
            if not valid[t][n]:
                t += 1
                continue
            end = t
            while end < len(valid) and valid[end][n]:
                end += 1
            found.append((t, n, end - t))
            t = end
    return found


@pytest.mark.parametrize("seed", range(20))
def test_segments_equal_those_of_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(9, 5, generator=generator) < 0.7
    found: list[Tensor] = list(segments(valid))
    rows = list(zip(*(x.tolist() for x in found), strict=True))
    assert rows == naive_segments(valid.tolist())
