"""The arithmetic of a run: threads per operation on a CPU, precision of products on CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def arithmetic(device: torch.device, threads: int, tf32: bool = True) -> Iterator[None]:
    """Set the arithmetic of ``device`` within the context, and restore the previous one.

    Args:
        device: a CPU or a CUDA device.
        threads: CPU threads per operation, on a CPU.
        tf32: whether float32 matrix products and convolutions on CUDA may be computed in TF32.
    """
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    if device.type == "cpu":
        torch.set_num_threads(threads)
    else:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.allow_tf32 = convolutions
