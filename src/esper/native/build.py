"""Compiles the library: on first use for this machine, or into a wheel for other machines.

In the folder of compiled libraries, only what this user wrote whole is executed. Beside each
library lies its SHA-256. A library that was cut or changed would crash the process or compute
something else, so it is compiled again.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from esper.leyline.phases import phase
from esper.native.structures import SOURCE, layout_source

CACHE_VARIABLE = "ESPER_CACHE_DIR"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
COMPILING = "compiling-"
"""Prefix of the folders in which libraries are compiled."""
SHIPPED_LIBRARIES = Path(__file__).parent / "lib"
"""Libraries compiled by ``make wheel`` and shipped in the wheel."""
FLAGS_VARIABLE = "ESPER_NATIVE_FLAGS"
"""Environment variable with additional compiler flags, such as ``-fsanitize=address``."""
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-fPIC", "-pthread"),
)
INSTRUCTION_SETS = {
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma"),
    "avx2": ("avx2", "fma"),
    "baseline": (),
}
"""CPU features that each set needs, the best set first; each feature is also a compiler option."""
_SECONDS_TO_COMPILE = 600


class Unavailable(Exception):
    """The native library is not available; the message says why in one line."""


class NoCompiler(Unavailable):
    """There is no C++ compiler."""


def compiler() -> list[str]:
    """The compiler command: ``CXX``, or g++ if that is not set.

    Raises:
        NoCompiler: the command does not exist, or ``CXX`` cannot be read.
    """
    try:
        command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    except ValueError as error:
        raise NoCompiler(f"CXX is not a command ({error}); correct it") from error
    if shutil.which(command[0]) is None:
        raise NoCompiler(f"there is no C++ compiler {command[0]!r} (set CXX to another)")
    return command


def compiler_flags(instructions: str) -> list[str]:
    """The flags for ``instructions``, one of ``INSTRUCTION_SETS``, and ``ESPER_NATIVE_FLAGS``."""
    options = [f"-m{name}" for name in INSTRUCTION_SETS[instructions]]
    wide = ["-mprefer-vector-width=512"] if options else []
    return [*FLAGS, *options, *wide, *os.environ.get(FLAGS_VARIABLE, "").split()]


def compile_library(command: list[str], path: Path) -> None:
    """Compile the library and move it to ``path`` atomically, with its digest beside it.

    Args:
        command: the compiler and its flags.
        path: file name of the library, in a folder that exists.

    Raises:
        Unavailable: the compiler fails, or the directory cannot be written.
    """
    try:
        temporary = tempfile.TemporaryDirectory(dir=path.parent, prefix=COMPILING)
    except OSError as error:
        raise Unavailable(f"{path.parent} cannot be written; set {CACHE_VARIABLE}") from error
    log = path.with_suffix(".log")
    with temporary as folder, ThreadPoolExecutor(2) as pool:
        layout = Path(folder) / "layout.cpp"
        layout.write_text(layout_source())
        functions = str(SOURCE / "hosts" / "library.cpp")
        units = [functions], ["-DESPER_DOUBLE", functions], [str(layout)]
        objects = [f"{folder}/{number}.o" for number in range(len(units))]
        jobs = [
            [*command, f"-I{SOURCE}", "-c", *unit, "-o", target]
            for unit, target in zip(units, objects, strict=True)
        ]
        complaint = "".join(pool.map(_complaint, jobs))
        complaint = complaint or _complaint(
            [*command, "-shared", *objects, "-o", f"{folder}/library.so"]
        )
        if complaint:
            log.write_text(complaint, encoding="utf-8", errors="backslashreplace")
            raise Unavailable(f"{command[0]} failed; see {log}")
        keep(Path(folder) / "library.so", path)


def _complaint(command: list[str]) -> str:
    """Run the compiler; what it says if it fails, after the command."""
    run = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS_TO_COMPILE)
    return f"{' '.join(command)}\n{_text(run.stderr)}\n" if run.returncode else ""


def compile_for_a_wheel(folder: Path) -> list[Path]:
    """Compile the library into ``folder`` for every instruction set of this architecture.

    The command is the same as in ``cached_library``, so the machine code is the same.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    names = list(INSTRUCTION_SETS) if _x86() else ["baseline"]
    paths = [folder / _shipped_name(name) for name in names]
    for path in paths:
        compile_library([*compiler(), *compiler_flags(path.name.partition("-")[0])], path)
        digest_path(path).unlink()  # the wheel has digests of its own
    return paths


