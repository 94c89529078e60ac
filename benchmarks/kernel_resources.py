"""Registers, spills and shared memory of the Triton kernels, compiled without a GPU.

    python benchmarks/kernel_resources.py [--write]

Runs a minibatch of a convolution block on the CPU, where each launch is compiled for sm_80 and
sm_90 with the very arguments of that launch, instead of being executed. The assembler that Triton
brings says what a kernel needs.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before a kernel is imported
import torch
import triton
from reporting import made_on, new_parser, publish, table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from esper.kasmina import column_kernels, convolution_kernels

ARCHITECTURES = 80, 90
PRECISIONS = "float32", "bfloat16", "float16"
IMAGES, NETWORKS = 64, 4
BLOCKS = {
    "pixels, block 1": (3, 8, 32),
    "pixels, block 2": (8, 16, 16),
    "pixels, block 3": (16, 32, 8),
    "64 channels": (64, 64, 8),
}
"""Input channels, output channels and side of the images of some blocks."""
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8",
}  # fmt: skip


class Resources:
    """What a compiled kernel needs.

    Attributes:
        registers: of a thread.
        spills: bytes that are stored elsewhere for want of registers.
        shared: bytes of shared memory of a program.
    """

    def __init__(self, kernel: Any, architecture: int):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(kernel.asm["ptx"])
            target = re.search(r"^\.target (\S+)", kernel.asm["ptx"], re.M)
            assert target is not None
            command = [get_ptxas(architecture).path, "-v", f"--gpu-name={target[1].rstrip(',')}"]
            command += [str(source), "-o", str(Path(folder) / "kernel.cubin")]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        self.registers = int(_number(r"Used (\d+) registers", text))
        self.spills = int(_number(r"(\d+) bytes spill stores", text))
        self.shared = int(kernel.metadata.shared)


def _number(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the assembler says nothing of {pattern}: {text}")
    return match[1]


def signature(value: Any) -> Any:
    """How Triton writes the type of an argument; of a tuple, the types of its parts."""
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, tuple):
        return tuple(signature(part) for part in value)
    return "fp32" if isinstance(value, float) else "i32"


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments, and Triton's options."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, int]


def compiled(launch: Launch, architecture: int) -> Any:
    """The kernel of a launch."""
    types, constants = {}, {}
    pairs = zip(launch.function.params, launch.arguments, strict=True)
    for index, (parameter, value) in enumerate(pairs):
        if parameter.is_constexpr:
            types[parameter.name], constants[(index,)] = "constexpr", value
        else:
            types[parameter.name] = signature(value)
    source = ASTSource(launch.function, types, constants)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=launch.options)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Records kernels and their arguments instead of launching them."""
    records: list[Launch] = []

    def launch(function: Any, grid: object) -> Callable[..., None]:
        del grid
        return lambda *arguments, **options: records.append(Launch(function, arguments, options))

    with patch.object(JITFunction, "__getitem__", launch):
        yield records


def train_block(inputs: int, outputs: int, side: int, dtype: torch.dtype) -> None:
    """Forward and backward pass of convolution, norm and pooling."""
    x = torch.zeros(IMAGES, side, side, NETWORKS, inputs, dtype=dtype)
    weight = torch.zeros(NETWORKS, outputs, inputs, 3, 3, dtype=dtype)
    hidden = convolution_kernels.convolution(x, weight)
    row = torch.zeros(NETWORKS, outputs)
    vectors = column_kernels.Norm(row, row, row, row, 0.1, 1e-5, rectify=True)
    out, statistics = column_kernels.norm(hidden, vectors, training=True)
    assert statistics is not None
    column_kernels.norm(hidden, vectors, training=False)
    small, index = column_kernels.pool(out)
    gradient = column_kernels.pool_gradient(small, index, side, side)
    gradient, _, _ = column_kernels.norm_gradients(hidden, gradient, vectors, statistics)
    convolution_kernels.weight_gradient(x, gradient, 3)


def kernels(name: str, dtype: torch.dtype) -> dict[str, Launch]:
    """The kernels of a training minibatch of a block, by name."""
    with launches() as records, torch.no_grad():
        train_block(*BLOCKS[name], dtype)
    return {record.function.__name__: record for record in records}


def main() -> None:
    """Print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--architectures", nargs="+", type=int, default=ARCHITECTURES)
    parser.add_argument("--kernels", nargs="+", help="all by default")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    rows = []
    for block in arguments.blocks:
        for dtype in (getattr(torch, name) for name in arguments.precisions):
            for name, launch in kernels(block, dtype).items():
                if arguments.kernels and name not in arguments.kernels:
                    continue
                row: list[Any] = [block, str(dtype).removeprefix("torch."), name]
                row[1] += " (TF32)" if dtype == torch.float32 else ""
                for architecture in arguments.architectures:
                    needs = Resources(compiled(launch, architecture), architecture)
                    row += [needs.registers, needs.spills, needs.shared]
                rows.append(row)
    heads = ["block", "precision", "kernel"]
    for architecture in arguments.architectures:
        heads += [f"sm_{architecture}: registers", "bytes spilled", "shared bytes"]
    publish(
        "kernel_resources",
        "What the Triton kernels need of a multiprocessor",
        (f"Triton {triton.__version__}.", table(heads, rows), made_on()),
        arguments.write,
    )


if __name__ == "__main__":
    main()
