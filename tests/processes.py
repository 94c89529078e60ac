"""Commands in processes of their own, with the Esper of this repository."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ESPER = [sys.executable, "-m", "esper.scripts.main"]


def environment(**more: str) -> dict[str, str]:
    """The variables of such a process."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}


def ran(
    command: list[str], where: Path | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, in whatever way, with what it said."""
    return subprocess.run(
        command,
        cwd=where,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
