"""The folder of compiled libraries, of which only what this user wrote whole is executed.

Beside each library lies its SHA-256. A library that was cut or changed would crash the process or
compute something else, so it is compiled again.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHE_VARIABLE = "ESPER_CACHE_DIR"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
COMPILING = "compiling-"
"""Prefix of the folders in which libraries are compiled."""


class UntrustedFolder(Exception):
    """The folder is not one whose libraries may be executed; the message says why in one line."""


def cache_directory() -> Path:
    """Folder of compiled libraries: ``ESPER_CACHE_DIR``, or one in the user's cache directory."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).resolve() / "esper"


def own_folder(folder: Path) -> None:
    """Create the folder if it is missing, and check that nobody else can exchange files in it.

    A folder of this user loses write permission for others, unless it is sticky like ``/tmp``.

    Raises:
        UntrustedFolder: it belongs to somebody else, or others can write to it.
        OSError: it cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    advice = f"set {CACHE_VARIABLE} to a folder of your own"
    if status.st_uid not in _trusted():
        raise UntrustedFolder(
            f"{folder} belongs to another user, so nothing in it is used; {advice}"
        )
    if status.st_mode & WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        try:
            folder.chmod(stat.S_IMODE(status.st_mode) & ~WRITABLE_BY_OTHERS)
        except OSError as error:
            raise UntrustedFolder(
                f"others can write to {folder}, so nothing in it is used; {advice}"
            ) from error


def is_intact(library: Path) -> bool:
    """Whether a library and its digest are regular files of this user and match."""
    content, digest = _own_content(library), _own_content(digest_path(library))
    if content is None or digest is None:
        return False
    return hashlib.sha256(content).hexdigest().encode() == digest


def digest_path(library: Path) -> Path:
    """The file with the digest of a library."""
    return library.with_suffix(".sha256")


def keep(output: Path, library: Path) -> None:
    """Move a compiled file to its name in the cache, with its digest, both flushed to the disk.

    Raises:
        OSError: the disk failed or is full, or the compiler made no file.
    """
    content = output.read_bytes()
    drafts = {library: content, digest_path(library): hashlib.sha256(content).hexdigest().encode()}
    for path, data in drafts.items():
        draft = output.with_name(path.name)
        with draft.open("wb") as file:
            os.fchmod(file.fileno(), 0o755)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    descriptor = os.open(library.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def one_compiler(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into the folder, and remove what killed ones left.

    Without a lock, as on some network disks, two processes may compile the same library; each
    moves a whole one to its name.
    """
    with (folder / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.getLogger(__name__).info(
                "native backend: another process compiles it; waiting for that"
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            yield
            return
        for leftover in folder.glob(f"{COMPILING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _trusted() -> tuple[int, int]:
    """The users whose files are executed: this one, and root, who can do anything in any case."""
    return os.geteuid(), 0


def _own_content(path: Path) -> bytes | None:
    """The content of a regular file that only this user can change; None if it is none."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in _trusted():
                return None
            return None if status.st_mode & WRITABLE_BY_OTHERS else file.read()
    return None
