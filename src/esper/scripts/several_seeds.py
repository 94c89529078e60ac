"""``esper train ... --seeds K``: one run for each of K seeds in one directory, and what they share.

Each is an ordinary run, ``seed-<number>``. The same command with the same name goes on where it was
stopped: a finished run is not repeated, an interrupted one is resumed.
"""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from esper.karn.final_figures import GROWTH, GYM, final_figures
from esper.karn.intervals import interval
from esper.karn.runs import inspect, is_run, remove
from esper.leyline.config import TrainConfig, flatten, shown
from esper.leyline.config.algorithm import algorithms, learns_by_acting
from esper.leyline.config.reading import run_settings
from esper.leyline.config.setting import SEEDS, about
from esper.leyline.disk import DamagedFile, read_sealed_json, replace_sealed_json
from esper.leyline.errors import UsageError
from esper.leyline.notices import notice
from esper.runtime.gate import Permission
from esper.scripts.output import outlive_output
from esper.scripts.report import report_runs
from esper.scripts.watched import resume, train
from esper.simic.run.checkpoint import latest_identity, latest_round
from esper.simic.run.identity import lasting_settings
from esper.simic.run.run_directory import create_directory, directory_of_runs
from esper.simic.training.setup import plugin_paths

SETTINGS = "seeds.json"
"""What all runs of a directory share."""
NOTHING = "-"
FORMS = {
    "gain": "+.1f",
    "validation_gain": "+.1f",
    "episode_return": "+.3f",
    "added_parameters": ".0f",
    "length": ".1f",
}
_SIGNAL = 128
"""An exit status above this is that of a signal, which ends all seeds."""


def train_seeds(
    policy: str,
    config: TrainConfig,
    count: int,
    flags: dict[str, Any],
    words: Sequence[str],
    permission: Permission,
) -> int:
    """Train with ``count`` seeds, from that of the settings on; the largest exit status of a run.

    Args:
        policy: see ``run_training``.
        config: settings of the first run.
        count: number of seeds.
        flags: settings from the command line, which may change those of an interrupted run.
        words: the words of the command, to show the command that goes on.
        permission: see ``run_training``.

    Raises:
        UsageError: the directory belongs to other settings, or a run refuses to start.
    """
    seeds = range(config.world.seed, config.world.seed + count)
    if seeds[-1] not in SEEDS:
        raise UsageError(f"seeds: seed {seeds[-1]} would be too large; take a smaller --seed")
    outlive_output()
    folder, new_folders = _open(policy, config)
    console = Console()
    status = 0
    try:
        for seed in seeds:
            run = folder / f"seed-{seed}"
            status = max(status, _train_one(policy, config, run, seed, flags, permission))
            if status > _SIGNAL:
                break
    except KeyboardInterrupt:
        _withdraw(new_folders)
        if not folder.exists():
            raise
        status = _SIGNAL + 2
    except BaseException:
        _withdraw(new_folders)
        raise
    if status > _SIGNAL:
        console.out(f"to go on: {_again(policy, words, folder.name)}", highlight=False)
        return status
    runs = {seed: folder / f"seed-{seed}" for seed in seeds}
    console.print(training_seeds_table({seed: final_figures(run) for seed, run in runs.items()}))
    console.out(f"directory of the runs: {folder}", highlight=False)
    # A Gymnasium task has no report.
    if config.gymnasium.gym is None:
        report_runs(console, list(runs.values()), folder / "report.html")
    return status


def training_seeds_table(results: dict[int, dict[str, float]]) -> Table:
    """A row of figures for each seed, and their means with 95 % intervals over seeds."""
    gym = any("length" in figures for figures in results.values())
    names = GYM if gym else GROWTH
    values = np.array([[each.get(name, np.nan) for each in results.values()] for name in names])
    estimate = interval(values)
    table = Table(title=f"{len(results)} seeds, means of the last tenth of their rounds")
    table.add_column("seed")
    for label in names.values():
        table.add_column(label, justify="right")
    for column, seed in enumerate(results):
        cells = zip(names, values[:, column], strict=True)
        table.add_row(str(seed), *(_figure(name, value) for name, value in cells))
    table.add_section()
    means = zip(names, estimate.mean, strict=True)
    table.add_row("mean", *(_figure(*mean) for mean in means))
    intervals = zip(names, estimate.low, estimate.high, strict=True)
    table.add_row("95 %", *(_interval(*ends) for ends in intervals))
    return table


