"""The native library: building, caching, shipping, checks of its layout, and the fallback."""

import hashlib
import logging
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from esper.kasmina.hosts.cnn import CnnHost
from esper.native import build, library, structures
from esper.native.build import COMPILING, digest_path, is_intact
from esper.native.structures import definitions
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.precision import Precision
from support import needs_native

pytestmark = needs_native

F32 = torch.float32


# --- the cache --------------------------------------------------------------------------------


COMPILER = """#!/bin/bash
# Stands for a compiler: what it links is a library that was compiled before.
echo "$*" >> {log}
[ "$1" = --version ] && {{ printf '\\xff 1.0\\n'; exit; }}
while [ "$1" != -o ]; do shift; done
cp {library} "$2"
"""


@dataclass(frozen=True)
class Cache:
    """A cache of its own, with a compiler that takes no time."""

    folder: Path
    log: Path

    @property
    def links(self) -> int:
        """How often a library was compiled."""
        return self.log.read_text().count("-shared") if self.log.exists() else 0

    def library(self) -> Path:
        (path,) = self.folder.glob("*.so")
        return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    original = library.library()._name
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=log, library=original))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    library._library_or_reason.cache_clear()
    yield Cache(tmp_path / "cache", log)
    library._library_or_reason.cache_clear()


def found() -> str:
    library._library_or_reason.cache_clear()
    return library.library()._name


def test_compiled_library_is_found_again(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = found()
    assert found() == first == str(cache.library())
    assert cache.links == 1
    monkeypatch.setenv(build.FLAGS_VARIABLE, "-DOTHER")
    assert found() != first
    assert cache.links == 2
    assert sorted(p.suffix for p in cache.folder.iterdir()) == ["", *[".sha256"] * 2, *[".so"] * 2]


def test_200_cuts_and_flips_are_noticed_before_anything_is_executed(cache: Cache) -> None:
    path = build.cached_library()
    whole, digest = path.read_bytes(), digest_path(path).read_bytes()
    draws = random.Random(5)
    for number in range(200):
        target, content = ((path, whole), (digest_path(path), digest))[number % 4 == 3]
        place = draws.randrange(len(content))
        damaged = bytearray(content)
        if number % 2:
            del damaged[place:]
        else:
            damaged[place] ^= 1 << draws.randrange(8)
        target.write_bytes(damaged)
        assert not is_intact(path), (target, number, place)
        target.write_bytes(content)
    assert is_intact(path)


@pytest.mark.parametrize("part", ["library", "digest"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "a folder's link", "a pipe"])
def test_a_damaged_library_is_compiled_again(cache: Cache, part: str, damage: str) -> None:
    path = Path(found())
    target = path if part == "library" else digest_path(path)
    content = target.read_bytes()
    target.unlink()
    if damage in ("cut", "empty"):
        target.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    elif damage == "a pipe":
        os.mkfifo(target)
    elif damage == "a folder's link":
        elsewhere = cache.folder.parent / "elsewhere"
        elsewhere.write_bytes(content)
        target.symlink_to(elsewhere)
    assert found() == str(path)
    assert cache.links == 2
    assert is_intact(path)


def test_a_library_that_does_not_load_is_compiled_again(cache: Cache) -> None:
    path = build.cached_library()  # not loaded: the system would find it by its name
    path.write_bytes(b"whole, but of another system")
    digest_path(path).write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    assert is_intact(path)
    assert found() == str(path)
    assert cache.links == 2


def test_without_a_compiler_a_full_cache_is_used(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = found()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert found() == path
    digest_path(Path(path)).write_bytes(b"")
    with pytest.raises(build.NoCompiler):
        found()


def test_two_processes_compile_it_once(cache: Cache) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: build.cached_library(), range(2)))
    assert paths == [cache.library()] * 2
    assert cache.links == 1


def test_what_a_killed_compiler_left_is_removed(cache: Cache) -> None:
    (cache.folder / f"{COMPILING}1").mkdir(parents=True)
    found()
    assert not list(cache.folder.glob(f"{COMPILING}*"))


def test_a_library_is_on_the_disk_before_it_gets_its_name(cache: Cache, monkeypatch) -> None:
    done: list[str] = []
    sync, move = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("sync"), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("move"), move(a, b)))
    build.cached_library()
    assert done == ["sync", "move", "sync", "move", "sync"]


