"""Compiled libraries: built once for this machine's instruction set, then found in a cache."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent / "src"
"""The hosts' library; other libraries may include its headers."""
CACHE_VARIABLE = "ESPER_CACHE_DIR"
FLAGS_VARIABLE = "ESPER_NATIVE_FLAGS"
"""Further compiler flags, such as ``-fsanitize=address``."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
_FEATURES = (
    ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma"),
    ("avx2", "fma"),
)
"""Instruction sets, the best first; a compiler option has the name of each."""
_SECONDS_TO_COMPILE = 600


class Unavailable(Exception):
    """The native backend cannot be had here; the message says why in one line."""


class NoCompiler(Unavailable):
    """There is no C++ compiler."""


def library(source: Path = SOURCE, *flags: str) -> ctypes.CDLL:
    """A library, compiled if the cache has none for these sources, this compiler and this CPU.

    Args:
        source: the folder of its ``library.cpp``.
        flags: further compiler flags that its numbers depend on.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    found = _found(source, *flags)
    if isinstance(found, Unavailable):
        raise found
    return found


@cache
def _found(source: Path, *flags: str) -> ctypes.CDLL | Unavailable:
    """A library, or why there is none; a failure is not tried again in this process."""
    try:
        return _load(source, *flags)
    except Unavailable as reason:
        return reason
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return Unavailable(f"building it failed ({error})")


def _load(source: Path, *flags: str) -> ctypes.CDLL:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise NoCompiler(f"there is no C++ compiler {command[0]!r} (CXX names another)")
    extra = os.environ.get(FLAGS_VARIABLE, "").split()
    command += [*FLAGS, *instruction_set(), *flags, *extra]
    path = cache_directory() / f"esper-{_key(command, source)}.so"
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink()  # damaged; it is made anew
    _announce()
    compile_library(command, source, path)
    return ctypes.CDLL(str(path))


@cache
def _announce() -> None:
    """Said at the first library of this process; the others take less."""
    logging.getLogger(__name__).info("native backend: compiling, once for this machine")


def compile_library(command: list[str], source: Path, path: Path) -> None:
    """Compile the ``library.cpp`` of ``source`` to ``path``, which appears whole or not at all.

    Raises:
        Unavailable: the compiler fails, or the cache cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
        os.close(handle)
    except OSError as error:
        raise Unavailable(f"{path.parent} cannot be written; set {CACHE_VARIABLE}") from error
    try:
        run = subprocess.run(
            [*command, f"-I{SOURCE}", str(source / "library.cpp"), "-o", name],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS_TO_COMPILE,
        )
        if run.returncode:
            log = path.with_suffix(".log")
            log.write_text(f"{' '.join(command)}\n{run.stderr}")
            raise Unavailable(f"{command[0]} failed; see {log}")
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def cache_directory() -> Path:
    """Where libraries are kept: ``ESPER_CACHE_DIR``, or the user's cache."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).resolve() / "esper"


def instruction_set() -> list[str]:
    """Compiler flags for the best instruction set that this CPU says it has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    features = cpu_features()
    for needed in _FEATURES:
        if features.issuperset(needed):
            return [*(f"-m{name}" for name in needed), "-mprefer-vector-width=512"]
    return []


@cache
def cpu_features() -> frozenset[str]:
    """Names of the instruction sets of this CPU, as Linux lists them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _key(command: list[str], source: Path) -> str:
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    digest = hashlib.sha256()
    for part in (*command, version.stdout, platform.machine()):
        digest.update(part.encode())
    for path in sorted({*SOURCE.glob("*"), *source.glob("*")}):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