def _figure(name: str, value: float) -> str:
    return format(value, FORMS[name]) if np.isfinite(value) else NOTHING


def _interval(name: str, low: float, high: float) -> str:
    return f"[{_figure(name, low)}, {_figure(name, high)}]" if np.isfinite(low) else NOTHING


def _train_one(
    policy: str,
    config: TrainConfig,
    run: Path,
    seed: int,
    flags: dict[str, Any],
    permission: Permission,
) -> int:
    """Train with one seed, or go on where it was stopped; the exit status."""
    run_config = replace(
        config,
        world=replace(config.world, seed=seed),
        output=replace(config.output, telemetry_dir=str(run.parent), name=run.name),
    )
    if not run.exists():
        return train(policy, run_config, False, permission)
    if not is_run(run):
        raise UsageError(f"name: {run} is in the way and no run; remove it")
    info, rounds = inspect(run), run_config.world.rounds
    # Of a run whose checkpoints were removed, nothing is left of what was learned.
    is_saved = policy not in algorithms() or latest_round(run) >= rounds
    if info.status == "finished" and info.rounds_done >= rounds and is_saved:
        print(f"{run} is finished")
        return 0
    if learns_by_acting(policy) and latest_identity(run) is not None:
        return resume(run, _changes(run_config, flags), False, permission)
    try:
        remove(run)
    except OSError as error:
        raise UsageError(f"name: cannot begin {run} anew ({error.strerror})") from error
    notice(f"{run} has no checkpoint, so it begins anew")
    return train(policy, run_config, False, permission)


def _changes(config: TrainConfig, flags: dict[str, Any]) -> dict[str, Any]:
    """The settings of this command that an interrupted run takes over."""
    fields = run_settings()
    excluded_names = ("telemetry_dir", "plugin")
    changes = {
        name: value
        for name, value in flags.items()
        if name in fields and about(fields[name]).on_resume and name not in excluded_names
    }
    return changes | {"rounds": config.world.rounds}


def _open(policy: str, config: TrainConfig) -> tuple[Path, list[Path]]:
    """The directory of the runs, and those of its parents and itself that were created.

    Raises:
        UsageError: it exists for other settings, or cannot be created.
    """
    name, directory = config.output.name, config.output.telemetry_dir
    settings = _shared_settings(policy, config)
    new_folders: list[Path] = []
    try:
        folder = Path(directory).expanduser() / (name or "")
        new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        parent = directory_of_runs(directory)
        if name is not None and (parent / name / SETTINGS).exists():
            _compare(parent / name, _read_settings(parent / name / SETTINGS), settings)
            return parent / name, []
        path = create_directory(parent, name, config)
        new_folders = [path, *(each for each in new_folders if each != path)]
        replace_sealed_json(path / SETTINGS, settings)
    except UsageError:
        _withdraw(new_folders[1:])
        raise
    except (OSError, ValueError, RuntimeError) as error:
        _withdraw(new_folders)
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"telemetry_dir: cannot write to {directory!r} ({reason}); choose another"
        ) from error
    return path, new_folders


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return read_sealed_json(path)
    except DamagedFile as error:
        raise UsageError(
            f"name: {path} is damaged ({error}); put it back, or give another --name"
        ) from error


def _withdraw(new_folders: list[Path]) -> None:
    """Remove the directories that were created if no run has begun in them."""
    with suppress(OSError):
        if new_folders and [path.name for path in new_folders[0].iterdir()] == [SETTINGS]:
            (new_folders[0] / SETTINGS).unlink()
    for path in new_folders:
        with suppress(OSError):
            path.rmdir()


def _shared_settings(policy: str, config: TrainConfig) -> dict[str, Any]:
    """What all runs of a directory share, as JSON."""
    settings = lasting_settings(run_settings(), flatten(config))
    settings["plugin"] = plugin_paths(config)
    run_names = ("seed", "name")
    shared = {"policy": policy} | {n: value for n, value in settings.items() if n not in run_names}
    plain: dict[str, Any] = json.loads(json.dumps(shared))
    return plain


def _compare(folder: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if before.get(name) != value:
            raise UsageError(
                f"{name}: the runs in {folder} have {shown(before.get(name))}, got {shown(value)}; "
                "give that, or another --name"
            )


def _again(policy: str, words: Sequence[str], name: str) -> str:
    """The command that goes on."""
    has_name = any(word == "--name" or word.startswith("--name=") for word in words)
    return shlex.join(["esper", "train", policy, *words, *([] if has_name else ["--name", name])])
