"""Small files in both formats in which CIFAR-10 is published."""

import pickle
from pathlib import Path

import numpy as np

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def batches(rows: int | tuple[int, ...] = 8) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Random pixels ``[rows, 3072]`` and labels of each batch; the first pixel tells rows apart."""
    counts = (rows,) * 6 if isinstance(rows, int) else rows
    generator = np.random.default_rng(3)
    return {
        name: (
            generator.integers(0, 256, (count, 3072), dtype=np.uint8),
            generator.integers(0, 10, count),
        )
        for name, count in zip(BATCHES, counts, strict=True)
    }


def write_binary(directory: Path, rows: int | tuple[int, ...] = 8) -> Path:
    """``cifar-10-batches-bin`` in a directory."""
    folder = directory / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, (pixels, labels) in batches(rows).items():
        records = np.concatenate([labels[:, None].astype(np.uint8), pixels], 1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def write_pickled(directory: Path, rows: int | tuple[int, ...] = 8, protocol: int = 2) -> Path:
    """``cifar-10-batches-py`` in a directory."""
    folder = directory / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, (pixels, labels) in batches(rows).items():
        held = {b"data": pixels, b"labels": labels.tolist(), b"batch_label": name.encode()}
        (folder / name).write_bytes(pickle.dumps(held, protocol))
    return folder
