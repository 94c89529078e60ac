"""Settings of the whole suite. Its presence also puts this folder on the import path."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# On some processors (AMD's) MKL picks its routine by how many matrices there are and where they
# lie. Tests that compare bits with the torch backend compare Esper's sums, not MKL's choice; it
# reads this when torch is imported.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

# Esper looks for its laboratory when the tasks are imported.
import laboratory_entry  # noqa: F401

# isort: split

import torch

from esper.runtime.tasks import FAMILIES, SUITES, TASKS
from examples import load_profile
from scripts.pseudo_terminal import OnTerminal

# Collection makes some million objects, and drops few.
gc.disable()
torch.set_num_threads(1)
load_profile()
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as long as no kernel has been imported


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, leave out modules without such tests: their imports may be missing there."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return None if "mark.gpu" in text or "cuda: str" in text else True


def pytest_collection_finish() -> None:
    """Leave what was imported and collected, some million objects, out of garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)


def pytest_unconfigure() -> None:
    """Let it go at the end, as bindings report what is still alive."""
    gc.unfreeze()


REAL = pytest.param(
    "real",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.fixture(params=[REAL, pytest.param("virtual", marks=pytest.mark.slow)])
def cuda(request: pytest.FixtureRequest) -> Iterator[str]:
    """A CUDA device, and which kind; a test annotates it with ``cuda: str``."""
    if request.param == "real":
        yield "real"
        return
    from virtual_device import virtual_device  # imports torch's compiler, which takes a while

    with virtual_device() as machine:
        yield "virtual"
    assert machine.faults == []


@pytest.fixture
def scripts_on_path(monkeypatch) -> None:
    """As where a program in ``scripts`` or ``benchmarks`` is started."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("scripts", "benchmarks"):
        monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / folder))


@pytest.fixture
def scratch_register() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = [(register, dict(register)) for register in (TASKS, SUITES, FAMILIES)]
    yield
    for register, content in before:
        register.clear()
        register.update(content)


@pytest.fixture
def terminal() -> Iterator[Callable[..., OnTerminal]]:
    """Starts commands on terminals; they are ended after the test."""
    with ExitStack() as after:

        def opened(*arguments: str, **settings: list[str]) -> OnTerminal:
            one = OnTerminal(*arguments, **settings)
            after.callback(one.close)
            return one

        yield opened
