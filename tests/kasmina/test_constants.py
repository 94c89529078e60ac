"""Cached tensors are created once and equal ``torch.tensor`` of their values."""

from typing import Any

import pytest
import torch

from esper.kasmina.transfer import cached_tensor

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "equal",
    [
        ((True, False), (1, 0), (1.0, 0.0)),
        (((True,), (False,)), ((1,), (0,)), ((1.0,), (0.0,))),
        ((1, 2), (1, 2.0), (True, 2)),
    ],
    ids=["flat", "nested", "mixed"],
)
def test_equal_values_of_different_types_give_different_tensors(
    equal: tuple[tuple[Any, ...], ...],
) -> None:
    for values in (*equal, *reversed(equal)):
        found, expected = cached_tensor(values, CPU), torch.tensor(values)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_constant_is_created_once_per_device() -> None:
    first = cached_tensor(((4, 5),), CPU)
    assert cached_tensor((tuple([4, 5]),), CPU) is first
    assert cached_tensor(((4, 5),), torch.device("meta")).is_meta
