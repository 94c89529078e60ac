"""A Python file that rebuilds a grown module without Esper: the sources of its seeds, and where
they hang."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper.kasmina.ops import norm_groups
from esper.own_models import seed_modules
from esper.own_models.attachment import grown_seeds

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
