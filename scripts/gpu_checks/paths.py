"""Where a checkout finds its modules and wheels without an installation."""

import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / name for name in ("scripts", "src", "benchmarks", "tests")]


def prepare(wheels: Path, place: Path) -> None:
    """Make the checkout and its wheels importable, here and in processes that are started.

    Args:
        wheels: folder with wheels for this Python; it need not exist.
        place: where they are unpacked.
    """
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(place)
    own = [str(folder) for folder in (*FOLDERS, place)]
    sys.path[:] = [*own, *(entry for entry in sys.path if entry not in own)]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, *([before] if before else [])])
