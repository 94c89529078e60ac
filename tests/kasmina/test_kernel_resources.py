"""The Triton kernels compile for GPUs that this machine need not have, and spill no registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which Linux has with the extra dev")
ROOT = Path(__file__).parents[2]
KERNELS = 10
SAMPLE = (
    *("--blocks", "64 channels", "--precisions", "bfloat16", "--architectures", "90"),
    *("--kernels", "convolution_kernel", "weight_kernel"),
)


@pytest.mark.parametrize(
    "options",
    [pytest.param(SAMPLE, id="sample"), pytest.param((), marks=pytest.mark.slow, id="all")],
)
def test_kernels_compile_without_spills(options: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/kernel_resources.py", *options]
    there = {"cwd": ROOT, "env": os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}}
    run = subprocess.run(command, **there, check=True, capture_output=True, text=True)
    heads, _, *rows = (
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in run.stdout.splitlines()
        if line.startswith("|")
    )
    assert len(rows) == (2 if options else 4 * 3 * KERNELS)
    for row in rows:
        registers = [int(row[i]) for i, head in enumerate(heads) if head.endswith("registers")]
        spills = [int(row[i]) for i, head in enumerate(heads) if head == "bytes spilled"]
        assert len(registers) == (1 if options else 2)
        assert all(registers)
        assert not any(spills), row
