"""Text as a data set: windows of bytes, labelled with the next byte at each position."""

import os
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import torch
from torch import Tensor

from esper.kasmina.hosts.transformer import TransformerHost
from esper.leyline.config import shown
from esper.leyline.errors import UsageError
from esper.runtime.data import Dataset
from esper.runtime.task import Task

SHIPPED_TEXT = Path(__file__).with_name("text.txt")
"""Licence and documentation of Esper, frozen so that results stay comparable."""

BYTES = 256
"""Number of classes."""

BITS_PER_NAT = 1 / log(2)
"""Bits per nat: converts cross-entropy in nats to bits per byte."""

PIECES = 20
"""Number of pieces into which a text is cut. Of every ten pieces, the fifth is for validation and
the tenth for test, so that each comes from both halves of the text."""

HELD_BACK_WINDOWS = 128
"""Largest number of windows in the validation split, and in the test split."""

MAX_BYTES = 2**30
"""Largest size of a text; in memory it takes twelve times as much."""


@dataclass(frozen=True)
class TextDataset(Dataset):
    """Windows of a text, see ``text``.

    ``train_images [n, 1, T, 1]`` and ``train_labels [n, T]`` are overlapping views of one stream of
    bytes, so longer windows take no more memory.
    """

    def __post_init__(self) -> None:
        """Skip the check of labels: it would be slow, and every byte is a valid label."""


def text(path: Path | str, context: int) -> Dataset:
    """Read the file at ``path`` as windows of ``context`` bytes.

    Training windows may start at any byte of the training pieces. Validation and test each have at
    most ``HELD_BACK_WINDOWS`` windows, which do not overlap and are spread evenly.

    Raises:
        UsageError: the file cannot be read, or is too short or too long.
    """
    stream = torch.frombuffer(bytearray(_content(path, context)), dtype=torch.uint8)
    pieces = stream.tensor_split(PIECES)
    train, validation, test = (
        torch.cat([piece for i, piece in enumerate(pieces) if i % 10 in numbers])
        for numbers in (set(range(10)) - {4, 9}, {4}, {9})
    )
    return TextDataset(
        *_windows(train, context),
        *_held_back(validation, context),
        *_held_back(test, context),
        classes=BYTES,
        label_shape=(context,),
    )


def reading(task: Task, path: str) -> Task:
    """``task`` with the text at ``path`` as its data; unchanged if its host is not a transformer.

    Raises:
        UsageError: the file cannot be read, or is too short or too long; see ``text``. The file is
            checked even if the host is not a transformer.
    """
    if not isinstance(task.host, TransformerHost):
        _content(path, 1)
        return task
    data = text(path, task.host.context)
    return replace(task, data=lambda: data, summary=f"next byte of {shown(path)}")


def _windows(stream: Tensor, context: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """Bytes ``[n, 1, T, 1]`` and the bytes that follow them, int64 ``[n, T]``, as views."""
    images = stream[:-1].float().unfold(0, context, stride)[:, None, :, None]
    return images, stream[1:].long().unfold(0, context, stride)


def _held_back(stream: Tensor, context: int) -> tuple[Tensor, Tensor]:
    images, labels = _windows(stream, context, context)
    count = min(len(images), HELD_BACK_WINDOWS)
    indices = torch.arange(count) * len(images) // count
    return images[indices], labels[indices]


def _content(path: Path | str, context: int) -> bytes:
    name, least = shown(str(path)), PIECES * (context + 1)
    try:
        file = Path(os.path.expanduser(path))
        if file.exists() and not file.is_file():
            raise UsageError(f"text_file: {name} is not a file; give a text file")
        if file.stat().st_size > MAX_BYTES:
            raise UsageError(f"text_file: {name} has more than {MAX_BYTES} bytes; shorten it")
        content = file.read_bytes()
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"text_file: cannot read {name} ({reason}); give a text file") from error
    if len(content) < least:
        raise UsageError(
            f"text_file: {name} has {len(content)} bytes; windows of {context} need at "
            f"least {least}"
        )
    return content
