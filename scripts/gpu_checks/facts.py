"""The GPU, its software, and the peaks against which everything else is weighed."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from hot_path_workload import machine

from gpu_checks.place import HALVES, Place, Row, computing
from gpu_checks.section import Found, rows_table

VARIABLES = ("CUDA_", "ESPER_", "TORCH")
"""Beginnings of the names of environment variables that stand on the page, paths left out."""
QUERIES = "clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current,mig.mode.current"


def measure(place: Place) -> Iterator[Row]:
    """Yield facts, then peaks."""
    device = place.device
    properties = torch.cuda.get_device_properties(device)
    facts = {
        **machine(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory, GiB": properties.total_memory / 2**30,
        "multiprocessors": properties.multi_processor_count,
        "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        "cuDNN": torch.backends.cudnn.version(),
        "triton": find_spec("triton") is not None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "CPU cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        **settings_of_the_driver(place),
        **{
            name: text
            for name, text in os.environ.items()
            if name.startswith(VARIABLES) and "/" not in text
        },
    }
    for name, value in facts.items():
        yield {"what": name, "value": value}
    for precision in place.precisions:
        with computing(precision):
            yield {"what": f"product in {precision}, TFLOP/s", "value": product(place, precision)}
    yield {"what": "copy, GB/s read and written", "value": copy_speed(place)}
    one = torch.zeros(1, device=device)
    yield {"what": "launch of one small kernel, us", "value": 1e6 * place.seconds(one.zero_)}
    yield {"what": "20 small kernels in a row, us each", "value": launches_in_a_row(place, one)}


def settings_of_the_driver(place: Place) -> dict[str, str]:
    """Return clocks, power and modes as the driver's tool prints them."""
    if place.machine is not None or shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={QUERIES}", "--format=csv,noheader", "--id=0"]
    asked = subprocess.run(query, capture_output=True, text=True, check=False)
    return {QUERIES: asked.stdout.strip()}


def product(place: Place, precision: str) -> float:
    """Return 10^12 operations a second in a large matrix product."""
    size = place.size(8192, 16)
    dtype = HALVES.get(precision, torch.float32)
    a, b = (torch.randn(size, size, device=place.device).to(dtype) for _ in range(2))
    return 2 * size**3 / place.seconds(lambda: a @ b) / 1e12


def copy_speed(place: Place) -> float:
    """Return 10^9 bytes a second that a large copy reads and writes."""
    source = torch.zeros(place.size(1 << 30, 64), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / place.seconds(lambda: target.copy_(source)) / 1e9


def launches_in_a_row(place: Place, one: torch.Tensor) -> float:
    """Return microseconds of a kernel when the host launches many without waiting."""

    def many() -> None:
        for _ in range(20):
            one.add_(1.0)

    return 1e6 * place.seconds(many) / 20


def page(rows: list[Row], found: Found) -> str:
    """Return the facts in Markdown."""
    return rows_table(("what", "value"), rows)
