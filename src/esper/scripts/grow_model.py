"""``esper grow --model``: ``esper.grow`` on a model in a user's file, beside a never-grown twin."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from esper.karn.grown_runs import LOCK, PROGRESS, RESULT, SETTINGS
from esper.kasmina.wider_layers import parameter_count
from esper.leyline.config.setting import SEEDS, check_name
from esper.leyline.disk import DamagedFile, read_sealed_json, replace_sealed_json
from esper.leyline.errors import UsageError, suggestion
from esper.leyline.extras import require
from esper.leyline.phases import phase
from esper.leyline.run_files import EVENTS_LOCK, lock_folder
from esper.own_models import samples
from esper.own_models.growing import grow
from esper.own_models.growth_result import GrowthResult
from esper.own_models.options import FailingBatch, GrowOptions, recipe_names, usable_device
from esper.own_models.training_loop import LEARNING_RATE
from esper.runtime import plugins
from esper.runtime.gate import Permission
from esper.runtime.own_files import Loaders, OwnFile, files_of, find_own, set_seed
from esper.scripts.grow import GrowArguments, check_writable, options_of, result_settings
from esper.scripts.grown_files import growth_seeds_table, read_finished, write_files
from esper.simic.tools.grow import GrowingPolicy, is_run_directory

FOLDER = Path("grown")
"""Where results go if no folder is given."""
OPTIMIZERS = {"adamw": AdamW, "adam": Adam, "sgd": partial(SGD, momentum=0.9)}


def grow_model(settings: GrowArguments) -> int:
    """Train and grow the model of a file, and write the better of it and its twin.

    Returns:
        exit status: 1 if a file that was written does not compute what the module does.

    Raises:
        UsageError: a setting or a file is wrong, or the folder holds another result.
    """
    settings = replace(settings, policy=settings.policy or "widen")
    assert settings.model is not None
    assert settings.policy is not None
    check_name(settings.name)
    last = settings.seed + settings.seeds - 1
    if last not in SEEDS:
        raise UsageError(f"seeds: the last seed is {last}, at least 2^32; give a smaller --seed")
    _check_files(settings)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    set_seed(settings.seed)
    permission = Permission(
        (*settings.plugin, *files_of(settings.model, settings.data)), trust=settings.trust
    )
    for path in settings.plugin:
        plugins.load(path, permission)
    if is_run_directory(settings.policy):
        GrowingPolicy.named(settings.policy, permission)
    source = find_own(settings.model, settings.data, permission)
    arguments = _arguments(settings, source.recipe(options_of(settings)["epochs"]))
    folder = settings.out or FOLDER / (settings.name or source.name)
    if settings.seeds == 1:
        return _one(settings, source, arguments, folder)
    status, results = 0, {}
    for seed in range(settings.seed, settings.seed + settings.seeds):
        print(f"seed {seed}:")
        run = folder / f"seed-{seed}"
        status = max(status, _one(replace(settings, seed=seed), source, arguments, run))
        results[seed] = read_finished(run) if (run / RESULT).exists() else None
    print(growth_seeds_table(results))
    return status


def _one(settings: GrowArguments, source: OwnFile, arguments: dict[str, Any], folder: Path) -> int:
    """Grow with one seed; the exit status."""
    new_folders = [each for each in (folder, *folder.parents) if not each.exists()]
    question = _all_settings(settings, source)
    # Without the lock, which a finished folder that cannot be written would not grant.
    if (folder / RESULT).exists() and _begun(folder, question):
        return _finished_before(folder)
    with _only_writer(folder):
        if _begun(folder, question):
            return _finished_before(folder)
        return _grow_and_write(settings, source, arguments, folder, new_folders)


def _finished_before(folder: Path) -> int:
    before = read_finished(folder)
    print(f"{before.text}\n{folder} was finished before; remove it to grow anew")
    return before.status


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder, which is made if it is missing.

    Raises:
        UsageError: another process works in it, or it cannot be written.
    """
    with lock_folder(folder, LOCK, "out"):
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink()


