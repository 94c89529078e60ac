"""Writing, reading and rebuilding a grown module, and the file from which ``grow`` resumes."""

import inspect
import io
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.kasmina.ops import norm_groups
from esper.leyline.disk import replace_synced
from esper.leyline.errors import UsageError
from esper.own_models import seed_modules
from esper.own_models.attachment import SEED, attach, grown_seeds, set_hook, strip
from esper.own_models.samples import loader_generators
from esper.own_models.seed_modules import BRANCHES, FORMS, LAYOUTS, Seed, add_seed

STATE_FILE, CODE_FILE = "state_dict.pt", "rebuild.py"
"""What ``save_grown`` writes."""

_IMPORTS = """from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
"""
_REBUILD = '''

def rebuild(model: nn.Module, state: dict | str) -> nn.Module:
    """Attach the seeds to ``model``, built as before it grew, and load ``state`` (or its file)."""
    for point, (blueprint, channels, layout, form) in SEEDS.items():
        attach_seed(model.get_submodule(point), Seed(blueprint, channels, layout, form))
    if isinstance(state, str):
        state = torch.load(state, map_location="cpu", weights_only=True)
    model.load_state_dict(state)
    return model
'''


def save_grown(model: nn.Module, folder: str | Path) -> Path:
    """Write a grown module as ``STATE_FILE`` and ``CODE_FILE``, see ``GrowthResult.save``.

    Args:
        model: a grown module.
        folder: made if it does not exist.

    Returns:
        the folder.
    """
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), where / STATE_FILE)
    (where / CODE_FILE).write_text(rebuilding_code(model))
    return where


