"""The laboratory's entry points where Esper is not installed, or was before there were any."""

import importlib
import os
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
GROUP = "esper.laboratory"


def offer_laboratory() -> TemporaryDirectory[str] | None:
    """Offer the entry points of the project to this process and to those that it starts.

    Returns:
        the folder of their metadata, to be kept as long as they are needed; None where they are
        installed.
    """
    parts = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    if {entry.name for entry in entry_points(group=GROUP)} == set(parts):
        return None
    folder = TemporaryDirectory(prefix="esper-laboratory-")
    # Another name than that of the distribution, whose own metadata would hide this.
    metadata = Path(folder.name) / "esper_laboratory_of_tests-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: esper-laboratory-of-tests\nVersion: 0\n")
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in parts.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    sys.path.append(folder.name)
    paths = [os.environ.get("PYTHONPATH"), folder.name]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    importlib.invalidate_caches()
    return folder


FOLDER = offer_laboratory()
