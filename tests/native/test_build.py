"""The native library: building, caching, shipping, checks of its layout, and the fallback."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper.native import build, library, structures
from esper.native.structures import LayoutError, check_layout, definitions
from support import needs_native

pytestmark = needs_native

F32 = torch.float32


# --- the cache --------------------------------------------------------------------------------


def test_compiled_library_is_found_again(tmp_path: Path, monkeypatch):
    original, compiled = Path(library.library()._name), []
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))

    def compile_library(command: list[str], path: Path) -> None:
        compiled.append(path)
        path.write_bytes(original.read_bytes())

    def found() -> str:
        library._found.cache_clear()
        return library.library()._name

    monkeypatch.setattr(build, "compile_library", compile_library)
    first = found()
    assert found() == first == str(compiled[0])
    monkeypatch.setenv(build.FLAGS_VARIABLE, "-DOTHER")
    second = found()
    assert second != first
    assert len(compiled) == 2
    # A damaged file in the cache is rebuilt.
    damaged = tmp_path / "esper-damaged.so"
    damaged.write_bytes(b"no library at all")
    monkeypatch.setattr(build, "_key", lambda command: "damaged")
    assert found() == str(damaged)
    assert compiled[2:] == [damaged]
    library._found.cache_clear()


# --- a library shipped with the package -------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as built by `make wheel`, on a machine without a compiler."""
    original = Path(library.library()._name)
    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(build.FLAGS_VARIABLE, raising=False)
    library._found.cache_clear()
    yield Path(shutil.copy(original, tmp_path / build._shipped_name("baseline")))
    library._found.cache_clear()


def test_shipped_library_is_used(shipped: Path, monkeypatch) -> None:
    assert library.library()._name == str(shipped)
    better = shutil.copy(shipped, shipped.parent / build._shipped_name("avx2"))
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2", "fma", "avx512f"}))
    library._found.cache_clear()
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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """Compiles the layout of modified sources, the only part of a library that is checked."""
    place = tmp_path_factory.mktemp("doctored")

    def doctored(part: str, before: str, after: str) -> ctypes.CDLL:
        source = place / str(len(list(place.iterdir())))
        shutil.copytree(structures.SOURCE, source)
        header = source / part / "calls.h"
        text = header.read_text()
        assert text.count(before) == 1
        header.write_text(text.replace(before, after))
        (source / "layout.cpp").write_text(structures.layout_source(source))
        command = [*build.compiler(), "-std=c++17", "-fPIC", "-shared", f"-I{source}"]
        built = source / "doctored.so"
        subprocess.run([*command, str(source / "layout.cpp"), "-o", str(built)], check=True)
        return ctypes.CDLL(str(built))

    return doctored


@pytest.mark.parametrize(
    ("part", "before", "after", "named"),
    [
        # An extra field, in the middle and at the end.
        ("hosts", "  T* buffers; ", "  T* buffers; int64_t extra; ", "TrainCall.extra is 64"),
        ("policy", "cell_after; ", "cell_after; int64_t extra; ", "PolicyCall.extra is"),
        # A missing field, swapped fields, another type, another value of an enumerator.
        ("step", "int64_t hold, up, down;", "int64_t hold, up;", "Modes.down is missing"),
        ("step", "int64_t hold, up, down;", "int64_t hold, down, up;", "Modes.up is 16"),
        (
            "step",
            "  float host_parameters, ",
            "  double host_parameters, ",
            "StepSpec.host_parameters is",
        ),
        ("hosts", "conv_light,\n  attention,", "attention,\n  conv_light,", "Kind.conv_light is 1"),
    ],
)
def test_library_with_another_layout_is_refused(compiled, part, before, after, named) -> None:
    check_layout(compiled(part, "#pragma once", "#pragma once\n"))
    with pytest.raises(LayoutError, match=named.replace(".", r"\.")):
        check_layout(compiled(part, before, after))


def test_call_needs_exactly_its_fields() -> None:
    calls = definitions("step")
    assert calls.Modes(hold=1, up=2, down=3).down == 3
    with pytest.raises(TypeError, match="Modes: missing or unknown: down"):
        calls.Modes(hold=1, up=2)
    with pytest.raises(TypeError, match="Modes: missing or unknown: sideways"):
        calls.Modes(hold=1, up=2, down=3, sideways=4)


@pytest.mark.parametrize("odd", ["std::vector<int> x;", "unsigned x;", "float x[3];"])
def test_unsupported_declaration_is_an_error(tmp_path: Path, odd: str) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "calls.h").write_text(f"struct Odd {{\n  int64_t rows;\n  {odd}\n}};\n")
    with pytest.raises(ValueError, match=r"calls\.h"):
        definitions("step", tmp_path)


# --- the fallback to torch --------------------------------------------------------------------


FALLBACK = """
import torch
from esper.kasmina.hosts.cnn import CnnHost
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.precision import Precision
for _ in range(2):
    host = CnnHost((3,), 4, (6, 6, 2))
    made = choose_backend("{name}", host, Precision("cpu"), torch.float32, torch.device("cpu"))
    print(type(made).__name__)
"""


@pytest.mark.parametrize("name", ["auto", "native"])
@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("no-such-compiler -m64", "there is no C++ compiler 'no-such-compiler'"),
        ("false", "false failed; see "),
        (__file__, "there is no C++ compiler"),
    ],
)
def test_without_a_compiler_torch_computes_and_logs_one_line(
    name: str, compiler: str, said: str, tmp_path: Path
):
    run = subprocess.run(
        [sys.executable, "-c", FALLBACK.format(name=name)],
        env=os.environ | {"CXX": compiler, build.CACHE_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["TorchBackend", "TorchBackend"]
    (line,) = run.stderr.splitlines()
    assert line.startswith("native backend: ")
    assert said in line
    assert line.endswith("; using torch")
    assert not list(tmp_path.glob("*.so"))


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
    oracles = [tests / "tolaria" / f"test_{what}_oracle.py" for what in ("training", "measure")]
    policy = tests / "tamiyo" / "policy" / "test_native_policy.py"
    files = [*oracles, policy, tests / "simic" / "growth" / "test_native_step.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "native"]
        + [str(path) for path in files]
        + ["--deselect", f"{files[0]}::test_seeds_of_slots_with_one_channel_or_pixel"],
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
