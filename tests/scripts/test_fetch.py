"""``esper tasks fetch`` from a local server: intact, damaged and missing archives."""

import hashlib
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cifar_files import write_binary
from esper.leyline.errors import UsageError
from esper.scripts import tasks as module
from esper.scripts.tasks import ARCHIVES, Archive, tasks


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def published(tmp_path: Path, monkeypatch) -> Iterator[Archive]:
    """Serve a small archive in place of the real one."""
    folder = write_binary(tmp_path / "source")
    path = tmp_path / "served" / "cifar.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(path.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    found = Archive(f"http://127.0.0.1:{server.server_port}/{path.name}", checksum)
    monkeypatch.setitem(ARCHIVES, "cifar10", found)
    yield found
    server.shutdown()
    server.server_close()


def test_a_published_archive_is_unpacked_and_read(published: Archive, tmp_path, capsys) -> None:
    place = tmp_path / "deep" / "data"
    assert tasks(["fetch", "cifar10", "--data-dir", str(place)]) == 0
    assert "36 images for training, 4 for validation, 8 for test" in capsys.readouterr().out
    assert [path.name for path in place.iterdir()] == ["cifar-10-batches-bin"]


@pytest.mark.parametrize("wrong", ["checksum", "address", "server"])
def test_a_damaged_or_absent_archive_leaves_nothing(
    published: Archive, tmp_path: Path, monkeypatch, wrong: str
) -> None:
    changed = {
        "checksum": Archive(published.url, "0" * 64),
        "address": Archive(published.url + "x", published.checksum),
        "server": Archive("http://127.0.0.1:9/x", published.checksum),
    }[wrong]
    monkeypatch.setitem(ARCHIVES, "cifar10", changed)
    words = "not have the published SHA-256" if wrong == "checksum" else "could not be downloaded"
    with pytest.raises(UsageError, match=words) as error:
        tasks(["fetch", "cifar10", "--data-dir", str(tmp_path / "data")])
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("names", [[], ["cifar100"], ["cifar10", "cifar10"]])
def test_an_unknown_archive_is_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match="name one of cifar10"):
        tasks(["fetch", *names])


def test_the_checksum_of_cifar10_is_the_published_one() -> None:
    assert module.ARCHIVES["cifar10"].url.startswith("https://www.cs.toronto.edu/~kriz/")
    assert len(module.ARCHIVES["cifar10"].checksum) == 64