def test_files_of_root_are_trusted_and_nothing_stays_open(cache: Cache, monkeypatch) -> None:
    descriptors = len(os.listdir("/dev/fd"))
    path = Path(found())
    (cache.folder / "draft").mkdir()
    build.keep(Path(shutil.copy(path, cache.folder / "draft" / "library.so")), path)
    assert len(os.listdir("/dev/fd")) == descriptors
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert build._trusted_users() == (4711, 0)


def test_the_log_of_a_compiler_that_fails_says_what_it_said(cache: Cache, monkeypatch) -> None:
    compiler = cache.folder.parent / "fails"
    compiler.write_text('#!/bin/bash\necho "no such thing: $*" >&2; [ "$1" = --version ]\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.Unavailable, match=r"fails failed; see .*\.log"):
        build.cached_library()
    (log,) = cache.folder.glob("*.log")
    command, said = log.read_text().splitlines()[:2]
    assert command.startswith(f"{compiler} ")
    assert said == f"no such thing: {command.partition(' ')[2]}"


def test_another_version_of_a_compiler_compiles_anew(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    keys = []
    for version in (1, 1, 2):
        compiler.write_text(f"#!/bin/bash\necho {version}.0\n")
        compiler.chmod(0o755)
        keys.append(build._compiler_key([str(compiler)]))
    assert keys[0] == keys[1] != keys[2]
    assert build._compiler_key([str(compiler), "-O1"]) != keys[2]


def test_a_wheel_has_a_library_for_every_instruction_set(cache: Cache, tmp_path: Path) -> None:
    folder = tmp_path / "wheel"
    folder.mkdir()
    paths = build.compile_for_a_wheel(folder)
    assert sorted(folder.iterdir()) == sorted(paths)
    assert len(paths) == cache.links == (len(build.INSTRUCTION_SETS) if build._x86() else 1)
    commands = [line for line in cache.log.read_text().splitlines() if " -c " in line]
    assert len(commands) == 3 * len(paths)
    parts = "library.cpp", "-DESPER_DOUBLE", "layout.cpp"
    assert all(name in "".join(commands) for name in parts)


def test_a_native_object_is_freed_when_nobody_refers_to_it(monkeypatch) -> None:
    freed = []
    monkeypatch.setattr(library, "function", lambda *_: freed.append)
    handle = library.Handle("hosts_free_f32")
    handle.address = library.c_void_p(17)
    handle.free()
    handle.free()
    assert [address.value for address in freed] == [17]
    handle.address = library.c_void_p(18)
    del handle
    assert [address.value for address in freed] == [17, 18]
    assert library.available() is True


def test_a_library_of_somebody_else_is_not_executed(cache: Cache, monkeypatch) -> None:
    """The owner is compared with this process's user, which a test can pretend to change."""
    path = Path(found())
    monkeypatch.setattr(build, "_trusted_users", lambda: (os.geteuid() + 1,))
    assert not is_intact(path)
    with pytest.raises(build.Unavailable, match="belongs to another user"):
        build.cached_library()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
@pytest.mark.parametrize("what", ["library", "digest", "folder"])
def test_a_file_or_folder_given_away_is_not_executed(cache: Cache, what: str) -> None:
    path = Path(found())
    os.chown({"library": path, "digest": digest_path(path), "folder": path.parent}[what], 4711, -1)
    if what == "folder":
        with pytest.raises(build.Unavailable, match="belongs to another user"):
            found()
        assert cache.links == 1
    else:
        assert found() == str(path)
        assert cache.links == 2
        assert path.stat().st_uid == os.geteuid()


def test_others_cannot_exchange_a_library(cache: Cache) -> None:
    path = Path(found())
    cache.folder.chmod(0o777)
    path.chmod(0o777)
    assert found() == str(path)
    assert cache.links == 2
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o755
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


# --- a library shipped with the package -------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as built by `make wheel`, on a machine without a compiler."""
    original = Path(library.library()._name)
    monkeypatch.setattr(build, "SHIPPED_LIBRARIES", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(build.FLAGS_VARIABLE, raising=False)
    library._library_or_reason.cache_clear()
    yield Path(shutil.copy(original, tmp_path / build._shipped_name("baseline")))
    library._library_or_reason.cache_clear()


def test_shipped_library_is_used(shipped: Path, monkeypatch) -> None:
    assert library.library()._name == str(shipped)
    better = shutil.copy(shipped, shipped.parent / build._shipped_name("avx2"))
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2", "fma", "avx512f"}))
    library._library_or_reason.cache_clear()
    assert library.library()._name == str(better if build._x86() else shipped)
    monkeypatch.setenv(build.FLAGS_VARIABLE, "-DOTHER")
    assert build.shipped_libraries() == []


def test_shipped_library_of_other_sources_is_not_used(shipped: Path, monkeypatch) -> None:
    monkeypatch.setattr(build, "_texts", lambda: ["changed"])
    with pytest.raises(build.NoCompiler):
        library.library()


def test_shipped_library_that_cannot_be_loaded_is_named(shipped: Path, caplog) -> None:
    shipped.write_bytes(b"no library at all")
    with pytest.raises(build.NoCompiler):
        library.library()
    assert shipped.name in caplog.text
    assert shipped.exists()


# --- the same structures in C++ and Python ----------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        # An extra field, in the middle and at the end.
        ("  T* buffers; ", "  T* buffers; int64_t extra; ", "TrainCall.seed"),
        ("variant_scores; ", "variant_scores; int64_t extra; ", "the size of EvaluateCall"),
        # A missing field, swapped fields, another type, another value of an enumerator.
        ("int32_t steps, slots, blocks;", "int32_t steps, slots;", "no member named 'blocks'"),
        ("int32_t steps, slots, blocks;", "int32_t slots, steps, blocks;", "HostSpec.steps"),
        ("int64_t rows, images, ", "int32_t rows, images, ", "EvaluateCall.images"),
        ("conv_light,\n  attention,", "attention,\n  conv_light,", "Kind.conv_light"),
        # The layout that Python reads.
        ("#pragma once", "#pragma once\n", ""),
    ],
)
def test_a_library_with_another_layout_is_not_built(
    tmp_path: Path, before: str, after: str, named: str
) -> None:
    shutil.copytree(structures.SOURCE, tmp_path / "src")
    header = tmp_path / "src" / "hosts" / "calls.h"
    text = header.read_text()
    assert text.count(before) == 1
    header.write_text(text.replace(before, after))
    source = tmp_path / "layout.cpp"
    source.write_text(structures.layout_source())
    options = ["-std=c++17", "-fsyntax-only", f"-I{tmp_path / 'src'}", str(source)]
    command = [*build.compiler(), *options]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    assert bool(run.returncode) == bool(named)
    assert named in run.stderr


def defined(text: str, folder: Path) -> structures.Definitions:
    """What a ``calls.h`` with this text defines."""
    (folder / "hosts").mkdir()
    (folder / "hosts" / "calls.h").write_text(text)
    return definitions(folder)


def test_call_needs_exactly_its_fields(tmp_path: Path) -> None:
    calls = defined("struct Modes {\n  int64_t hold, up, down;\n};\n", tmp_path)
    assert calls.Modes(hold=1, up=2, down=3).down == 3
    with pytest.raises(TypeError, match="Modes: missing or unknown: down"):
        calls.Modes(hold=1, up=2)
    with pytest.raises(TypeError, match="Modes: missing or unknown: sideways"):
        calls.Modes(hold=1, up=2, down=3, sideways=4)


@pytest.mark.parametrize("odd", ["std::vector<int> x;", "unsigned x;", "float x[3];"])
def test_unsupported_declaration_is_an_error(tmp_path: Path, odd: str) -> None:
    with pytest.raises(ValueError, match=r"calls\.h"):
        defined(f"struct Odd {{\n  int64_t rows;\n  {odd}\n}};\n", tmp_path)


# --- the fallback to torch --------------------------------------------------------------------


FALLBACK = """
import torch
from esper.kasmina.hosts.cnn import CnnHost
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.precision import Precision
for _ in range(2):
    host = CnnHost((3,), 4, (6, 6, 2))
    made = choose_backend("native", host, Precision("cpu"), torch.float32, torch.device("cpu"))
    print(type(made).__name__)
"""


ODD = "#!/bin/bash\nprintf '\\xff\\xfe\\n'; printf '\\xff\\xfe\\n' >&2; [ $1 = --version ]\n"
"""A compiler that prints what is not UTF-8, and fails."""
EMPTY = """#!/bin/bash
while [ $# -gt 0 ] && [ "$1" != -o ]; do shift; done
[ $# = 0 ] || echo | g++ -shared -x c++ - -o "$2"
"""
"""A compiler that makes libraries without functions."""


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("no-such-compiler -m64", "there is no C++ compiler 'no-such-compiler'"),
        ('g++ "', "CXX is not a command (No closing quotation)"),
        ("{odd}", "failed; see "),
        ("{empty}", "lacks a function"),
        ("false", "false failed; see "),
        (__file__, "there is no C++ compiler"),
    ],
)
def test_without_a_compiler_torch_computes_and_logs_one_line(
    compiler: str, said: str, tmp_path: Path, monkeypatch, caplog
):
    for script, text in (("odd", ODD), ("empty", EMPTY)):
        (tmp_path / script).write_text(text)
        (tmp_path / script).chmod(0o755)
    compiler = compiler.replace("{", f"{tmp_path}/").replace("}", "")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    caches = library._library_or_reason, library.fall_back
    for remembered in caches:
        remembered.cache_clear()
    try:
        made = [
            choose_backend("native", host, Precision("cpu"), F32, torch.device("cpu"))
            for host in [CnnHost((3,), 4, (6, 6, 2))] * 2
        ]
    finally:
        for remembered in caches:
            remembered.cache_clear()
    assert [type(backend) for backend in made] == [TorchBackend] * 2
    # Another test may have set the level at which the start of a compilation is logged.
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.startswith("native backend: ")
    assert said in line
    assert line.endswith("; using torch")
    if compiler != str(tmp_path / "empty"):
        assert not list(tmp_path.glob("*.so"))


