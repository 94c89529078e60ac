"""``esper grow --model``: ``esper.grow`` on a model in a user's file, beside a never-grown twin."""

import json
import sys
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from esper.leyline.config.setting import SEEDS, check_name
from esper.leyline.disk import replace_synced
from esper.leyline.errors import UsageError, suggestion
from esper.leyline.extras import require
from esper.own_models import samples
from esper.own_models.grafted_model import parameter_count
from esper.own_models.growing import grow
from esper.own_models.growth_result import GrowthResult
from esper.own_models.options import FailingBatch, GrowOptions, recipe_names, usable_device
from esper.own_models.training_loop import LEARNING_RATE
from esper.runtime import plugins
from esper.runtime.own_files import Loaders, OwnFile, find_own, set_seed
from esper.scripts.grow_arguments import GrowArguments, asked, check_writable, options_of
from esper.scripts.grown_files import FINISHED, read_finished, write_files
from esper.scripts.seeds_table import growth_seeds_table
from esper.simic.tools.grow import DEFAULT

FOLDER = Path("grown")
"""Where results go if no folder is given."""
ASKED, PROGRESS = "settings.json", "progress.pt"
"""What was asked for, and where growth stands until it has ended."""
OPTIMIZERS = {"adamw": AdamW, "adam": Adam, "sgd": partial(SGD, momentum=0.9)}


def grow_model(given: GrowArguments) -> int:
    """Train and grow the model of a file, and write the better of it and its twin.

    Returns:
        exit status: 1 if a file that was written does not compute what the module does.

    Raises:
        UsageError: a setting or a file is wrong, or the folder holds another result.
    """
    given = replace(given, policy=given.policy or DEFAULT)
    assert given.model is not None
    check_name(given.name)
    last = given.seed + given.seeds - 1
    if last not in SEEDS:
        raise UsageError(f"seeds: the last seed is {last}, at least 2^32; give a smaller --seed")
    _check_files(given)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    set_seed(given.seed)
    for path in given.plugin:
        plugins.load(path)
    own = find_own(given.model, given.data)
    arguments = _arguments(given, own.recipe(options_of(given)["epochs"]))
    folder = given.out or FOLDER / (given.name or own.name)
    if given.seeds == 1:
        return _one(given, own, arguments, folder, given.seed)
    status, found = 0, {}
    for seed in range(given.seed, given.seed + given.seeds):
        print(f"seed {seed}:")
        status = max(status, _one(given, own, arguments, folder / f"seed-{seed}", seed))
        place = folder / f"seed-{seed}"
        found[seed] = read_finished(place) if (place / FINISHED).exists() else None
    print(growth_seeds_table(found))
    return status


