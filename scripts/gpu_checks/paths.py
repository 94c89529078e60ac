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
        wheels: folder with wheels, of which those for another Python are left; it need not exist.
        place: where they are unpacked.
    """
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(wheels.glob("*.whl")):
        python, abi = wheel.stem.split("-")[-3:-1]
        if own not in python and abi not in ("none", "abi3"):
            continue
        with zipfile.ZipFile(wheel) as content:
            content.extractall(place)
    entries = [str(folder) for folder in (*FOLDERS, place)]
    sys.path[:] = [*entries, *(entry for entry in sys.path if entry not in entries)]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*entries, *([before] if before else [])])