def rebuilding_code(model: nn.Module) -> str:
    """The source of a module with a function ``rebuild(model, state)``; it imports torch alone.

    Args:
        model: a grown module.
    """
    seeds = grown_seeds(model)
    branches = {
        layout: {
            seed.blueprint: seed_modules.BRANCHES[layout][seed.blueprint]
            for seed in seeds.values()
            if seed.layout == layout
        }
        for layout in sorted({seed.layout for seed in seeds.values()})
    }
    used: list[Any] = [build for found in branches.values() for build in found.values()]
    parts = [
        '"""Rebuilds a module that Esper grew; needs torch alone."""',
        _IMPORTS,
        f"FORMS, LAYOUTS = {seed_modules.FORMS!r}, {seed_modules.LAYOUTS!r}\n",
        *(_source(part) for part in _needed(used)),
        "BRANCHES = " + _table(branches),
        _source(seed_modules.Seed),
        _source(seed_modules.add_seed),
        _source(seed_modules.attach_seed),
        "SEEDS = {\n"
        + "".join(
            f"    {point!r}: {(s.blueprint, s.channels, s.layout, s.form)!r},\n"
            for point, s in seeds.items()
        )
        + "}",
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n" + _REBUILD


def _source(part: Any) -> str:
    return "\n" + inspect.getsource(part)


def _needed(used: list[Any]) -> list[Any]:
    """The definitions of ``seed_modules`` on which ``used`` depend, each before its users."""
    own: dict[str, Any] = {
        name: part
        for name, part in vars(seed_modules).items()
        if getattr(part, "__module__", None) == seed_modules.__name__
    } | {"norm_groups": norm_groups}
    found: list[Any] = []

    def add(part: Any) -> None:
        if part in found:
            return
        for name in _names(part):
            if name in own and own[name] is not part:
                add(own[name])
        found.append(part)

    # The seed itself is written after the table of branches.
    for part in [*used, seed_modules.chain]:
        add(part)
    return found


def _names(part: Any) -> set[str]:
    """Global names that a function, or the methods of a class, use."""
    methods: list[Callable[..., Any]] = (
        [m for m in vars(part).values() if inspect.isfunction(m)]
        if inspect.isclass(part)
        else [part]
    )
    return {name for method in methods for name in method.__code__.co_names}


def _table(branches: dict[str, dict[str, Any]]) -> str:
    rows = [
        f"    {layout!r}: {{"
        + ", ".join(f"{name!r}: {build.__name__}" for name, build in found.items())
        + "},\n"
        for layout, found in branches.items()
    ]
    return "{\n" + "".join(rows) + "}"


def load_grown(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Attach the seeds that ``state`` describes to ``model`` and load it, in place.

    Args:
        model: a module built like the one that was grown, without seeds.
        state: ``state_dict()`` of the grown module.

    Returns:
        ``model``, grown and trainable.

    Raises:
        UsageError: ``model`` already has seeds, ``state`` does not fit it, or a blueprint is
            unknown.
    """
    if grown_seeds(model):
        raise UsageError("load_grown: the model already has seeds; give a newly built one")
    ending = f".{SEED}.recipe"
    points = [name.removesuffix(ending) for name in state if name.endswith(ending)]
    try:
        for point in points:
            _rebuild(model, point, state)
        _check_shapes(model, state)
    except UsageError:
        strip(model)
        raise
    model.load_state_dict(state)
    return model


def _rebuild(model: nn.Module, point: str, state: Mapping[str, Any]) -> None:
    """Attach the seed behind the module ``point`` in the shape that ``state`` gives it."""
    prefix = f"{point}.{SEED}."
    form, layout, channels = (int(number) for number in state[f"{prefix}recipe"])
    own = {name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)}
    names = own & set(BRANCHES[LAYOUTS[layout]])
    if len(names) != 1:
        raise UsageError(
            f"load_grown: the seed behind {point!r} has an unknown blueprint; "
            "use the version of Esper that grew it"
        )
    with torch.random.fork_rng(devices=[]):
        seed = Seed(names.pop(), channels, LAYOUTS[layout], FORMS[form])
    try:
        attach(model, point, seed)
    except AttributeError:
        raise UsageError(
            f"load_grown: {type(model).__name__} has no module {point!r}; "
            "build the model as it was built before it grew"
        ) from None
    set_hook(model.get_submodule(point), add_seed)


def _check_shapes(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse a state whose names or shapes are not those of ``model``, before anything is
    loaded."""

    def shapes(named: Mapping[str, Any]) -> dict[str, object]:
        return {name: getattr(value, "shape", None) for name, value in named.items()}

    own, given = shapes(model.state_dict()), shapes(state)
    differing = [name for name in own | given if own.get(name, 0) != given.get(name, 0)]
    if differing:
        raise UsageError(
            f"load_grown: {differing[0]!r} of the state does not fit {type(model).__name__} "
            f"({len(differing)} such names); build the model as it was built before it grew"
        )


FORMAT = 1
"""Version of what the file holds."""


def check_folder(path: Path) -> None:
    """Refuse a file that could not be written.

    Raises:
        UsageError: its folder does not exist.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"checkpoint: cannot write {path}; give a file in a folder that exists")


def write(path: Path, checkpoint: dict[str, Any]) -> None:
    """Replace the file atomically: a process that is killed leaves the old one or the new one.

    Raises:
        UsageError: the disk failed or is full; the old file stays.
    """
    content = io.BytesIO()
    torch.save({"format": FORMAT, **checkpoint}, content)
    try:
        replace_synced(path, content.getvalue())
    except OSError as error:
        kept = "; the file of the epoch before stays" if path.exists() else ""
        raise UsageError(
            f"checkpoint: cannot write {path} ({error.strerror}){kept}; make room and start again"
        ) from error


def read(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What ``write`` wrote; None if there is no file.

    Args:
        path: the file.
        settings: settings of this call, which must be those that began the file.

    Raises:
        UsageError: it cannot be read, or belongs to other settings.
    """
    if not path.exists():
        return None
    try:
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        known = checkpoint["format"]
    except Exception as error:
        # What a damaged file raises is undocumented.
        raise UsageError(
            f"checkpoint: {path} is damaged or not a checkpoint of grow; remove it to begin anew"
        ) from error
    if known != FORMAT:
        raise UsageError(
            f"checkpoint: {path} has format {known}, this version writes {FORMAT}; "
            "remove it to begin anew"
        )
    for name, value in settings.items():
        began = checkpoint["settings"].get(name)
        if str(began) != str(value):
            if name == "model":
                began, value = "other parameters", "these"
            raise UsageError(
                f"{name}: growth in {path} began with {began}, got {value}; give that, or "
                "another file"
            )
    return checkpoint


def random_state(loaders: Iterable[object]) -> dict[str, Any]:
    """The states of torch's, numpy's and python's generators, and of those of the loaders."""
    arrays: Any = np.random.get_state()
    name, keys, *rest = arrays
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": random.getstate(),
        "loaders": [generator.get_state() for generator in loader_generators(loaders)],
    }


def set_random_state(state: dict[str, Any], loaders: Iterable[object]) -> None:
    """The inverse of ``random_state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    for generator, own in zip(loader_generators(loaders), state["loaders"], strict=True):
        generator.set_state(own)
