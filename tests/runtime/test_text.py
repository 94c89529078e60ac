"""Text as data: windows of bytes, disjoint splits, and one-line errors."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.kasmina.hosts.transformer import TransformerHost
from esper.leyline.errors import UsageError
from esper.runtime.tasks import find
from esper.runtime.text import PIECES, SHIPPED_TEXT, reading, text
from esper.tolaria import bank
from esper.tolaria.bank import DataBank
from support import CPU, F64

CONTEXT = 5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A text in which every pair of adjacent bytes occurs once."""
    pairs = bytes(b for i in range(25) for b in (i, *(x for j in range(i + 1, 25) for x in (j, i))))
    path = tmp_path / "text"
    path.write_bytes(pairs)
    return path


def bytes_of(images: torch.Tensor) -> list[bytes]:
    return [bytes(window.flatten().int().tolist()) for window in images]


def test_labels_are_the_next_bytes(file: Path):
    data = text(file, CONTEXT)
    for split in ("train", "validation", "test"):
        images, labels = getattr(data, f"{split}_images"), getattr(data, f"{split}_labels")
        assert images.shape[1:] == (1, CONTEXT, 1)
        assert torch.equal(images[:, 0, 1:, 0].long(), labels[:, :-1])
    whole = file.read_bytes()
    assert bytes_of(data.train_images[:1]) == [whole[:CONTEXT]]
    assert data.train_labels[0].tolist() == list(whole[1 : CONTEXT + 1])


def test_every_piece_of_the_text_is_in_exactly_one_split(file: Path):
    whole = file.read_bytes()
    pieces = torch.tensor(list(whole)).tensor_split(PIECES)
    data = text(file, CONTEXT)

    def expected(*wanted: int) -> bytes:
        return b"".join(bytes(p.tolist()) for i, p in enumerate(pieces) if i % 10 in wanted)

    train, validation, test = expected(0, 1, 2, 3, 5, 6, 7, 8), expected(4), expected(9)
    assert bytes_of(data.train_images) == [
        train[i : i + CONTEXT] for i in range(len(train) - CONTEXT)
    ]
    for images, span in ((data.validation_images, validation), (data.test_images, test)):
        found = bytes_of(images)
        assert len(found) == (len(span) - 1) // CONTEXT
        assert b"".join(found) == span[: len(found) * CONTEXT]


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_longer_windows_take_no_more_memory(dtype: torch.dtype, preload: bool):
    host = TransformerHost(layers=1, width=4, heads=2, context=64)
    task = replace(find("text_bytes"), host=host, data=lambda: text(SHIPPED_TEXT, 64))
    made = DataBank([(task, task.datasets())], dtype, CPU, preload)
    count = len(made.train_images)
    assert made.train_images.dtype == dtype
    assert made.train_images.untyped_storage().nbytes() < 2 * count * dtype.itemsize
    assert made.train_labels.untyped_storage().nbytes() < 2 * count * 8
    assert made.validation_images.shape == (1, 128, 1, 64, 1)
    assert torch.equal(made.train_images, text(SHIPPED_TEXT, 64).train_images.to(dtype))


def test_memory_of_a_text_decides_whether_it_is_preloaded(monkeypatch: pytest.MonkeyPatch):
    """The memory counts each byte once, however many windows contain it."""
    task = find("text_bytes")
    data = task.datasets()
    least = len(data[0].train_images) * 4
    for limit, streamed in ((least // 2, True), (2 * least, False)):
        monkeypatch.setattr(bank, "SMALL", limit)
        assert DataBank([(task, data)], torch.float32, CPU, None).streamed is streamed


def test_text_is_shipped_with_the_package():
    import esper

    assert SHIPPED_TEXT.is_relative_to(Path(esper.__file__).parent)
    (data,) = find("text_bytes").datasets()
    assert data.classes == 256
    assert len(data.train_labels) > 50_000


def test_text_file_replaces_the_data_of_text_tasks_only(file: Path):
    host = TransformerHost(layers=1, width=4, heads=2, context=7)
    task = reading(replace(find("text_bytes"), host=host), str(file))
    (data,) = task.datasets()
    assert bytes_of(data.train_images[:1]) == [file.read_bytes()[:7]]
    assert "text" in task.summary
    digits = find("digits")
    assert reading(digits, str(file)) is digits
    with pytest.raises(UsageError, match=r"^text_file: cannot read"):
        reading(digits, str(file) + "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*No such file"),
        (b"", "has 0 bytes; windows of 5 need at least 120"),
        (b"x" * 119, "has 119 bytes; windows of 5 need at least 120"),
    ],
)
def test_invalid_text_error_is_one_line(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"^text_file: .*{message}") as caught:
        text(path, CONTEXT)
    assert "\n" not in str(caught.value)


def test_shortest_valid_text_fills_every_split(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * 120)
    data = text(path, CONTEXT)
    assert min(len(data.validation_labels), len(data.test_labels)) >= 1


@pytest.mark.parametrize("name", ["", ".", "/dev/zero", "a\0b"])
def test_path_that_is_not_a_file_error_is_one_line(name: str):
    with pytest.raises(UsageError, match=r"^text_file: .*; give a text file"):
        text(name, CONTEXT)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_error_is_one_line(file: Path):
    file.chmod(0)
    with pytest.raises(UsageError, match=r"^text_file: cannot read .*Permission denied"):
        text(file, CONTEXT)
