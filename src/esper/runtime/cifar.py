"""Reads CIFAR-10 (Krizhevsky, "Learning multiple layers of features from tiny images", 2009).

Both published formats are supported: ``cifar-10-batches-bin``, whose records are a label and 3,072
pixel values, and ``cifar-10-batches-py``, which holds pickled dictionaries with the same numbers.

A pickle names functions to call. The few names that such a file needs are mapped to substitutes
that only store or encode their arguments; every other name is refused.
"""

import io
import pickle
from collections.abc import Callable
from functools import lru_cache
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.runtime.data import Dataset

BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CLASSES = 10
SIDE, CHANNELS = 32, 3
VALUES = SIDE * SIDE * CHANNELS
RECORD = 1 + VALUES
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
"""Mean and deviation of each channel of the 50,000 published training images, in [0, 1]."""

Rows = tuple[np.ndarray, np.ndarray]
"""Pixel values, uint8 ``[n, 3072]`` channel by channel, and labels ``[n]``."""


@lru_cache(maxsize=1)
def cifar10(directory: Path) -> Dataset:
    """Read CIFAR-10 from ``directory``, with images normalised per channel.

    The test split is the test batch. The validation split is the last tenth of the training rows,
    in the order of the files; the training split is the rest.

    Raises:
        UsageError: there are no files, one is missing, or one is not valid.
    """
    folder, names, read = _format(directory)
    missing = [name for name in names if not isfile(folder / name)]
    if missing:
        raise UsageError(
            f"data_dir: {folder} lacks {', '.join(missing)}; put all of CIFAR-10 there, "
            "or run esper tasks fetch cifar10"
        )
    batches = [_rows_in_range(folder / name, *read(folder / name)) for name in names]
    pixels = np.concatenate([batch for batch, _ in batches[:-1]])
    labels = np.concatenate([batch for _, batch in batches[:-1]])
    training_rows = len(labels) - max(1, len(labels) // 10)
    if not training_rows:
        raise UsageError(f"data_dir: {folder} has only one training image; give two or more")
    test_pixels, test_labels = batches[-1]
    return Dataset(
        train_images=_images(pixels[:training_rows]),
        train_labels=torch.from_numpy(labels[:training_rows]),
        validation_images=_images(pixels[training_rows:]),
        validation_labels=torch.from_numpy(labels[training_rows:]),
        test_images=_images(test_pixels),
        test_labels=torch.from_numpy(test_labels),
        classes=CLASSES,
    )


def _format(directory: Path) -> tuple[Path, list[str], Callable[[Path], Rows]]:
    """The folder of the batches, their names (test batch last), and a function that reads one."""
    formats: tuple[tuple[str, str, Callable[[Path], Rows]], ...] = (
        ("cifar-10-batches-bin", ".bin", _read_binary),
        ("cifar-10-batches-py", "", _read_pickled),
    )
    for name_of_folder, suffix, read in formats:
        names = [f"{batch}{suffix}" for batch in BATCHES]
        for folder in (directory / name_of_folder, directory):
            if any(isfile(folder / name) for name in names):
                return folder, names, read
    raise UsageError(
        f"data_dir: there is no CIFAR-10 in {directory}; put cifar-10-batches-bin or "
        "cifar-10-batches-py there (https://www.cs.toronto.edu/~kriz/cifar.html), name their "
        "directory with --data-dir, or run esper tasks fetch cifar10"
    )


def _read_binary(path: Path) -> Rows:
    content = np.frombuffer(_content(path), np.uint8)
    if len(content) % RECORD:
        raise UsageError(
            f"data_dir: {path} has {len(content)} bytes, which is not a multiple of the record "
            f"size {RECORD}; it is truncated or has another format, so download it again"
        )
    records = content.reshape(-1, RECORD)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _read_pickled(path: Path) -> Rows:
    try:
        content = read_pickle(_content(path))
        if not isinstance(content, dict):
            raise ValueError("it does not hold a dictionary")
        data, labels = (
            content.get(name, content.get(name.encode())) for name in ("data", "labels")
        )
        if not isinstance(data, ByteArray):
            raise ValueError("it has no array 'data'")
        pixels = data.numpy()
        if pixels.ndim != 2 or pixels.shape[1] != VALUES:
            raise ValueError(f"'data' has the shape {pixels.shape}, not (rows, {VALUES})")
        if not isinstance(labels, list) or len(labels) != len(pixels):
            raise ValueError(f"'labels' is not a list of one label per row, for {len(pixels)} rows")
        if not all(type(label) is int and abs(label) < 2**31 for label in labels):
            raise ValueError("'labels' holds values other than small whole numbers")
    except ValueError as error:
        raise UsageError(
            f"data_dir: {path} is not a batch of CIFAR-10 ({error}); download it again"
        ) from error
    return pixels, np.array(labels, np.int64)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"data_dir: cannot read {path} ({error.strerror})") from error


def _rows_in_range(path: Path, pixels: np.ndarray, labels: np.ndarray) -> Rows:
    if not len(labels):
        raise UsageError(f"data_dir: {path} is empty; download it again")
    wrong = np.flatnonzero((labels < 0) | (labels >= CLASSES))
    if len(wrong):
        raise UsageError(
            f"data_dir: {path} has the label {labels[wrong[0]]} in row {wrong[0]}, but labels must "
            "lie in [0, 9]; it is damaged or has another format, so download it again"
        )
    return pixels, labels


def _images(pixels: np.ndarray) -> Tensor:
    """Float images ``[n, 32, 32, 3]``, normalised to mean 0 and deviation 1 per channel."""
    images = torch.from_numpy(pixels.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1).copy())
    values = images.float().div_(255.0)
    return values.sub_(torch.tensor(MEAN)).div_(torch.tensor(DEVIATION))


class ByteArray:
    """The description of a numpy array of uint8 in a pickle."""

    def __init__(self, *_: Any):
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def numpy(self) -> np.ndarray:
        """The array.

        Raises:
            ValueError: it is not an array of uint8 in C order.
        """
        try:
            _, shape, dtype, fortran, raw = self.state
            if dtype.code not in ("u1", b"u1") or fortran or not isinstance(raw, bytes):
                raise ValueError("an array is not of uint8 in C order")
            return np.frombuffer(raw, np.uint8).reshape(shape)
        except (TypeError, AttributeError) as error:
            raise ValueError("an array is not of uint8 in C order") from error


class _Dtype:
    def __init__(self, code: Any = None, *_: Any):
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Ignore the state, such as byte order, which does not apply to bytes."""


def _encode(text: Any, codec: Any) -> bytes:
    if not isinstance(text, str) or codec != "latin1":
        raise pickle.UnpicklingError("it has bytes that are not encoded as latin1")
    return text.encode("latin1")


_SUBSTITUTES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): ByteArray,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): ByteArray,
    ("numpy._core.multiarray", "_reconstruct"): ByteArray,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _SUBSTITUTES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}") from None

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an external object")


def read_pickle(content: bytes) -> Any:
    """Unpickle ``content``, with ``ByteArray`` for arrays; strings of Python 2 stay bytes.

    Raises:
        ValueError: it cannot be read, or refers to anything other than arrays.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:
        # Corrupt bytes can raise any exception; the fault is in the file.
        raise ValueError(str(error) or type(error).__name__) from error