def shipped_libraries() -> list[Path]:
    """Libraries shipped with the package and built from the current sources, the best first.

    Empty if ``ESPER_NATIVE_FLAGS`` is set, because shipped libraries lack these flags.
    """
    if os.environ.get(FLAGS_VARIABLE) or not SHIPPED_LIBRARIES.exists():
        return []
    candidates = [SHIPPED_LIBRARIES / _shipped_name(name) for name in instruction_sets()]
    return [path for path in candidates if path.exists()]


def _shipped_name(instructions: str) -> str:
    return f"{instructions}-{_digest([*FLAGS, *_texts()])}.so"


def cached_library(rebuild: bool = False) -> Path:
    """The library for this CPU; compiled if the cache has no intact one of these sources.

    Without a compiler, a library of these sources that any compiler made is taken.

    Args:
        rebuild: whether to compile the library in any case.

    Raises:
        Unavailable: there is no compiler, or it fails; or the cache is not to be trusted.
    """
    folder = cache_directory()
    flags = compiler_flags(instruction_sets()[0])
    own_folder(folder)
    sources = f"esper-{_digest([*flags, platform.machine(), *_texts()])}"
    try:
        command = compiler()
    except NoCompiler:
        if not rebuild:
            for path in sorted(folder.glob(f"{sources}-*.so")):
                if is_intact(path):
                    return path
        raise
    path = folder / f"{sources}-{_compiler_key(command)}.so"
    if is_intact(path) and not rebuild:
        return path
    with one_compiler(folder):
        # Another process may have compiled it in the meantime.
        if rebuild or not is_intact(path):
            logging.getLogger(__name__).info("native backend: compiling, once for this machine")
            with phase("compiling the native backend"):
                compile_library([*command, *flags], path)
    return path


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
        Unavailable: it cannot be created, belongs to somebody else, or others can write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"{folder} cannot be written; set {CACHE_VARIABLE}") from error
    status = folder.stat()
    advice = f"set {CACHE_VARIABLE} to a folder of your own"
    if status.st_uid not in _trusted_users():
        raise Unavailable(f"{folder} belongs to another user, so nothing in it is used; {advice}")
    if status.st_mode & WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        try:
            folder.chmod(stat.S_IMODE(status.st_mode) & ~WRITABLE_BY_OTHERS)
        except OSError as error:
            raise Unavailable(
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


def keep(binary: Path, library: Path) -> None:
    """Move a compiled file to its name in the cache, with its digest, both flushed to the disk.

    Raises:
        OSError: the disk failed or is full, or the compiler made no file.
    """
    content = binary.read_bytes()
    drafts = {library: content, digest_path(library): hashlib.sha256(content).hexdigest().encode()}
    for path, data in drafts.items():
        draft = binary.with_name(path.name)
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
        for remnant in folder.glob(f"{COMPILING}*"):
            shutil.rmtree(remnant, ignore_errors=True)
        yield


def _trusted_users() -> tuple[int, int]:
    """The users whose files are executed: this one, and root, who can do anything in any case."""
    return os.geteuid(), 0


def _own_content(path: Path) -> bytes | None:
    """The content of a regular file that only this user can change; None if it is none."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in _trusted_users():
                return None
            return None if status.st_mode & WRITABLE_BY_OTHERS else file.read()
    return None


def instruction_sets() -> list[str]:
    """Names of the ``INSTRUCTION_SETS`` that this CPU supports, the best first."""
    features = cpu_features() if _x86() else frozenset()
    return [
        name for name, extensions in INSTRUCTION_SETS.items() if features.issuperset(extensions)
    ]


def _x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


@cache
def cpu_features() -> frozenset[str]:
    """Features of this CPU as listed by Linux; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _compiler_key(command: list[str]) -> str:
    """A digest of the compiler and its version."""
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, check=False, timeout=60
    )
    return _digest([*command, _text(version.stdout)])


def _text(output: bytes) -> str:
    """What a compiler printed, which need not be UTF-8."""
    return output.decode(errors="backslashreplace")


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _texts() -> Iterator[str]:
    """The path and text of each source file."""
    yield layout_source()
    for path in sorted(path for path in SOURCE.rglob("*") if path.is_file()):
        yield str(path.relative_to(SOURCE))
        yield path.read_text(encoding="utf-8")