def _grow_and_write(
    settings: GrowArguments,
    source: OwnFile,
    arguments: dict[str, Any],
    folder: Path,
    new_folders: list[Path],
) -> int:
    """Grow in a folder that this process has locked; the exit status."""
    try:
        result, inputs = _grown(settings, source, arguments, folder)
        network = result if settings.keep else result.better
        _check_finite(network)
    except BaseException as error:
        if isinstance(error, Divergence):
            (folder / PROGRESS).unlink(missing_ok=True)
        if (folder / PROGRESS).exists():
            if isinstance(error, KeyboardInterrupt):
                print("\nstopped; rerun the same command to resume")
        else:
            _withdraw(folder, new_folders)
        if isinstance(error, FailingBatch):
            reason = source.describe(error.cause)
            raise FailingBatch(error.name, error.cause, reason, error.hint) from error
        if isinstance(error, Exception) and not isinstance(error, UsageError):
            raise UsageError(f"model: training fails ({source.describe(error)})") from error
        raise
    text = f"{result.comparison()}\n{result.verdict()}{_note_on_files(result, settings.keep)}"
    print(text)
    with phase("writing the files"):
        status = write_files(folder, result, network, source, inputs, settings.onnx, text)
    (folder / PROGRESS).unlink(missing_ok=True)
    return status


def _withdraw(folder: Path, new_folders: list[Path]) -> None:
    """Remove what was begun; somebody may have removed the folder before."""
    for name in (SETTINGS, LOCK, "events.jsonl", EVENTS_LOCK):
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):
        for each in new_folders:
            each.rmdir()


def _grown(
    settings: GrowArguments, source: OwnFile, arguments: dict[str, Any], folder: Path
) -> tuple[GrowthResult, Any]:
    """The result, and a batch of inputs on the CPU."""
    assert settings.policy is not None
    # Again: the file may have drawn when it was run, which it is only once.
    set_seed(settings.seed)
    model, loaders = source.build(), source.loaders()
    inputs = _inputs(loaders, arguments)
    if not (folder / PROGRESS).exists():
        size = f"{parameter_count(model):,} parameters"
        print(f"{source.model}: {type(model).__name__}, {size}; {folder}")
    result = grow(
        model,
        loaders.train,
        loaders.validation,
        test_loader=loaders.test,
        policy=settings.policy,
        seed=settings.seed,
        twin=settings.policy != "never",
        checkpoint=folder / PROGRESS,
        run_directory=folder,
        **arguments,
    )
    return result, inputs


class Divergence(UsageError):
    """Training ended in a network whose loss is not finite."""


def _check_finite(result: GrowthResult) -> None:
    """Refuse to write a network that computes nothing.

    Raises:
        Divergence: its validation loss is not finite.
    """
    if isfinite(result.validation.loss):
        return
    divergent_epochs = [
        record.epoch for record in result.history if not isfinite(record.validation.loss)
    ]
    when = f"from epoch {divergent_epochs[0]} on" if divergent_epochs else "after the last epoch"
    raise Divergence(
        f"lr: the validation loss is {result.validation.loss} {when}, so nothing was written; "
        "lower --lr, give --clip, or look for NaN in the data with `esper tasks check`"
    )


def _note_on_files(result: GrowthResult, keep: bool) -> str:
    """Which network is written, and how to get the other."""
    actions = any(record.actions for record in result.history)
    if result.twin is None or result.better is result or not actions:
        return ""
    network = "the grown network" if result.grew else "the network that lost its seeds"
    if keep:
        return f"\nwarning: {network} is written because of --keep"
    return f"\nthe never-grown twin is written; --keep writes {network}"


def _check_files(settings: GrowArguments) -> None:
    """Refuse before growth what would fail after it."""
    if settings.out is not None and (settings.out.suffix == ".pt2" or settings.out.is_file()):
        raise UsageError(
            f"out: with --model several files are written; give a folder, not {settings.out}"
        )
    if settings.onnx is not None:
        if settings.seeds > 1:
            raise UsageError("onnx: several seeds would write one file; omit it")
        check_writable("onnx", settings.onnx, ".onnx")
        require("onnx", "onnx", "onnxruntime")
    if (device := options_of(settings).get("device")) is not None:
        usable_device(device)