def test_a_process_without_a_compiler_prints_one_line(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-c", FALLBACK],
        env=os.environ | {"CXX": "no-such-compiler", build.CACHE_VARIABLE: str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.split() == ["TorchBackend", "TorchBackend"]
    (line,) = run.stderr.splitlines()
    assert line.startswith("native backend: there is no C++ compiler 'no-such-compiler'")
    assert line.endswith("; using torch")


# --- sanitisers -------------------------------------------------------------------------------


@pytest.mark.slow
def test_library_is_clean_under_sanitisers(tmp_path: Path):
    """Runs the oracle tests with address and undefined-behaviour sanitisers."""
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(path).is_absolute() for path in runtimes):
        pytest.skip("this g++ comes without sanitisers")
    tests = Path(__file__).parents[1]
    flags = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
    names = ("training_oracle", "measure_oracle", "transformer")
    oracles = [tests / "tolaria" / f"test_{name}.py" for name in names]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "native"]
        + [str(path) for path in oracles]
        + ["--deselect", f"{oracles[0]}::test_seeds_of_slots_with_one_channel_or_pixel"],
        env=os.environ
        | {
            build.FLAGS_VARIABLE: flags,
            build.CACHE_VARIABLE: str(tmp_path),
            "LD_PRELOAD": " ".join(runtimes),
            # Python itself does not free all memory.
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4_000:]
    assert list(tmp_path.glob("*.so"))
    assert "passed" in run.stdout
    assert "skipped" not in run.stdout


