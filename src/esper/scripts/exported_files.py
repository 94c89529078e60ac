"""The files of ``--out`` and ``--onnx``: checked before the work, written after it."""

from collections.abc import Mapping
from pathlib import Path

from esper.leyline.disk import replace_synced
from esper.leyline.errors import UsageError
from esper.leyline.extras import require
from esper.scripts.grow import check_writable


def check_exports(out: Path | None, onnx: Path | None) -> None:
    """Check before the work what would otherwise fail after it.

    Raises:
        UsageError: a file cannot be written, or a library is missing.
    """
    for name, path, suffix in (("out", out, ".pt2"), ("onnx", onnx, ".onnx")):
        if path is not None:
            check_writable(name, path, suffix)
    if onnx is not None:
        require("onnx", "onnx")


def write_exports(contents: Mapping[str, tuple[Path, bytes]]) -> None:
    """Write files, each with its content, by the settings that give them, and say so.

    Raises:
        UsageError: one cannot be written.
    """
    for name, (path, content) in contents.items():
        try:
            replace_synced(path, content)
        except OSError as error:
            raise UsageError(f"{name}: cannot write {path} ({error.strerror})") from error
        print(f"wrote {path} ({len(content) / 1000:.0f} kB)")
