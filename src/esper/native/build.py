"""Compiles the library: on first use for this machine, or into a wheel for other machines."""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from esper.native.cache import (
    CACHE_VARIABLE,
    COMPILING,
    UntrustedFolder,
    cache_directory,
    digest_path,
    is_intact,
    keep,
    one_compiler,
    own_folder,
)
from esper.native.structures import SOURCE, layout_source

SHIPPED = Path(__file__).parent / "lib"
"""Libraries compiled by ``make wheel`` and shipped in the wheel."""
FLAGS_VARIABLE = "ESPER_NATIVE_FLAGS"
"""Environment variable with additional compiler flags, such as ``-fsanitize=address``."""
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread")
UNITS = {
    "hosts": "-ffp-contract=fast",
    "policy": "-ffp-contract=fast",
}
"""The parts of the library with their contraction flags, the slowest to compile first."""
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
        command: the compiler and the flags common to all parts.
        path: file name of the library.

    Raises:
        Unavailable: the compiler fails, or the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=path.parent, prefix=COMPILING)
    except OSError as error:
        raise Unavailable(f"{path.parent} cannot be written; set {CACHE_VARIABLE}") from error
    log = path.with_suffix(".log")
    with temporary as folder, ThreadPoolExecutor(2) as pool:
        (Path(folder) / "layout.cpp").write_text(layout_source())
        units = {part: (SOURCE / part / "library.cpp", flag) for part, flag in UNITS.items()}
        units["layout"] = Path(folder) / "layout.cpp", FLAGS[0]
        jobs = [
            [*command, flag, f"-I{SOURCE}", "-c", str(unit), "-o", f"{folder}/{part}.o"]
            for part, (unit, flag) in units.items()
        ]
        list(pool.map(lambda job: _run(job, log), jobs))
        objects = [f"{folder}/{part}.o" for part in units]
        _run([*command, "-shared", *objects, "-o", f"{folder}/library.so"], log)
        keep(Path(folder) / "library.so", path)


def _run(command: list[str], log: Path) -> None:
    """Run the compiler; if it fails, write its output to ``log``."""
    run = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS_TO_COMPILE)
    if run.returncode:
        text = f"{' '.join(command)}\n{_text(run.stderr)}"
        log.write_text(text, encoding="utf-8", errors="backslashreplace")
        raise Unavailable(f"{command[0]} failed; see {log}")


def compile_for_a_wheel(folder: Path) -> list[Path]:
    """Compile the library into ``folder`` for every instruction set of this architecture.

    The command is the same as in ``cached_library``, so the machine code is the same.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    paths = [
        folder / _shipped_name(name) for name in (INSTRUCTION_SETS if _x86() else ["baseline"])
    ]
    for path in paths:
        compile_library([*compiler(), *compiler_flags(path.name.partition("-")[0])], path)
        digest_path(path).unlink()  # the wheel has digests of its own
    return paths


def shipped_libraries() -> list[Path]:
    """Libraries shipped with the package and built from the current sources, the best first.

    Empty if ``ESPER_NATIVE_FLAGS`` is set, because shipped libraries lack these flags.
    """
    if os.environ.get(FLAGS_VARIABLE) or not SHIPPED.exists():
        return []
    candidates = [SHIPPED / _shipped_name(name) for name in instruction_sets()]
    return [path for path in candidates if path.exists()]


def _shipped_name(instructions: str) -> str:
    return f"{instructions}-{_digest([*FLAGS, *UNITS.values(), *_texts()])}.so"


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
    try:
        own_folder(folder)
    except UntrustedFolder as error:
        raise Unavailable(str(error)) from error
    except OSError as error:
        raise Unavailable(f"{folder} cannot be written; set {CACHE_VARIABLE}") from error
    sources = f"esper-{_sources_key(flags)}"
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
            compile_library([*command, *flags], path)
    return path


def instruction_sets() -> list[str]:
    """Names of the ``INSTRUCTION_SETS`` that this CPU supports, the best first."""
    features = cpu_features() if _x86() else frozenset()
    return [
        name for name, requirements in INSTRUCTION_SETS.items() if features.issuperset(requirements)
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


def _sources_key(flags: list[str]) -> str:
    """A digest of everything but the compiler that the compiled library depends on."""
    return _digest([*flags, *UNITS.values(), platform.machine(), *_texts()])


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
