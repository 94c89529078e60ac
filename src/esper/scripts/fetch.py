"""``esper tasks fetch``: download data that is not part of Esper, and verify it."""

import logging
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from esper.leyline.config.setting import setting
from esper.leyline.errors import UsageError
from esper.runtime.cifar import cifar10
from esper.scripts.flags import parse


@dataclass(frozen=True, slots=True)
class Archive:
    """A published archive.

    Attributes:
        url: its address.
        checksum: SHA-256 of the file.
    """

    url: str
    checksum: str


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchArguments:
    """Download data that is not part of Esper, and verify it by its SHA-256."""

    names: tuple[str, ...] = setting((), positional=True)
    """What to download: cifar10 (170 MB)."""
    data_dir: str = "./data"
    """Directory for the downloaded data."""


def fetch(arguments: list[str]) -> int:
    """Download data that is not part of Esper."""
    program = "esper tasks fetch"
    options = parse(FetchArguments, program, arguments)
    names, directory = " ".join(options.names), Path(options.data_dir)
    if names not in ARCHIVES:
        raise UsageError(f"{program}: name one of {', '.join(ARCHIVES)}, got {names!r}")
    _fetch(ARCHIVES[names], directory)
    splits = cifar10(directory.resolve())
    counts = (len(splits.train_labels), len(splits.validation_labels), len(splits.test_labels))
    print("{}: {} images for training, {} for validation, {} for test".format(directory, *counts))
    return 0


def _fetch(archive: Archive, directory: Path) -> None:
    """Download and unpack an archive into a directory, which is created if needed.

    Raises:
        UsageError: it cannot be downloaded, has the wrong SHA-256, or cannot be written.
    """
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            path = pooch.retrieve(archive.url, f"sha256:{archive.checksum}", "archive", folder)
            with tarfile.open(path) as content:
                content.extractall(directory, filter="data")
    except ValueError as error:
        raise UsageError(
            f"fetch: {archive.url} does not have the published SHA-256; "
            "nothing was kept, try again or download it by hand"
        ) from error
    except (OSError, tarfile.TarError) as error:
        raise UsageError(
            f"fetch: {archive.url} could not be downloaded to {directory} ({error}); "
            "download and unpack it there by hand"
        ) from error