def _arguments(settings: GrowArguments, recipe: dict[str, Any]) -> dict[str, Any]:
    """What the recipe and the flags say; a flag comes first.

    Raises:
        UsageError: the recipe has an unknown entry, or a flag would change what it makes itself.
    """
    entries = recipe_names(GrowOptions)
    for name in recipe:
        if name not in entries:
            hint = suggestion(name, entries, f"it may give {', '.join(entries)}")
            raise UsageError(f"recipe: it has no entry {name!r}; {hint}")
    flags = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    rates = [name for name, value in flags.items() if value is not None]
    if "optimizer" in recipe and settings.optimizer is None and rates:
        raise UsageError(
            f"{rates[0]}: the recipe of the file makes the optimizer; change it there, or give "
            "--optimizer"
        )
    options = options_of(settings)
    if settings.optimizer is not None or rates:
        options["optimizer"] = _optimizer(settings)
    if settings.schedule is not None:
        cosine = partial(CosineAnnealingLR, T_max=options["epochs"])
        options["scheduler"] = cosine if settings.schedule == "cosine" else None
        recipe = {name: value for name, value in recipe.items() if name != "scheduler"}
    return recipe | options


def _optimizer(settings: GrowArguments) -> partial[Optimizer]:
    more = {} if settings.weight_decay is None else {"weight_decay": settings.weight_decay}
    kind: Any = OPTIMIZERS[settings.optimizer or "adamw"]
    return partial(kind, lr=LEARNING_RATE if settings.lr is None else settings.lr, **more)


def _all_settings(settings: GrowArguments, source: OwnFile) -> dict[str, Any]:
    """Everything on which the result depends, as JSON."""
    question: dict[str, Any] = {
        "onnx": None if settings.onnx is None else str(settings.onnx),
        "seed": settings.seed,
        "model": source.model,
        "data": source.data,
        "sha256": source.sha256,
    }
    if settings.plugin:
        question["plugin"] = {path: plugins.digest(path) for path in settings.plugin}
    entries: dict[str, Any] = json.loads(json.dumps(question | result_settings(settings)))
    return entries


def _begun(folder: Path, settings: dict[str, Any]) -> bool:
    """Note what was asked for in the folder; whether its result is finished.

    Raises:
        UsageError: the folder belongs to other settings, or cannot be written.
    """
    path = folder / SETTINGS
    try:
        if path.exists():
            before = read_sealed_json(path)
            _compare(folder, before, settings)
            return (folder / RESULT).exists()
        if any(each.name != LOCK for each in folder.iterdir()):
            raise UsageError(f"out: {folder} is not empty; give a folder that is")
        replace_sealed_json(path, settings)
    except DamagedFile as error:
        raise UsageError(
            f"out: {path} is damaged ({error}); remove {folder} to grow anew"
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"out: cannot use {folder} ({reason}); give another folder") from error
    return False


def _compare(folder: Path, earlier: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        began = earlier.get(name)
        if began == value:
            continue
        if name == "sha256":
            before = began if isinstance(began, dict) else {}
            part = next(each for each in value if value[each] != before.get(each))
            raise UsageError(
                f"{part}: the file changed since growth in {folder} began; give another --out, "
                "or remove the folder"
            )
        raise UsageError(
            f"{name}: growth in {folder} began with {began}, got {value}; give that, another "
            "--out, or remove the folder"
        )


def _inputs(loaders: Loaders, arguments: dict[str, Any]) -> Any:
    """A batch of inputs on the CPU."""
    unpack = samples.unpack_for(arguments.get("loss"), arguments.get("unpack", samples.unpack))
    batch = samples.first_batch(loaders.validation, "data")
    return samples.to_device(unpack(batch)[0], torch.device("cpu"))
