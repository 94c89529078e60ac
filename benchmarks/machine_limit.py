"""What the processor can do at most, and what share of it the races' hosts reach.

    python benchmarks/machine_limit.py --write

The limit is the rate of fused multiply-adds in registers, with one thread and with all; beside it
stands a matrix product of 1,024 by 1,024. A race notes how many operations a second its hosts
compute while they are trained and measured (``scripts/benchmark_hot_path.py``): forward and
backward passes of layers alone, without norms, pooling, seeds and the optimizer.
"""

import ctypes
import json
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from reporting import RESULTS, made_on, new_parser, publish, table

from esper.native.build import compiler, compiler_flags, instruction_sets

ROUNDS, REPEATS = 20_000_000, 5
SOURCE = """
typedef float Vector __attribute__((vector_size(BYTES)));
extern "C" float multiply_add(long rounds, const float* begin) {
  Vector sums[12], factor = Vector{} + begin[12], term = Vector{} + begin[13];
  for (int j = 0; j < 12; ++j) sums[j] = Vector{} + begin[j];
  for (long i = 0; i < rounds; ++i)
    for (int j = 0; j < 12; ++j) sums[j] = sums[j] * factor + term;
  Vector total = {};
  for (int j = 0; j < 12; ++j) total += sums[j];
  return total[0];
}
"""
"""Twelve sums, which begin differently, hide the latency of a multiply-add."""
VECTOR_BYTES = {"avx512": 64, "avx2": 32, "baseline": 16}
RACES = {
    "digits": "digits", "fully connected": "mlp", "CIFAR shapes": "pixels",
    "32-64 channels": "wide_32", "128-256 channels": "wide_128", "text": "text",
}  # fmt: skip
"""Pages of the races by workload."""


def multiply_add_rate(threads: int) -> float:
    """Return 10^9 operations per second of fused multiply-adds; one counts as two."""
    instructions = instruction_sets()[0]
    size = VECTOR_BYTES[instructions]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "limit.cpp", Path(folder) / "limit.so"
        source.write_text(SOURCE)
        flags = [*compiler_flags(instructions), f"-DBYTES={size}", "-shared"]
        subprocess.run([*compiler(), *flags, str(source), "-o", str(target)], check=True)
        function = ctypes.CDLL(str(target)).multiply_add
        function.argtypes = ctypes.c_long, ctypes.POINTER(ctypes.c_float)
        values = (ctypes.c_float * 14)(*range(12), 0.999, 0.001)

        def seconds() -> float:
            begin = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(function, [ROUNDS] * threads, [values] * threads))
            return time.perf_counter() - begin

        operations = 2.0 * 12 * (size // 4) * ROUNDS * threads
        return operations / min(seconds() for _ in range(REPEATS)) / 1e9


def product_rate(threads: int, size: int = 1024) -> float:
    """Return 10^9 operations per second of a product of two matrices."""
    torch.set_num_threads(threads)
    a, b = torch.randn(2, size, size)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    return 2.0 * size**3 / min(times) / 1e9


def main() -> None:
    """Measure the limits, and write the page."""
    arguments = new_parser(__doc__).parse_args()
    every = os.cpu_count() or 1
    limits = {n: (multiply_add_rate(n), product_rate(n)) for n in dict.fromkeys((1, every))}
    rows = [(n, f"{fma:.0f}", f"{product:.0f}") for n, (fma, product) in limits.items()]
    fractions = []
    for workload, page in RACES.items():
        races = json.loads((RESULTS / f"hot_path_{page}.json").read_text())
        race = next(one for one in races if one["backend"] == "NativeBackend")
        rate = race["host_gflops"]
        shares = (f"{rate / limit:.0%}" for limit in limits[every])
        fractions.append((workload, f"{rate:.0f}", *shares, race["device_name"]))
    parts = (
        table(("threads", "multiply-adds in registers, GFLOP/s", "matrix product"), rows),
        "Hosts of the races (native, float32, all threads), as shares of the last row:",
        table(("workload", "GFLOP/s", "of multiply-adds", "of the product", "raced on"), fractions),
        "Convolutions by Winograd's tiles take fewer operations than these figures count.",
        f"{made_on()}.",
    )
    publish("machine_limit", "What the processor can do", parts, arguments.write)


if __name__ == "__main__":
    main()
