"""The report: one self-contained HTML file about one or more runs, without scripts."""

from collections.abc import Sequence
from pathlib import Path

from esper.leyline.extras import require


def write_report(runs: Sequence[Path], target: Path) -> Path:
    """Write one HTML file about one or more runs, live or ended; return its path.

    Each run has a colour and a line style. The same runs give the same file.

    Args:
        runs: run directories.
        target: the file to write.

    Raises:
        UsageError: a run has no events yet, a run is named twice, ``target`` is a directory or its
            directory does not exist, or the libraries of the extra ``report`` are missing.
        OSError: ``target`` cannot be written.
    """
    require("report", "report")
    # Imported here, so that training needs no library that draws.
    from esper.karn.report.page import write_page

    return write_page(runs, target)


__all__ = ["write_report"]
