"""Find the folders that ``esper grow --model`` writes, and tell their state."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from esper.karn.runs import RunInfo, disk_usage, is_running, round_count
from esper.leyline.disk import read_sealed_json
from esper.leyline.errors import UsageError

SETTINGS, PROGRESS, LOCK = "settings.json", "progress.pt", "lock"
"""What was asked for, where growth stands until it has ended, and the lock of its only writer."""
RESULT = "result.json"


def is_grown(path: Path) -> bool:
    """Whether ``path`` is a folder of ``esper grow --model``."""
    try:
        contents = any((path / name).exists() for name in (PROGRESS, RESULT, LOCK))
        return contents and (path / SETTINGS).is_file()
    except OSError:
        return False  # not to be read by this user


def inspect_grown(folder: Path) -> RunInfo:
    """The state of a folder: what was asked for, and the gain on test or else on validation."""
    settings, result = (_content(folder / name) for name in (SETTINGS, RESULT))
    status = "running" if is_running(folder) else "finished" if result else "unknown"
    if status == "unknown" and (folder / PROGRESS).exists():
        status = "interrupted"
    gains = {split: _gain(result, split) for split in ("test", "validation")}
    history = result.get("grown", {}).get("history", []) if result else []
    times = []
    for name in (SETTINGS, PROGRESS, RESULT):
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    model, policy = settings.get("model"), settings.get("policy")
    return RunInfo(
        path=folder,
        status=status,
        policy=policy if isinstance(policy, str) else None,
        tasks=[model] if isinstance(model, str) else [],
        rounds_done=len(history) if isinstance(history, list) else 0,
        rounds_total=round_count(settings.get("epochs")),
        gain=gains["test"],
        validation_gain=gains["validation"],
        started=min(times, default=None),
        last_activity=max(times, default=None),
        bytes=disk_usage(folder),
        # The same command goes on; its flags are not all in the settings.
        resume=None,
    )


def _content(path: Path) -> dict[str, Any]:
    """The content of a sealed file; empty if it is missing or damaged."""
    try:
        return read_sealed_json(path)
    except (OSError, ValueError, UsageError):
        return {}


def _gain(result: dict[str, Any], split: str) -> float | None:
    """The figure of the grown network minus its twin's in points, if it is a share; else None."""
    try:
        pair = [result[name][split] for name in ("grown", "twin")]
        keys = [{"accuracy": "accuracy", "R²": "score"}[one["unit"]] for one in pair]
        one, two = (float(each[key]) for each, key in zip(pair, keys, strict=True))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return 100.0 * (one - two)
