"""Imports go only downward."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import esper

ROOT = Path(esper.__file__).parent
LABORATORY = ROOT.parent / "esper_lab"
TESTS = Path(__file__).parent
LAYERS = (
    *("leyline", "native", "kasmina", "runtime", "tolaria", "tamiyo"),
    *("own_models", "simic", "scripts"),
)
ALLOWED = {
    **{layer: set(LAYERS[: i + 1]) for i, layer in enumerate(LAYERS)},
    "nissa": {"leyline", "nissa"},
    "karn": {"leyline", "karn"},
}
FACE = {"kasmina", "leyline", "own_models", "simic"}
"""What ``esper/__init__.py`` may offer under the name of the package; it imports it late."""
ALLOWED["simic"] |= {"nissa"}
ALLOWED["own_models"] |= {"nissa"}
ALLOWED["scripts"] |= {"nissa", "karn"}
MODULES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The packages directly under ``esper`` that a module imports, in whatever way."""
    here = ("esper", *path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "esper" and len(parts) > 1:
                found.add(parts[1])
    return found


def test_there_are_modules_and_no_package_the_order_does_not_know() -> None:
    assert len(MODULES) > 30
    assert {p.relative_to(ROOT).parts[0] for p in MODULES if p.parent != ROOT} <= set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_lies_below(path) -> None:
    parts = path.relative_to(ROOT).parts
    layer = parts[0] if len(parts) > 1 else None
    known = imported(path) & set(ALLOWED)
    allowed = FACE if path == ROOT / "__init__.py" else ALLOWED[layer] if layer else set()
    assert known <= allowed, sorted(known)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_of_esper_names_the_laboratory_s_package(path) -> None:
    assert "esper_lab" not in path.read_text()


LIBRARIES = {"matplotlib", "mnist1d", "msgspec", "numpy", "rich", "scipy", "sklearn", "torch"}


@pytest.mark.parametrize("path", sorted(LABORATORY.rglob("*.py")), ids=lambda path: path.name)
def test_the_laboratory_imports_esper_and_nothing_else_of_the_repository(path) -> None:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            modules.add(node.module)
    tops = {name.partition(".")[0] for name in modules}
    allowed = {"esper", "esper_lab", *sys.stdlib_module_names, *LIBRARIES}
    assert tops <= allowed, sorted(tops - allowed)


def test_importing_the_package_is_light() -> None:
    code = "import sys, esper\nprint('torch' in sys.modules, len(esper.__all__), dir(esper))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False")
    assert all(getattr(esper, name) is not None for name in esper.__all__)


def test_imports_are_found_in_every_spelling(tmp_path, monkeypatch) -> None:
    lines = [
        "import esper.kasmina.rng", "from esper.tolaria import engine",
        "from esper import karn as reader", "from ..nissa import hub",
        "from ...simic.ppo import PPOAgent", "def late():", "    from .. import tamiyo",
        "import torch, essay.scripts",
    ]  # fmt: skip
    source = "\n".join(lines)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    deep, shallow = tmp_path / "a" / "b" / "deep.py", tmp_path / "a" / "shallow.py"
    deep.parent.mkdir(parents=True)
    deep.write_text(source)
    shallow.write_text(source.replace("...", ".."))
    assert imported(deep) == {"kasmina", "tolaria", "karn", "simic", "a"}
    assert imported(shallow) == {"kasmina", "tolaria", "karn", "nissa", "simic", "tamiyo"}


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in MODULES}),
    ids=lambda folder: str(folder.relative_to(ROOT)),
)
def test_every_package_says_what_it_is_for(folder) -> None:
    start = folder / "__init__.py"
    assert start.exists()
    assert ast.get_docstring(ast.parse(start.read_text()))


