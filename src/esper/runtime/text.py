"""A text as a data set: windows of bytes, and the byte that follows each position."""

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
from esper.runtime.registry import Task

SHIPPED = Path(__file__).with_name("text.txt")
"""Licence and documentation of Esper, kept as they were so that results stay comparable."""

BYTES = 256
"""Number of classes."""

BITS_A_NAT = 1 / log(2)
"""Cross-entropy in nats times this is bits per byte."""

PIECES = 20
"""A text is cut into so many pieces, of which every fifth of ten validates and every tenth tests:
both see all of its parts."""

HELD_BACK_WINDOWS = 128
"""Most windows of validation, and of test."""

MOST_BYTES = 2**30
"""Of a text; it takes twelve times its size in memory."""


@dataclass(frozen=True)
class TextDataset(Dataset):
    """Windows of a text, see ``text``.

    ``train_images [n, 1, T, 1]`` and ``train_labels [n, T]`` are overlapping views of one stream of
    bytes: a text of n bytes takes no more memory for longer windows.
    """

    def __post_init__(self) -> None:
        """A byte is a byte: to look at every label of every window would take long."""


def text(path: Path | str, context: int) -> Dataset:
    """The bytes of the file at ``path`` in windows of ``context``.

    Training draws windows that begin at any byte of its pieces; validation and test are windows
    side by side, spread evenly over theirs, at most ``HELD_BACK_WINDOWS``.

    Raises:
        UsageError: the file cannot be read, or is too short or too long.
    """
    stream = torch.frombuffer(bytearray(_content(path, context)), dtype=torch.uint8)
    pieces = stream.tensor_split(PIECES)
    train, validation, test = (
        torch.cat([piece for i, piece in enumerate(pieces) if i % 10 in wanted])
        for wanted in (set(range(10)) - {4, 9}, {4}, {9})
    )
    images, labels = _windows(train, context)
    return TextDataset(
        images,
        labels,
        *_spread(*_windows(validation, context, context)),
        *_spread(*_windows(test, context, context)),
        classes=BYTES,
        label_shape=(context,),
    )


def reading(task: Task, path: str) -> Task:
    """``task`` on the text at ``path``; a task that is not about text as it is.

    Raises:
        UsageError: see ``text``; whatever the task.
    """
    if not isinstance(task.host, TransformerHost):
        _content(path, 1)
        return task
    data = text(path, task.host.context)
    return replace(task, data=lambda: data, summary=f"next byte of {shown(path)}")


def _windows(stream: Tensor, context: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """Bytes ``[n, 1, T, 1]`` and those that follow, int64 ``[n, T]``, as views."""
    images = stream[:-1].float().unfold(0, context, stride)[:, None, :, None]
    return images, stream[1:].long().unfold(0, context, stride)


def _spread(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    count = min(len(images), HELD_BACK_WINDOWS)
    chosen = torch.arange(count) * len(images) // count
    return images[chosen], labels[chosen]


def _content(path: Path | str, context: int) -> bytes:
    try:
        file = Path(os.path.expanduser(path))
        if file.exists() and not file.is_file():
            raise UsageError(
                f"text_file: {shown(str(path))} is no file; give a file with a text in it"
            )
        if file.stat().st_size > MOST_BYTES:
            raise UsageError(
                f"text_file: {shown(str(path))} has more than {MOST_BYTES} bytes; cut it"
            )
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"text_file: cannot read {shown(str(path))} ({reason}); give a file with a text in it"
        ) from error
    least = PIECES * (context + 1)
    if len(content) < least:
        raise UsageError(
            f"text_file: {shown(str(path))} has {len(content)} bytes; windows of {context} need at "
            f"least {least}"
        )
    return content
