"""CIFAR-10 from files: both formats, disjoint splits, and errors that name the file."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from cifar_files import batches, write_binary, write_pickled
from esper.leyline.errors import UsageError
from esper.runtime.cifar import DEVIATION, MEAN, cifar10
from esper.runtime.data import Augmentation, Dataset
from esper.runtime.tasks import find

SPLITS = ("train", "validation", "test")


def by_hand(pixels: np.ndarray) -> np.ndarray:
    """Normalise the images of records, value by value."""
    out = np.empty((len(pixels), 32, 32, 3))
    for channel in range(3):
        plane = pixels[:, channel * 1024 : (channel + 1) * 1024].reshape(-1, 32, 32)
        out[..., channel] = (plane / 255.0 - MEAN[channel]) / DEVIATION[channel]
    return out


def assert_same(a: Dataset, b: Dataset) -> None:
    for split in SPLITS:
        for part in ("images", "labels"):
            assert torch.equal(getattr(a, f"{split}_{part}"), getattr(b, f"{split}_{part}"))


@pytest.mark.parametrize("rows", [8, (1, 2, 3, 4, 5, 6)])
def test_every_row_appears_once_as_published(tmp_path: Path, rows: int | tuple[int, ...]) -> None:
    write_binary(tmp_path, rows)
    found = cifar10(tmp_path)
    held = batches(rows)
    pixels = np.concatenate([p for name, (p, _) in held.items() if name != "test_batch"])
    labels = np.concatenate([q for name, (_, q) in held.items() if name != "test_batch"])
    images = torch.cat([found.train_images, found.validation_images])
    np.testing.assert_allclose(images.numpy(), by_hand(pixels), atol=1e-5)
    assert torch.cat([found.train_labels, found.validation_labels]).tolist() == labels.tolist()
    assert len(found.validation_labels) == max(1, len(labels) // 10)
    np.testing.assert_allclose(found.test_images.numpy(), by_hand(held["test_batch"][0]), atol=1e-5)
    seen = [{i.numpy().tobytes() for i in getattr(found, f"{s}_images")} for s in SPLITS]
    assert len(set.union(*seen)) == sum(map(len, seen)), "splits are disjoint"


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_both_formats_agree_from_either_directory(tmp_path: Path, protocol: int) -> None:
    binary = write_binary(tmp_path / "a")
    pickled = write_pickled(tmp_path / "b", protocol=protocol)
    found = cifar10(tmp_path / "a")
    for place in (tmp_path / "b", binary, pickled):
        assert_same(found, cifar10(place))


def test_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    folder = write_pickled(tmp_path)
    for name, (pixels, labels) in batches().items():
        (folder / name).write_bytes(python_2_pickle(pixels, labels))
    assert_same(cifar10(tmp_path), cifar10(write_binary(tmp_path / "other")))


def python_2_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """The dictionary as pickled by Python 2, with 8-bit strings (opcode T)."""

    def text(raw: bytes) -> bytes:
        return b"T" + len(raw).to_bytes(4, "little") + raw

    def number(value: int) -> bytes:
        return b"J" + int(value).to_bytes(4, "little", signed=True)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + number(0) + b"\x85"
        + text(b"b") + b"tR(" + number(1) + number(len(pixels)) + number(3072) + b"\x86"
        + b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR("
        + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
        + b"\x89" + text(pixels.tobytes()) + b"tb"
    )  # fmt: skip
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def test_missing_data_error_says_what_to_put_where(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / ("x" * 5000), tmp_path / "a\x00b"):
        with pytest.raises(UsageError) as error:
            find("cifar_impaired").in_directory(place).datasets()
        assert "data_dir" in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=r"cifar-10-batches-bin or .*fetch cifar10"):
        find("cifar_impaired").in_directory(tmp_path).datasets()


def test_error_names_the_fault_of_a_file(tmp_path: Path) -> None:
    def refused(folder: Path, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            cifar10(folder)

    folder = write_binary(tmp_path / "cut")
    (folder / "data_batch_2.bin").write_bytes(bytes(3073 + 5))
    refused(folder, r"data_batch_2.bin has 3078 bytes, which is not a multiple .* 3073")
    folder = write_binary(tmp_path / "label")
    (folder / "test_batch.bin").write_bytes(bytes(3073) + bytes([10]) + bytes(3072))
    refused(folder, r"test_batch.bin has the label 10 in row 1, .*\[0, 9\]")
    folder = write_binary(tmp_path / "missing")
    (folder / "data_batch_4.bin").unlink()
    refused(folder, r"lacks data_batch_4.bin")
    folder = write_binary(tmp_path / "empty")
    (folder / "data_batch_4.bin").write_bytes(b"")
    refused(folder, r"data_batch_4.bin is empty")
    folder = write_pickled(tmp_path / "labels")
    held = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, -1]}
    (folder / "test_batch").write_bytes(pickle.dumps(held, 2))
    refused(folder, r"test_batch has the label -1 in row 1")


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/esper-was-here",)


PIXELS = np.zeros((2, 3072), np.uint8)
BAD_PICKLES = {
    "evil": pickle.dumps({"data": Evil(), "labels": []}, 2),
    "evil key": pickle.dumps({"data": PIXELS, "labels": [0, 0], "x": Evil()}, 2),
    "builtin": b"cbuiltins\neval\n(S'1'\ntR.", "numpy function": b"cnumpy\nload\n(S'x'\ntR.",
    "attribute of a known one": b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.tofile\x93.",
    "object array": pickle.dumps({"data": PIXELS.astype(object), "labels": [0, 0]}, 2),
    "floats": pickle.dumps({"data": PIXELS.astype(float), "labels": [0, 0]}, 2),
    "another shape": pickle.dumps({"data": PIXELS[:, :9], "labels": [0, 0]}, 2),
    "few labels": pickle.dumps({"data": PIXELS, "labels": [0]}, 2),
    "a label of 40 bits": pickle.dumps({"data": PIXELS, "labels": [0, 1 << 40]}, 2),
    "labels of texts": pickle.dumps({"data": PIXELS, "labels": ["a", "b"]}, 2),
    "no dictionary": pickle.dumps([1], 2), "empty": b"",
    "cut": pickle.dumps({"data": PIXELS, "labels": [0, 0]}, 2)[:-40], "noise": bytes(range(256)),
    "huge": b"\x80\x04\x8d" + b"\xff" * 8,
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PICKLES)
def test_invalid_pickle_is_refused_and_runs_no_code(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(os, "system", ran.append)
    folder = write_pickled(tmp_path)
    (folder / "data_batch_3").write_bytes(BAD_PICKLES[name])
    with pytest.raises(UsageError, match="data_batch_3 is not a batch of CIFAR-10") as error:
        cifar10(folder)
    assert "\n" not in str(error.value)
    assert not ran


@pytest.mark.parametrize(
    ("name", "parameters", "slots"),
    [
        ("baseline", 6418, "r0c0 r1c0 r0c1 r1c1 r0c2 r1c2"),
        ("impaired", 77, "r0c0 r1c0 r0c1 r1c1 r0c2 r1c2"),
        ("minimal", 164, "r0c0 r0c1 r0c2"),
        ("scale", 99922, "r0c0 r1c0 r0c1 r1c1 r0c2 r1c2 r0c3 r1c3 r0c4 r1c4"),
    ],
)
def test_cifar_hosts_have_documented_parameters_and_slots(
    tmp_path: Path, name: str, parameters: int, slots: str
) -> None:
    task = find(f"cifar_{name}")
    assert task.host.parameter_count == parameters
    assert " ".join(slot.name for slot in task.host.slots) == slots
    assert task.augmentation == Augmentation(reach=4, flip=True)
    write_binary(tmp_path)
    (data,) = task.in_directory(tmp_path).datasets()
    assert data.classes == task.host.classes
