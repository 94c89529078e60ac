"""A run sets the arithmetic of its device and restores the previous setting."""

import torch

from esper.simic.training.setup import arithmetic
from synthetic import CPU


def settings() -> tuple:
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )


def test_cuda_multiplies_in_tf32_and_a_cpu_does_not() -> None:
    before = settings()
    with arithmetic(torch.device("cuda"), 1):
        assert settings()[1:] == ("high", True)
    assert settings() == before
    with arithmetic(torch.device("cuda"), 1, tf32=False):
        assert settings()[1:] == ("highest", False)
    assert settings() == before
    with arithmetic(CPU, 1):
        assert settings()[:2] == (1, "highest")
    assert settings() == before
