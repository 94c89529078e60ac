"""Compiles the library: on first use for this machine, or into a wheel for any."""

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

from esper.native.structures import SOURCE, layout_source

SHIPPED = Path(__file__).parent / "lib"
"""What ``make wheel`` compiled for those who install the wheel."""
CACHE_VARIABLE = "ESPER_CACHE_DIR"
FLAGS_VARIABLE = "ESPER_NATIVE_FLAGS"
"""Further compiler flags, such as ``-fsanitize=address``."""
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread")
UNITS = {
    "hosts": "-ffp-contract=fast",
    "policy": "-ffp-contract=fast",
    "step": "-ffp-contract=off",  # sums of products are rounded as torch rounds them
}
"""The parts of the library, the slowest to compile first, and how each rounds."""
INSTRUCTION_SETS = {
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma"),
    "avx2": ("avx2", "fma"),
    "baseline": (),
}
"""What a CPU must have for each, the best first; a compiler option has the name of each."""
_SECONDS_TO_COMPILE = 600


class Unavailable(Exception):
    """The native library cannot be had here; the message says why in one line."""


class NoCompiler(Unavailable):
    """There is no C++ compiler."""


def compiler() -> list[str]:
    """The command that compiles: ``CXX``, or g++.

    Raises:
        NoCompiler: it does not exist.
    """
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise NoCompiler(f"there is no C++ compiler {command[0]!r} (CXX names another)")
    return command


def compiler_flags(instructions: str) -> list[str]:
    """The flags for one of ``INSTRUCTION_SETS``, and those of ``ESPER_NATIVE_FLAGS``."""
    options = [f"-m{name}" for name in INSTRUCTION_SETS[instructions]]
    wide = ["-mprefer-vector-width=512"] if options else []
    return [*FLAGS, *options, *wide, *os.environ.get(FLAGS_VARIABLE, "").split()]


def compile_library(command: list[str], path: Path) -> None:
    """Compile the library to ``path``, which appears whole or not at all.

    Args:
        command: the compiler and the flags that all parts share.
        path: of the library.

    Raises:
        Unavailable: the compiler fails, or the place cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-")
    except OSError as error:
        raise Unavailable(f"{path.parent} cannot be written; set {CACHE_VARIABLE}") from error
    log = path.with_suffix(".log")
    with place as folder, ThreadPoolExecutor(2) as pool:
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
        os.replace(f"{folder}/library.so", path)


def _run(command: list[str], log: Path) -> None:
    """Run the compiler; where it fails its words go to ``log``."""
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_SECONDS_TO_COMPILE
    )
    if run.returncode:
        log.write_text(f"{' '.join(command)}\n{run.stderr}")
        raise Unavailable(f"{command[0]} failed; see {log}")


def compile_for_a_wheel(place: Path) -> list[Path]:
    """Compile the library for every instruction set of this kind of processor.

    The command is that of ``cached_library``, so the machine code is the same.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    made = [place / _shipped_name(name) for name in (INSTRUCTION_SETS if _x86() else ["baseline"])]
    for path in made:
        compile_library([*compiler(), *compiler_flags(path.name.partition("-")[0])], path)
    return made


def shipped_libraries() -> list[Path]:
    """Those that came with the package, made of the very sources here, the best for this CPU first.

    ``ESPER_NATIVE_FLAGS`` asks for another.
    """
    if os.environ.get(FLAGS_VARIABLE) or not SHIPPED.exists():
        return []
    known = [SHIPPED / _shipped_name(name) for name in instruction_sets()]
    return [path for path in known if path.exists()]


def _shipped_name(instructions: str) -> str:
    return f"{instructions}-{_digest([*FLAGS, *UNITS.values(), *_texts()])}.so"


def cached_library() -> Path:
    """The library for this CPU, compiled if the cache has none of these sources and this compiler.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    instructions = instruction_sets()[0]
    command = [*compiler(), *compiler_flags(instructions)]
    path = cache_directory() / f"esper-{_key(command)}.so"
    if not path.exists():
        logging.getLogger(__name__).info("native backend: compiling, once for this machine")
        compile_library(command, path)
    return path


def cache_directory() -> Path:
    """Where libraries are kept: ``ESPER_CACHE_DIR``, or the user's cache."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).resolve() / "esper"


def instruction_sets() -> list[str]:
    """Those of ``INSTRUCTION_SETS`` that this CPU says it has, the best first."""
    known = cpu_features() if _x86() else frozenset()
    return [name for name, needed in INSTRUCTION_SETS.items() if known.issuperset(needed)]


def _x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


@cache
def cpu_features() -> frozenset[str]:
    """Names of the instruction sets of this CPU, as Linux lists them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _key(command: list[str]) -> str:
    """A digest of all that the compiled library depends on."""
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    return _digest([*command, *UNITS.values(), version.stdout, platform.machine(), *_texts()])


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _texts() -> Iterator[str]:
    """The sources, and where each lies."""
    yield layout_source()
    for path in sorted(path for path in SOURCE.rglob("*") if path.is_file()):
        yield str(path.relative_to(SOURCE))
        yield path.read_text()