def test_wide_registers_are_preferred_where_the_processor_has_some(monkeypatch) -> None:
    monkeypatch.setenv("ESPER_NATIVE_FLAGS", "-g -O1")
    flags = {name: build.compiler_flags(name) for name in build.INSTRUCTION_SETS}
    assert {"-mavx2", "-mfma", "-mprefer-vector-width=512"} <= set(flags["avx2"])
    assert not [flag for flag in flags["baseline"] if flag.startswith("-m")]
    assert all(each[-2:] == ["-g", "-O1"] for each in flags.values())


@pytest.mark.parametrize(
    ("machine", "features", "names"),
    [
        ("x86_64", {"avx2", "fma", "sse2"}, ["avx2", "baseline"]),
        ("AMD64", set(build.INSTRUCTION_SETS["avx512"]), ["avx512", "avx2", "baseline"]),
        ("x86_64", {"fma"}, ["baseline"]),
        ("aarch64", {"avx2", "fma"}, ["baseline"]),
    ],
)
def test_instruction_sets_are_those_of_the_processor(machine, features, names, monkeypatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset(features))
    assert build.instruction_sets() == names


def test_a_system_that_does_not_list_features_has_none(monkeypatch) -> None:
    def missing(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert build.cpu_features.__wrapped__() == frozenset()


def test_why_there_is_no_library_is_logged_in_one_line(monkeypatch, caplog) -> None:
    def fails() -> None:
        raise library.Unavailable("the moon is full")

    monkeypatch.setattr(library, "library", fails)
    assert not library.available()
    assert not library.available()
    assert caplog.messages == ["native backend: the moon is full; using torch"]