def _one(
    given: GrowArguments, own: OwnFile, arguments: dict[str, Any], folder: Path, seed: int
) -> int:
    """Grow with one seed; the exit status."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    if _begun(folder, _asked(given, own, seed)):
        before = read_finished(folder)
        print(f"{before['text']}\n{folder} was finished before; remove it to grow anew")
        return int(before["status"])
    try:
        result, inputs = _grown(given, own, arguments, folder, seed)
        chosen = result if given.keep else result.better
        _check_finite(chosen)
    except BaseException as error:
        if isinstance(error, Diverged):
            (folder / PROGRESS).unlink(missing_ok=True)
        if (folder / PROGRESS).exists():
            if isinstance(error, KeyboardInterrupt):
                print("\nstopped; rerun the same command to resume")
        else:
            (folder / ASKED).unlink()
            for each in made:
                each.rmdir()
        if isinstance(error, FailingBatch):
            raise FailingBatch(error.name, error.cause, own.describe(error.cause)) from error
        if isinstance(error, Exception) and not isinstance(error, UsageError):
            raise UsageError(f"model: training fails ({own.describe(error)})") from error
        raise
    text = f"{result.comparison()}\n{_verdict(result, given.keep)}"
    print(text)
    status = write_files(folder, result, chosen, own, inputs, given.onnx, text)
    (folder / PROGRESS).unlink(missing_ok=True)
    return status


def _grown(
    given: GrowArguments, own: OwnFile, arguments: dict[str, Any], folder: Path, seed: int
) -> tuple[GrowthResult, Any]:
    """The result, and a batch of inputs on the CPU."""
    assert given.policy is not None
    # Again: the file may have drawn when it was run, which it is only once.
    set_seed(seed)
    model, loaders = own.build(), own.loaders()
    inputs = _inputs(loaders, arguments)
    if not (folder / PROGRESS).exists():
        print(
            f"{own.model}: {type(model).__name__}, {parameter_count(model):,} parameters; {folder}"
        )
    result = grow(
        model,
        loaders.train,
        loaders.validation,
        test_loader=loaders.test,
        policy=given.policy,
        seed=seed,
        twin=given.policy != "never",
        checkpoint=folder / PROGRESS,
        **arguments,
    )
    return result, inputs


class Diverged(UsageError):
    """Training ended in a network whose loss is not finite."""


def _check_finite(chosen: GrowthResult) -> None:
    """Refuse to write a network that computes nothing.

    Raises:
        Diverged: its validation loss is not finite.
    """
    if isfinite(chosen.validation.loss):
        return
    lost = [record.epoch for record in chosen.history if not isfinite(record.loss)]
    when = f"from epoch {lost[0]} on" if lost else "after the last epoch"
    raise Diverged(
        f"lr: the validation loss is {chosen.validation.loss} {when}, so nothing was written; "
        "lower --lr, give --clip, or look for NaN in the data with `esper tasks check`"
    )


def _verdict(result: GrowthResult, keep: bool) -> str:
    """Whether growth paid, and which network is handed back."""
    if result.twin is None:
        return "trained without growing: policy never"
    own = "the grown network" if result.seeds else "the network that lost its seeds"
    if isnan(result.twin.worth) and not isnan(result.worth):
        return f"warning: the never-grown twin diverged; {own} is written"
    gain = result.worth - result.twin.worth
    after = f"{gain:+.4f} on validation after the price"
    if not any(record.actions for record in result.history):
        return "nothing grew: the network is that of the plain loop"
    if result.paid:
        return f"growth paid: {after}, against its never-grown twin; one pair of runs"
    handed = (
        f"{own} is written because of --keep"
        if keep
        else f"the never-grown twin is written; --keep writes {own}"
    )
    reason = "growth did not pay" if result.seeds else "no seed was kept"
    return f"warning: {reason}: {after}; {handed}"


def _check_files(given: GrowArguments) -> None:
    """Refuse before growth what would fail after it."""
    if given.out is not None and (given.out.suffix == ".pt2" or given.out.is_file()):
        raise UsageError(
            f"out: with --model several files are written; give a folder, not {given.out}"
        )
    if given.onnx is not None:
        if given.seeds > 1:
            raise UsageError("onnx: several seeds would write one file; omit it")
        check_writable("onnx", given.onnx, ".onnx")
        require("onnx", "onnx", "onnxruntime")
    if (device := options_of(given).get("device")) is not None:
        usable_device(device)


def _arguments(given: GrowArguments, recipe: dict[str, Any]) -> dict[str, Any]:
    """What the recipe and the flags say; a flag comes first.

    Raises:
        UsageError: the recipe has an unknown entry, or a flag would change what it makes itself.
    """
    known = recipe_names(GrowOptions)
    for name in recipe:
        if name not in known:
            hint = suggestion(name, known, f"it may give {', '.join(known)}")
            raise UsageError(f"recipe: it has no entry {name!r}; {hint}")
    flags = {"lr": given.lr, "weight_decay": given.weight_decay}
    changed = [name for name, value in flags.items() if value is not None]
    if "optimizer" in recipe and given.optimizer is None and changed:
        raise UsageError(
            f"{changed[0]}: the recipe of the file makes the optimizer; change it there, or give "
            "--optimizer"
        )
    own = options_of(given)
    if given.optimizer is not None or changed:
        own["optimizer"] = _optimizer(given)
    if given.schedule is not None:
        own["scheduler"] = (
            partial(CosineAnnealingLR, T_max=own["epochs"]) if given.schedule == "cosine" else None
        )
        recipe = {name: value for name, value in recipe.items() if name != "scheduler"}
    return recipe | own


def _optimizer(given: GrowArguments) -> partial[Optimizer]:
    more = {} if given.weight_decay is None else {"weight_decay": given.weight_decay}
    kind: Any = OPTIMIZERS[given.optimizer or "adamw"]
    return partial(kind, lr=LEARNING_RATE if given.lr is None else given.lr, **more)


def _asked(given: GrowArguments, own: OwnFile, seed: int) -> dict[str, Any]:
    """Everything on which the result depends, as JSON."""
    onnx = None if given.onnx is None else str(given.onnx)
    question: dict[str, Any] = {"onnx": onnx, "seed": seed}
    question |= {"model": own.model, "data": own.data, "sha256": own.sha256}
    if given.plugin:
        question["plugin"] = {path: plugins.digest(path) for path in given.plugin}
    entries: dict[str, Any] = json.loads(json.dumps(question | asked(given)))
    return entries


def _begun(folder: Path, asked: dict[str, Any]) -> bool:
    """Note what was asked for in the folder; whether its result is finished.

    Raises:
        UsageError: the folder belongs to other settings, or cannot be written.
    """
    path = folder / ASKED
    try:
        if path.exists():
            before = json.loads(path.read_text())
            _compare(folder, before, asked)
            return (folder / FINISHED).exists()
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"out: {folder} is not empty; give a folder that is")
        folder.mkdir(parents=True, exist_ok=True)
        replace_synced(path, (json.dumps(asked, indent=2) + "\n").encode())
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"out: cannot use {folder} ({reason}); give another folder") from error
    return False


def _compare(folder: Path, before: dict[str, Any], asked: dict[str, Any]) -> None:
    for name, given in asked.items():
        began = before.get(name)
        if began == given:
            continue
        if name == "sha256":
            changed = next(each for each in given if given[each] != (began or {}).get(each))
            raise UsageError(
                f"{changed}: the file changed since growth in {folder} began; give another --out, "
                "or remove the folder"
            )
        raise UsageError(
            f"{name}: growth in {folder} began with {began}, got {given}; give that, another "
            "--out, or remove the folder"
        )


def _inputs(loaders: Loaders, arguments: dict[str, Any]) -> Any:
    """A batch of inputs on the CPU."""
    unpack = samples.unpack_for(arguments.get("loss"), arguments.get("unpack", samples.unpack))
    batch = samples.first_batch(loaders.validation, "data")
    return samples.moved(unpack(batch)[0], torch.device("cpu"))