ROOMS = {
    "learner": {"learner"},
    "algorithms": {"learner", "impala", "distributed", "training", "algorithms"},
    "graphs": {"learner", "graphs"}, "impala": {"learner", "impala"},
    "distributed": {"learner", "distributed"}, "growth": {"learner", "graphs", "impala", "growth"},
    "gym": {"learner", "graphs", "impala", "gym"}, "run": {"learner", "run"},
    "records": {"learner", "run", "records"},
    "training": {
        *("learner", "impala", "distributed", "growth", "gym"), *("run", "records", "training")
    },
    "offline": {"learner", "impala", "growth", "run", "records", "training", "offline"},
    "tools": {"learner", "growth", "gym", "run", "training", "tools"},
}  # fmt: skip
"""The rooms of ``simic``, and which of them each may import; ``learner`` is the folder itself."""


def rooms_imported(path: Path) -> set[str]:
    """The rooms of ``simic`` that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("esper.simic"):
            for alias in node.names:
                room = f"{node.module}.{alias.name}".split(".")[2]
                found.add(room if room in ROOMS else "learner")
    return found


def room_of(path: Path) -> str:
    """The room of ``simic`` in which a module lies."""
    parts = path.relative_to(ROOT / "simic").parts
    return parts[0] if len(parts) > 1 else "learner"


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if "simic" in path.parts],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_room_of_simic_imports_only_the_rooms_it_may(path) -> None:
    assert rooms_imported(path) <= ROOMS[room_of(path)]


def test_every_room_of_simic_is_known() -> None:
    assert {room_of(path) for path in MODULES if "simic" in path.parts} == set(ROOMS)


TRAINER = "trainer.py"
"""The trainer of offline learning stands beside the learner, where the user's document names it."""


def test_the_learner_stays_small() -> None:
    learner = [path for path in (ROOT / "simic").glob("*.py") if path.name != TRAINER]
    assert sum(len(path.read_text().splitlines()) for path in learner) < 2_000
    assert len((ROOT / "simic" / TRAINER).read_text().splitlines()) < 300


SHARED_NAMES = {
    "ppo": "PPO: its learner, and how it is registered",
    "agent": "makes the learner, of growth and of Gymnasium",
    "collect": "collects a rollout, of growth and of Gymnasium",
    "mlp": "the fully connected family: its host and its blueprints",
}
"""Base names that stand for the same thing in two rooms."""


def test_no_two_modules_share_a_base_name_for_different_things() -> None:
    commands = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    stems: dict[str, list[Path]] = {}
    for path in MODULES:
        # A module of ``scripts`` is the command of the thing whose name it has.
        if path.stem != "__init__" and path.parent.name != "scripts":
            stems.setdefault(path.stem, []).append(path)
    shared = {stem for stem, paths in stems.items() if len(paths) > 1}
    assert shared <= set(SHARED_NAMES), sorted(shared - set(SHARED_NAMES))
    assert commands & set(stems) <= {"grow", "play", "policies", "replay", "runs", "tasks"}


def test_the_learner_does_not_know_the_growth_environment() -> None:
    code = (
        "import sys, esper.simic.ppo\n"
        "print([name for name in sys.modules if name.startswith('esper.simic.growth')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_quick_tests_exist_and_touch_every_package() -> None:
    makefile = (TESTS.parent / "Makefile").read_text().replace("\\\n", " ")
    (line,) = [line for line in makefile.splitlines() if line.startswith("QUICK := ")]
    quick = line.removeprefix("QUICK := ").split()
    assert [name for name in quick if not (TESTS / name).exists()] == []
    packages = {path.parent.relative_to(ROOT) for path in MODULES if path.parent != ROOT}
    outermost = {str(path) for path in packages if len(path.parts) == 1}
    rooms = {f"simic/{room}" for room in ROOMS} - {"simic/learner"}
    untouched = {
        package
        for package in outermost | rooms
        if not any(name.startswith(package) for name in quick)
    }
    # What is compiled for all packages, and what a command alone calls, is tested by what calls it.
    assert untouched <= {"native", "simic/tools"}
