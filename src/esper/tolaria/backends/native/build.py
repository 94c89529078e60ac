"""The compiled library: built once for this machine's instruction set, then found in a cache."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent / "src"
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
_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx2", "fma", "bmi1", "bmi2", "f16c"}),
)


class Unavailable(Exception):
    """The native backend cannot be had here; the message says why in one line."""


@cache
def library() -> ctypes.CDLL:
    """The library, compiled if the cache has none for these sources, this compiler and this CPU.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise Unavailable("there is no C++ compiler (g++)")
    flags = [*FLAGS, *instruction_set(), *os.environ.get(FLAGS_VARIABLE, "").split()]
    path = cache_directory() / f"esper-{_key(compiler, flags)}.so"
    if not path.exists():
        logging.getLogger(__name__).info("native backend: compiling, once for this machine")
        compile_library(compiler, flags, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded ({error})") from error


def compile_library(compiler: str, flags: list[str], path: Path) -> None:
    """Compile ``library.cpp`` to ``path``, which appears whole or not at all.

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
        command = [compiler, *flags, str(SOURCE / "library.cpp"), "-o", name]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            log = path.with_suffix(".log")
            log.write_text(f"{' '.join(command)}\n{run.stderr}")
            raise Unavailable(f"{compiler} failed; see {log}")
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def cache_directory() -> Path:
    """Where libraries are kept: ``ESPER_CACHE_DIR``, or the user's cache."""
    if CACHE_VARIABLE in os.environ:
        return Path(os.environ[CACHE_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "esper"


def instruction_set() -> list[str]:
    """Compiler flags for the best instruction set that this CPU says it has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    features = cpu_features()
    for level, needed in _LEVELS:
        if needed <= features:
            return [f"-march={level}", "-mprefer-vector-width=512"]
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


def _key(compiler: str, flags: list[str]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    digest = hashlib.sha256()
    for part in (compiler, version.stdout, *flags):
        digest.update(part.encode())
    for path in sorted(SOURCE.glob("*")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
