"""What growing a module imports, and in how many files its functions lie."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "import_closure.py"))
MOST_LINES, MOST_FILES = 8_000, 30


def test_growing_imports_little_and_stays_in_few_files() -> None:
    modules, late = SCRIPT["closure"](SCRIPT["START"])
    assert {"esper.own_models.growing", "esper.kasmina.slots"} <= modules
    assert {"esper.own_models.lifecycle_controller", "esper.own_models.width_search"} <= late
    assert not any(name.startswith("esper.simic") for name in modules | late)
    assert SCRIPT["lines"](SCRIPT["files_of"](modules)) <= MOST_LINES
    loaded, called = SCRIPT["grown"]()
    assert SCRIPT["files_of"](modules) <= loaded
    assert SCRIPT["lines"](loaded) <= MOST_LINES
    assert 10 < len(called) <= MOST_FILES
